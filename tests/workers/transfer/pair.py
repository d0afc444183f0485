"""A prefill worker and a decode worker in this process: real desks and engines, runners that check every block."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec

from workers.config import EngineConfig
from workers.engine.leases import BlockMover
from workers.engine.loop import Engine
from workers.engine.plan import Runner
from workers.engine.testing import FakeRunner, Slot
from workers.protocol import Down, Generate, SamplingParams, SequenceOutput, Source, StepOutputs
from workers.transfer.connector import Connector, Part, TransferError, Wanted
from workers.transfer.desk import TransferDesk

SIZE = 4
BLOCK_BYTES = 1024


class FakeMover:
    """Blocks of a ``FakeRunner`` as bytes."""

    block_bytes = BLOCK_BYTES

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner

    def read(self, blocks: list[int]) -> bytes:
        found = b""
        for block in blocks:
            rows = [
                slot and (slot.token, slot.position, slot.scope, slot.adapter) for slot in self._runner.slots[block]
            ]
            packed = msgspec.msgpack.encode(rows)
            found += len(packed).to_bytes(4, "big") + packed.ljust(BLOCK_BYTES - 4, b"\0")
        return found

    def write(self, blocks: list[int], data: bytes) -> None:
        assert len(data) == len(blocks) * BLOCK_BYTES
        for place, block in enumerate(blocks):
            one = data[place * BLOCK_BYTES : (place + 1) * BLOCK_BYTES]
            rows = msgspec.msgpack.decode(one[4 : 4 + int.from_bytes(one[:4], "big")])
            self._runner.slots[block] = [row and Slot(*row) for row in rows]


class Side:
    """One worker: a desk in front of an engine."""

    def __init__(
        self,
        config: EngineConfig,
        connector: Connector | None = None,
        *,
        blocks: int = 64,
        runner: Runner | None = None,
        mover: BlockMover | None = None,
        layout: str = "fake",
        revision: str = "rev",
        vocab: int = 1000,
    ) -> None:
        self.runner = FakeRunner(blocks, config.block_size) if runner is None else runner
        if mover is None:
            assert isinstance(self.runner, FakeRunner)
            mover = FakeMover(self.runner)
        self.mover = mover
        self.tokens: dict[str, list[int]] = {}
        self.last: dict[str, SequenceOutput] = {}
        self.results: list[str] = []
        self.desk = TransferDesk(config, None, connector)
        self.engine = Engine(
            config,
            self.runner,
            blocks=blocks,
            max_context=100_000,
            revision=revision,
            eos_ids=(),
            on_outputs=self._take,
            mover=mover,
            on_offer=self.desk.on_offer,
        )
        self._loop = asyncio.get_running_loop()
        self._ended: dict[str, asyncio.Event] = {}
        self.desk.open(mover, layout, revision, self.engine.submit, lambda end: self.results.append(end.result))
        self.engine.start()

    def _take(self, news: StepOutputs) -> None:
        self._loop.call_soon_threadsafe(self._book, news)

    def _book(self, news: StepOutputs) -> None:
        for output in news.outputs:
            self.tokens.setdefault(output.id, []).extend(output.tokens)
            if output.finish is not None and output.index == 0:
                assert output.id not in self.last, "two last outputs"
                self.last[output.id] = output
                self._ended.setdefault(output.id, asyncio.Event()).set()

    def deliver(self, message: Down) -> None:
        """As ``Station`` does."""
        if not self.desk.takes(message):
            self.desk.before(message)
            self.engine.submit(message)  # type: ignore[arg-type]

    async def ended(self, name: str) -> SequenceOutput:
        async with asyncio.timeout(30):
            await self._ended.setdefault(name, asyncio.Event()).wait()
        return self.last[name]

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not holds():
                await asyncio.sleep(0.01)

    async def close(self, leased: int = 0) -> None:
        """End it, and look that every block was given back."""
        await self.desk.close()
        await asyncio.to_thread(self.engine.stop)
        assert self.engine._handover.leases == leased
        if not leased:
            self.engine.planner.check()


class Direct:
    """A connector without a wire: asks the other side's desk. ``spoil`` may change or hold up what comes."""

    def __init__(self) -> None:
        self.source: TransferDesk | None = None
        self.spoil: Callable[[Part], Part] = lambda part: part
        self.hold: asyncio.Event | None = None
        self.pulled = 0

    async def pull(self, source: Source, layout: str) -> AsyncGenerator[Part, None]:
        assert self.source is not None
        stream = self.source.parts(Wanted(source.ticket, layout))
        try:
            async for part in stream:
                if self.hold is not None:
                    await self.hold.wait()
                self.pulled += 1
                yield self.spoil(part)
        finally:
            await stream.aclose()


class Broken:
    """A connector to nowhere."""

    async def pull(self, source: Source, layout: str) -> AsyncGenerator[Part, None]:
        raise TransferError("broken", "nobody there")
        yield  # pragma: no cover


def config(role: str, **fields: Any) -> EngineConfig:
    """Small blocks, and a role."""
    return EngineConfig(**{"block_size": SIZE, "role": role, **fields})


def request(name: str, tokens: list[int], max_tokens: int = 6, **fields: Any) -> Generate:
    fields.setdefault("scope", b"scope")
    fields.setdefault("params", SamplingParams(seed=0, ignore_eos=True))
    return Generate(name, tokens, max_tokens, **fields)


def both(generate: Generate, ticket: str = "ticket", size: int = SIZE) -> tuple[Generate, Generate]:
    """What a gateway sends to the prefill worker and to the decode worker."""
    full = (len(generate.tokens) - 1) // size * size
    replace = msgspec.structs.replace
    return (
        replace(generate, tokens=generate.tokens[: full + 1], max_tokens=1, n=1, lend=ticket),
        replace(generate, source=Source("address", ticket)),
    )
