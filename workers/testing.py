"""A worker without a model, as a test double: the real stream, the real engine, and a runner that echoes the prompt.

``python -m workers.testing`` takes the same JSON line on standard input as ``workers.main`` (a gateway's
``LocalLauncher`` writes it), so it can stand in wherever a process is wanted; ``echo_launcher(...)`` makes such a
launcher. Starts in about half a second. Every sequence answers with its own prompt, over and over, until ``max_tokens``
or ``stop_after`` tokens.

Faults on order: a pause per step, a hang or a death after N steps, a death at a certain token, refusing everything.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import islice

from workers import lifeline, log, options
from workers.adapters import CONFIG_FILE, WEIGHTS_FILE, AdapterError, LoadedAdapter, folder_of
from workers.engine import scoring
from workers.engine.adapters import AdapterTable
from workers.engine.plan import Chunk, Sampled, StepPlan, StepResult
from workers.engine.sequence import Sequence
from workers.launchers.base import LaunchContext
from workers.launchers.local import LocalLauncher
from workers.protocol import Down, Generate, SequenceOutput, StepOutputs, TokenLogprob, WorkerStats
from workers.station import ServedModel, Station


@dataclass(frozen=True, slots=True)
class Echo:
    """How an echo worker behaves. ``None`` = never."""

    step_s: float = 0.0
    """Pause per step in seconds."""
    load_s: float = 0.0
    """Seconds until it is ready."""
    stop_after: int | None = None
    """A sequence ends with an end token after so many tokens."""
    stall_after: int | None = None
    """After so many steps a step never returns."""
    die_after: int | None = None
    """After so many steps the process kills itself (SIGKILL)."""
    poison: int | None = None
    """A prompt that holds this token kills the process."""
    fail_with: str | None = None
    """Every request ends at once with this error code."""
    shift: int = 0
    """Choice ``i`` of a request begins its answer ``i`` times so many tokens further into the prompt."""
    fail_start: bool = False
    """It exits with code 3 instead of becoming ready."""
    blocks: int = 256
    max_context: int = 4096
    vocab_size: int = 1 << 20
    revision: str = "echo"
    tokenizer_sha256: str = ""


EOS = 0
"""The echo model's end token."""


class EchoRunner:
    """Answers each sequence with its own prompt. A ``workers.engine.plan.Runner``."""

    def __init__(self, echo: Echo) -> None:
        self._echo = echo
        self._steps = 0
        self._adapters: set[str] = set()

    def run(self, plan: StepPlan) -> StepResult:
        """Pause, misbehave where that was ordered, then sample."""
        echo = self._echo
        self._steps += 1
        if echo.step_s:
            time.sleep(echo.step_s)
        if echo.stall_after is not None and self._steps > echo.stall_after:
            time.sleep(3600)
        if echo.die_after is not None and self._steps > echo.die_after:
            os.kill(os.getpid(), signal.SIGKILL)
        if echo.poison is not None and any(echo.poison in chunk.sequence.tokens for chunk in plan.chunks):
            os.kill(os.getpid(), signal.SIGKILL)
        sampled = [self._sample(sequence) for chunk in plan.chunks for sequence in chunk.samplers]
        return StepResult(sampled, [_scores(chunk) for chunk in plan.chunks if scoring.rows(chunk)])

    def zero_blocks(self, blocks: list[int]) -> None:
        """There is no cache to zero."""

    def install(self, digest: str, weights: object) -> None:
        """From now on sequences may name it: they begin their answers elsewhere in the prompt."""
        self._adapters.add(digest)

    def remove(self, digest: str) -> None:
        """No sequence names it any more."""
        self._adapters.remove(digest)

    def _turned(self, digest: str | None) -> int:
        """By how many tokens an adapter shifts an answer."""
        if digest is None:
            return 0
        if digest not in self._adapters:
            raise LookupError("a sequence names an adapter that is not here")
        return int(digest.removeprefix("sha256:")[:8], 16) % 3 + 1

    def _sample(self, sequence: Sequence) -> Sampled:
        produced = sequence.output_len + self._turned(sequence.adapter)
        over = self._echo.stop_after is not None and sequence.output_len >= self._echo.stop_after
        place = (produced + sequence.index * self._echo.shift) % sequence.prompt_len
        token = EOS if over else sequence.tokens[place]
        if sequence.search is not None:
            others = (other for other in range(self._echo.vocab_size) if other != token)
            rest = islice(others, sequence.search.candidates - 1)
            return Sampled([], candidates=[(token, -0.1), *((other, -3.0 - rank) for rank, other in enumerate(rest))])
        if sequence.params.logprobs is None:
            return Sampled([token])
        return Sampled([token], [TokenLogprob(token, -0.5, [(token, -0.5)] * min(1, sequence.params.logprobs))])


def _scores(chunk: Chunk) -> list[TokenLogprob]:
    """Of a prompt's tokens: made up of each and the one before it."""
    alternatives = min(1, chunk.sequence.params.logprobs or 0)
    tokens = chunk.sequence.tokens
    begin = chunk.start + scoring.rows(chunk).start
    pairs = zip(tokens[begin:], scoring.targets(chunk), strict=False)
    return [TokenLogprob(token, -(before % 8) / 8 - 0.25, [(token, -0.25)] * alternatives) for before, token in pairs]


