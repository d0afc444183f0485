"""``bench start``: how long a worker takes from its start until it is ready, and the most memory that it ever holds.

Rules
- A worker as the gateway starts one: a process of its own (``workers/launchers/local.py``), ready when it has greeted.
- The memory is what the system says that the process held at most, after as many requests at once as ``running`` says.
  Pages of the cache that nothing was written to take none: of the cache those blocks count that ever were in use or
  cached at once. All else is torch, code and a step's buffers. Told where all three lie in the process's memory: on a
  CPU.
- Every round has a process of its own. The first one of a machine compiles the kernel, and may wait for its disk.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.bench import load
from gateway.bench.display import Display
from gateway.bench.render import Table
from gateway.bench.report import BenchError, Report, machine, model_versions, software
from gateway.bench.target import Target
from workers.launchers.base import LaunchContext, LaunchError, WorkerProcess, WorkerSpec
from workers.launchers.local import LocalLauncher
from workers.protocol import Generate, Hello, SamplingParams, StepOutputs, Up
from workers.rpc.client import WorkerClient
from workers.rpc.heard import Heard
from workers.rpc.wire import LinkError, SessionError, cancel_all

MIB = 2**20
MOST_S = 900.0
"""Of a round: a kernel may have to be compiled, and a large model takes its time."""
_STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class Load:
    """Requests at once after the start, and their tokens."""

    running: int = 64
    input: int = 512
    output: int = 16


def start_report(target: Target, work: Load, rounds: int, display: Display) -> Report:
    """Start a worker ``rounds`` times. Raises BenchError."""
    from workers.model.config import read_config

    files = target.files()  # what is fetched only once is no part of a start
    vocab = read_config(files.dir).vocab
    versions: dict[str, Any] = {**software(), **model_versions(target.source, files), "machine": machine()}
    parameters = {"running": work.running, "input": work.input, "output": work.output}
    report = Report("start", versions, {**parameters, "rounds": rounds, "engine": target.engine.model_dump()})
    for number in range(rounds):
        with display.task(f"round {number + 1}/{rounds}: start a worker, {work.running} requests"):
            figures, hello = asyncio.run(_round(target, work, vocab))
        report.runs.append({"round": number + 1, **figures})
        versions |= {"kernels": hello.versions.get("attention"), "device": hello.device, "dtype": hello.dtype}
    return report


def start_table(report: Report) -> Table:
    """One line per round; memory in MiB."""
    columns = ("round", "ready s", "first answers s", "weights", "KV cache", "filled", "most held", "all else")
    table = Table("worker's start, and its memory in MiB", columns)
    for run in report.runs:
        sizes = [run[f"{name}_bytes"] for name in ("weight", "kv", "kv_filled", "peak_rss", "rest")]
        held = (None if size is None else size / MIB for size in sizes)
        table.add(str(run["round"]), run["ready_s"], run["answered_s"], *held)
    table.notes = [
        "Ready: from the start of its process. First answers: until all requests sent then have ended.",
        "All else: what it held at most, less weights and the part of the cache that was ever filled.",
    ]
    return table


async def _round(target: Target, work: Load, vocab: int) -> tuple[dict[str, Any], Hello]:
    began = time.perf_counter()
    spec = WorkerSpec("bench-0", 0, "measured", target.source, target.engine, str(target.base_dir))
    try:
        process = await LocalLauncher(LaunchContext()).start(spec)
    except LaunchError as error:
        raise BenchError(str(error)) from None
    client = WorkerClient(process.address, process.secret, max_queued=work.running)
    try:
        async with asyncio.timeout(MOST_S):
            messages, hello = await _greeted(client, process)
            ready = time.perf_counter()
            filled = await _answers(client, messages, work, hello, vocab)
            answered = time.perf_counter()
        peak = _peak(hello.pid)
    except (SessionError, LinkError) as error:
        raise BenchError(f"the worker: {error}") from None
    except TimeoutError:
        raise BenchError(f"the worker was not ready, or did not answer, within {MOST_S:g} s") from None
    finally:
        await client.close()
        await process.stop(_STOP_S)
    kv = hello.blocks // max(1, len(hello.keeps)) * hello.block_size * hello.kv_bytes_per_token
    written = kv * filled // hello.blocks
    figures = {
        "ready_s": round(ready - began, 3),
        "answered_s": round(answered - ready, 3),
        "weight_bytes": hello.weight_bytes,
        "kv_bytes": kv,
        "kv_filled_bytes": written,
        "peak_rss_bytes": peak,
        "rest_bytes": peak - hello.weight_bytes - written if peak is not None and hello.device == "cpu" else None,
    }
    return figures, hello


async def _greeted(client: WorkerClient, process: WorkerProcess) -> tuple[AsyncIterator[Up], Hello]:
    """What the worker says, and the first of it. Raises BenchError with its last words when it ends before."""

    async def first() -> tuple[AsyncIterator[Up], Up | None]:
        await client.connect(MOST_S)
        messages = Heard(client)
        return messages, await anext(messages, None)

    greeting, ended = asyncio.create_task(first()), asyncio.create_task(process.wait())
    try:
        await asyncio.wait({greeting, ended}, return_when=asyncio.FIRST_COMPLETED)
        if greeting.done():
            messages, hello = greeting.result()
            if isinstance(hello, Hello):
                return messages, hello
        raise BenchError(f"the worker ended before it was ready:\n{(await ended).last_words}")
    finally:
        await cancel_all(greeting, ended)


async def _answers(client: WorkerClient, messages: AsyncIterator[Up], work: Load, hello: Hello, vocab: int) -> int:
    """Send all requests at once and wait for their ends; most blocks in use or cached at once.

    Raises BenchError when one is refused, or the worker goes.
    """
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    for index in range(work.running):
        tokens = list(load.prompt(f"start/{index}", work.input, vocab))
        client.send(Generate(str(index), tokens, work.output, params, scope=b"bench", tenant_key="bench"))
    left, filled = work.running, 0
    while left:
        message = await anext(messages, None)
        if message is None:
            raise BenchError(f"the worker ended with {left} requests under way")
        if not isinstance(message, StepOutputs):
            continue
        filled = max(filled, message.stats.used_blocks + message.stats.cached_blocks)
        for output in message.outputs:
            if output.finish == "error":
                raise BenchError(
                    f"the worker refused {work.input} + {work.output} tokens ({output.error}): its context has "
                    f"{hello.max_context}, its cache room for {hello.longest}; ask for less --input or --output"
                )
            left -= output.finish is not None
    return filled


def _peak(pid: int) -> int | None:
    """Most bytes that a process ever held; None where the system does not say."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), None)
