"""A small byte-level BPE tokenizer with control tokens and a chat template, in a model directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "What is the capital of France? The capital of France is Paris.",
    "Die Straße führt über die Brücke. Größe, Maß, süß.",
    "日本語の文章です。東京は日本の首都です。",
    "emoji 😀 😃 👍🏽 👩‍👩‍👧‍👦 and music 𝄞",
    "def f(x):\n    return x + 1\n\n\n",
    "user assistant system tool\n",
] * 4
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write(directory: Path, template: str | None = CHATML, *, special: Sequence[str] = (), **config: Any) -> Path:
    """Write the files of a model that has this tokenizer, and more control tokens (``special``).

    ``config`` goes into ``tokenizer_config.json``.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("    ", special=False)])
    tokenizer.add_special_tokens(list(special))
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, **config}
    if template is not None:
        settings["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text(json.dumps({"vocab_size": 1024, "max_position_embeddings": 512}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    return directory
