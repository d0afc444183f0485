"""A real, small byte-level tokenizer with a chat template, made in memory and read by the real ``Tokenizer.load``."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from workers.tokenizer import Tokenizer

BOS, EOS = 0, 1
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = ["the quick brown fox jumps over the lazy dog", "the capital of the country", "user assistant system tool"] * 20


@cache
def tiny_tokenizer(context: int = 512) -> Tokenizer:
    """Ids 0 and 1 are ``<|im_start|>`` and ``<|im_end|>`` (the end token), then all bytes, then a few merges."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), context)
        return Tokenizer.load(folder)


def write_tokenizer(folder: Path, context: int = 512) -> None:
    """Write ``tokenizer.json`` and its companions."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    model = {"eos_token_id": EOS, "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": context}
    (folder / "config.json").write_text(json.dumps(model))
