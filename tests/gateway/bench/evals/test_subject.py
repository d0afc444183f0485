"""What a subject says is what its model finds likeliest, also with several block tables (windows)."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.bench.evals.subject import open_subject
from tests.workers.model import tiny
from workers.config import EngineConfig

TEXT = "The road to the mill runs along the river and is dry in summer."
WINDOWED = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 17,
}


@pytest.mark.parametrize(("family", "changes"), [("llama", {}), ("gemma3_text", WINDOWED)])
def test_answers_are_greedy(family: str, changes: dict[str, object], tmp_path: Path) -> None:
    """The first token of the answer is the likeliest after the text, by the other way of asking."""
    source = tiny.write_directory(tiny.model(3, family, **changes), tmp_path)
    engine = EngineConfig(dtype="float32", device="cpu", threads=1, blocks=64, attention="batched")
    subject = open_subject(str(source), engine)
    answers = subject.answer([TEXT, TEXT + TEXT], 1)
    for text, answer in zip((TEXT, TEXT + TEXT), answers, strict=True):
        likeliest = subject.read(text + "x").likeliest[subject.tokens(text) - 1]
        assert answer == subject._tokenizer.decode([likeliest])