def read_adapter(base_dir: str, name: str, source: str) -> LoadedAdapter:
    """An adapter by its files alone. Raises AdapterError for one whose config is no JSON, or that is not there."""
    folder = folder_of(source, base_dir)
    config, weights = (folder / CONFIG_FILE).read_bytes(), (folder / WEIGHTS_FILE).read_bytes()
    try:
        json.loads(config)
    except ValueError:
        raise AdapterError(f"{folder / CONFIG_FILE} is no JSON") from None
    return LoadedAdapter(name, f"sha256:{sha256(config + weights).hexdigest()}", 1, len(weights) + 1, None)


class EchoMover:
    """Blocks without bytes worth the name. A ``workers.engine.leases.BlockMover``."""

    block_bytes = 64

    def read(self, blocks: list[int]) -> bytes:
        """Zeros."""
        return bytes(self.block_bytes * len(blocks))

    def write(self, blocks: list[int], data: bytes) -> None:
        """There is no cache to write to. Raises ValueError for another length."""
        if len(data) != self.block_bytes * len(blocks):
            raise ValueError(f"{len(data)} bytes are not {len(blocks)} blocks")


class EchoStation(Station):
    """A station that may refuse every request before the engine sees it."""

    fail_with: str | None = None

    def _deliver(self, message: Down) -> None:
        if self.fail_with is None or not isinstance(message, Generate):
            super()._deliver(message)
            return
        refused = [
            SequenceOutput(id=message.id, index=index, finish="error", error=self.fail_with)
            for index in range(message.n)
        ]
        self.server.publish(StepOutputs(step=1, outputs=refused, stats=WorkerStats(free_blocks=1)))


async def serve(settings: options.WorkerOptions, echo: Echo) -> int:
    """Run an echo worker until SIGTERM. Returns the exit code."""
    station = EchoStation(
        settings.address,
        secret=settings.secret,
        tls=settings.tls_files,
        name=settings.name,
        model=settings.model,
        config=settings.engine,
    )
    station.fail_with = echo.fail_with
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await station.open()
    await asyncio.sleep(echo.load_s)
    if echo.fail_start:
        log.get("worker").error("worker_start_failed", detail="the echo worker was told to fail")
        await station.close()
        return 3
    runner, engine = EchoRunner(echo), settings.engine
    read = partial(read_adapter, settings.base_dir)
    table = AdapterTable(runner, most=engine.max_adapters, room=engine.adapter_room)
    for adapter in engine.adapters:
        if (refused := table.install(read(adapter.name, adapter.source))) is not None:
            raise AdapterError(refused)
    station.serve(
        ServedModel(
            runner=runner,
            adapters=table if engine.adapter_room else None,
            read_adapter=read if engine.adapter_room else None,
            blocks=settings.engine.blocks or echo.blocks,
            max_context=settings.engine.max_context or echo.max_context,
            revision=echo.revision,
            tokenizer_sha256=echo.tokenizer_sha256,
            eos_ids=frozenset({EOS}),
            vocab_size=echo.vocab_size,
            mover=EchoMover(),
            layout="echo",
        )
    )
    waits = [asyncio.create_task(event.wait()) for event in (stop, station.drained, station.failed)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if stop.is_set():
        await station.drain(settings.drain_s)
    await station.close()
    return 1 if station.failed.is_set() else 0


def echo_launcher(context: LaunchContext | None = None, echo: Echo | None = None) -> LocalLauncher:
    """A launcher whose workers are echo workers, each a real process."""
    return LocalLauncher(context or LaunchContext(), command=(sys.executable, "-m", "workers.testing", *flags(echo)))


def flags(echo: Echo | None) -> list[str]:
    """``echo`` as command-line options."""
    chosen = echo or Echo()
    given: list[str] = []
    for name in Echo.__dataclass_fields__:
        value = getattr(chosen, name)
        if value != getattr(Echo(), name):
            given.append(f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}"))
    return given


def main(argv: Items[str]) -> int:
    """``python -m workers.testing [--step-s=… …]`` with the gateway's JSON line on standard input."""
    parser = argparse.ArgumentParser(prog="workers.testing")
    for name, kind in (
        *((name, float) for name in ("step_s", "load_s")),
        *((name, int) for name in ("stop_after", "stall_after", "die_after", "poison", "blocks", "max_context")),
        *((name, int) for name in ("vocab_size", "shift")),
        *((name, str) for name in ("fail_with", "revision", "tokenizer_sha256")),
    ):
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=getattr(Echo(), name))
    parser.add_argument("--fail-start", action="store_true")
    echo = Echo(**vars(parser.parse_args(argv)))
    settings = options.parse(["--spec-stdin"])
    lifeline.die_with(settings.parent_pid, stdin=settings.stdin_lifeline)
    log.configure("forebay-echo", format="json", level=os.environ.get(log.LEVEL_ENV) or "info")
    return asyncio.run(serve(settings, echo))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
