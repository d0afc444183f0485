"""What a driver says, over an engine that is scripted; and real driver processes, our engine's and broken ones."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.bench import load
from gateway.bench.load import Load, Request
from gateway.bench.peers import host, known, wire
from gateway.bench.peers.host import driving
from gateway.bench.peers.known import Installed, Peer
from gateway.bench.peers.wire import Settings
from gateway.bench.pump import News
from gateway.bench.report import BenchError

SMALL = Settings(max_running=4, max_step_tokens=64, max_context=128, kv_tokens=1024, dtype="float32", threads=1)


class Echo:
    """Answers with the prompt's first tokens, one per step."""

    def __init__(self, model: str, settings: Settings) -> None:
        self.made_of = (model, settings)
        self._left: dict[str, list[int]] = {}

    def submit(self, request: Request) -> None:
        self._left[request.id] = list(request.tokens[: request.max_tokens])

    def step(self) -> list[News]:
        news = []
        for name, tokens in list(self._left.items()):
            news.append(News(name, [tokens.pop(0)], finished=not tokens, cached=2))
            if not tokens:
                del self._left[name]
        return news

    def versions(self) -> dict[str, str]:
        return {"echo": "1"}


def talk(*messages: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
    out = io.StringIO()
    commands = io.StringIO("".join(json.dumps(message) + "\n" for message in messages))
    code = wire.serve(Echo, commands, out)
    return code, [json.loads(line) for line in out.getvalue().splitlines()]


def test_open_and_run() -> None:
    work = Load(load.uniform("w", 3, 8, 4, 5000, 2).requests, 2, keep_answers=True)
    code, answers = talk(
        {"op": "open", "model": "m", "settings": SMALL.to_json()}, {"op": "run", "load": work.to_json()}
    )
    assert code == 0
    ready, *_, result = answers
    assert (ready["event"], ready["versions"]) == ("ready", {"echo": "1"})
    assert result["event"] == "result"
    assert [line["answer"] for line in result["lines"]] == [list(request.tokens[:4]) for request in work.requests]
    assert all(len(line["times"]) == 4 and line["cached"] == 2 for line in result["lines"])
    assert result["peak_rss_bytes"] > 0


@pytest.mark.parametrize("message", [{"op": "run", "load": {}}, {"op": "dance"}])
def test_what_comes_out_of_turn_ends_the_driver(message: dict[str, Any]) -> None:
    code, answers = talk(message)
    assert code == 1
    assert answers[-1]["event"] == "error"


def test_our_engine_through_its_own_process(model_dir: Path) -> None:
    """Booted as a peer is: with ``-P``, and with packages made by hand."""
    with driving(known.ours(), model_dir, SMALL) as driver:
        assert driver.versions["torch"]
        assert driver.load_s > 0
        work = load.uniform("d", 3, 20, 5, 1024, 2)
        seen: list[tuple[int, int]] = []
        lines = driver.run(Load(work.requests, 2, keep_answers=True), lambda *item: seen.append(item))
        again = driver.run(Load(load.uniform("d", 3, 20, 5, 1024, 3).requests, 3, keep_answers=True))
        assert [line.outputs for line in lines] == [5, 5, 5]
        assert [line.answer for line in lines] == [line.answer for line in again]
        assert [line.cached for line in again] == [16, 16, 16]
        assert driver.peak_rss_bytes > 10_000_000
        process = driver._process
    assert process.returncode == 0


def test_an_interpreter_without_the_engine_is_told_with_its_last_words(tmp_path: Path) -> None:
    lost = Installed(Peer("lost", "drive_llama", "llama_cpp", "gguf", ""), Path(sys.executable))
    with pytest.raises(BenchError, match="lost failed: ModuleNotFoundError"), driving(lost, tmp_path, SMALL):
        pass


def interpreter(tmp_path: Path, body: str) -> Path:
    """Something that is started as if it were a Python."""
    path = tmp_path / "python"
    path.write_text(f"#!{sys.executable}\nimport sys\n{body}\n")
    path.chmod(0o755)
    return path


def test_a_driver_that_dies(tmp_path: Path) -> None:
    python = interpreter(tmp_path, "print('out of luck', file=sys.stderr); sys.exit(9)")
    with (
        pytest.raises(BenchError, match=r"(?s)vllm ended.*out of luck"),
        driving(Installed(known.PEERS[0], python), tmp_path, SMALL),
    ):
        pass


def test_a_driver_that_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "OPEN_S", 0.2)
    monkeypatch.setattr(host, "CLOSE_S", 0.2)
    python = interpreter(tmp_path, "import time; time.sleep(60)")
    with (
        pytest.raises(BenchError, match=r"did not answer within 0\.2 s"),
        driving(Installed(known.PEERS[0], python), tmp_path, SMALL),
    ):
        pass


def test_an_interpreter_that_is_none(tmp_path: Path) -> None:
    with (
        pytest.raises(BenchError, match="No such file"),
        driving(Installed(known.PEERS[0], tmp_path / "none"), tmp_path, SMALL),
    ):
        pass


def test_peers_are_found_by_option_or_variable(tmp_path: Path) -> None:
    there = interpreter(tmp_path, "sys.exit(0)")
    found = known.find({"vllm": there}, {"FOREBAY_LLAMA_PYTHON": str(there)})
    assert [(item.peer.name, item.python) for item in found] == [("vllm", there), ("llama.cpp", there)]
    assert known.find({}, {}) == []


def test_a_named_interpreter_must_have_its_engine(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="has no module vllm"):
        known.find({"vllm": Path(sys.executable)}, {})
    with pytest.raises(BenchError, match="cannot be run"):
        known.find({"openvino": tmp_path / "none"}, {})


def test_libraries_to_preload_are_those_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    (tmp_path / "lib" / "libtcmalloc.so.4").touch()
    (tmp_path / "lib" / "libtcmalloc_minimal.so.4").touch()
    installed = Installed(known.PEERS[0], tmp_path / "bin" / "python")
    assert [Path(path).name for path in installed.preloaded] == ["libtcmalloc_minimal.so.4", "libiomp5.so"]
    environment = host._environment(installed, SMALL)
    assert environment["LD_PRELOAD"].endswith("lib/libiomp5.so")
    assert environment["OMP_NUM_THREADS"] == "1"
    assert "PYTHONPATH" not in environment or environment["PYTHONPATH"] == os.environ.get("PYTHONPATH")
