"""What a worker is told, and what it answers when that is wrong."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from workers.config import EngineConfig
from workers.launchers.base import WorkerSpec
from workers.launchers.local import spec_line
from workers.options import OptionsError, from_line, parse

SECRET = "s" * 32
BY_HAND = ["--source", "/models/x", "--listen", "0.0.0.0:9000"]


def test_by_hand() -> None:
    options = parse(
        [*BY_HAND, "--engine", '{"blocks": 8, "kv_cache": "1MiB"}', "--drain-s", "3", "--metrics-port", "9464"],
        env={"FOREBAY_WORKER_SECRET": SECRET},
    )
    assert (options.address, options.secret, options.model) == ("0.0.0.0:9000", SECRET, "/models/x")
    assert options.engine == EngineConfig(blocks=8, kv_cache=2**20)
    assert (options.drain_s, options.metrics_port, options.stdin_lifeline, options.parent_pid) == (3, 9464, False, None)


def test_the_engine_block_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    path.write_text('{"max_running": 3}')
    options = parse(["--source", "x", "--listen", "unix:/run/w", "--engine", f"@{path}"], env={})
    assert options.engine.max_running == 3


def test_the_line_of_a_gateway_is_understood() -> None:
    spec = WorkerSpec(
        "m/p-0",
        0,
        "m",
        "src",
        EngineConfig(kv_cache="64MiB", blocks=9),
        base_dir="/etc/forebay",
        architectures={"MineForCausalLM": "mine:Decoder"},
    )
    line = spec_line(spec, "unix:/tmp/x/w.sock", SECRET, 4321)
    options = parse(["--spec-stdin"], env={}, stdin=io.BytesIO(line + b"more"))
    assert (options.name, options.model, options.source, options.base_dir) == ("m/p-0", "m", "src", "/etc/forebay")
    assert options.engine == spec.engine
    assert options.architectures == spec.architectures
    assert (options.secret, options.parent_pid, options.stdin_lifeline) == (SECRET, 4321, True)


@pytest.mark.parametrize(
    ("argv", "env", "wrong"),
    [
        ([], {"FOREBAY_WORKER_SECRET": SECRET}, "--source is missing"),
        (BY_HAND, {}, "Set FOREBAY_WORKER_SECRET"),
        ([*BY_HAND, "--secret-env", "MINE"], {}, "Set MINE"),
        (BY_HAND, {"FOREBAY_WORKER_SECRET": "short"}, "secret: String should have at least 16"),
        ([*BY_HAND, "--engine", "{"], {"FOREBAY_WORKER_SECRET": SECRET}, "--engine is not JSON"),
        ([*BY_HAND, "--engine", "@/nowhere"], {"FOREBAY_WORKER_SECRET": SECRET}, "cannot read /nowhere"),
        ([*BY_HAND, "--engine", '{"blokcs": 1}'], {"FOREBAY_WORKER_SECRET": SECRET}, "engine.blokcs: Extra inputs"),
        (["--source", "x", "--listen", "nowhere"], {"FOREBAY_WORKER_SECRET": SECRET}, "address"),
        (["--colour"], {}, "forebay worker --help"),
        ([*BY_HAND, "--architecture", "Mine"], {"FOREBAY_WORKER_SECRET": SECRET}, "write NAME=module:attribute"),
        ([*BY_HAND, "--architecture", "Mine=my.module"], {"FOREBAY_WORKER_SECRET": SECRET}, "architectures.Mine"),
        (["--drain-s", "soon"], {}, "--drain-s"),
    ],
)
def test_mistakes_are_named(argv: list[str], env: dict[str, str], wrong: str) -> None:
    with pytest.raises(OptionsError) as caught:
        parse(argv, env)
    assert wrong in str(caught.value)


@pytest.mark.parametrize("line", [b"", b"{", b"[]\n", b'{"address": "unix:/x", "colour": 1}\n'])
def test_a_wrong_line_is_an_error(line: bytes) -> None:
    with pytest.raises(OptionsError):
        from_line(line)


@pytest.mark.parametrize("values", [{"address": 5}, {"parent_pid": "x"}, {"engine": {"blocks": 0}}])
def test_an_error_does_not_tell_the_secret(values: dict[str, Any]) -> None:
    line = json.dumps({"address": "unix:/x", "secret": "short-secret", **values}).encode()
    with pytest.raises(OptionsError) as caught:
        from_line(line)
    assert "short-secret" not in str(caught.value)
