"""A rank other than 0: ``python -m workers.model.parallel.rank FD PARENT``, started by rank 0 (``ranks.py``).

It loads its part and then does what it is told, until rank 0 is gone. Whatever goes wrong ends it: rank 0 notices.
Signals are rank 0's business: a terminal sends them to both, and rank 0 has requests to finish first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from workers import heap, lifeline, log
from workers.config import EngineConfig
from workers.model.attention import Attend
from workers.model.batch import place
from workers.model.budget import Beside
from workers.model.config import read_config
from workers.model.current import work_on
from workers.model.parallel import messages, part
from workers.model.parallel.group import Group
from workers.model.parallel.messages import (
    Begin,
    Channel,
    Copy,
    Failed,
    Forward,
    Ready,
    Restore,
    Room,
    Save,
    Setup,
    Zero,
)
from workers.model.parallel.split import Split

logger = log.get("rank")


def serve(channel: Channel) -> None:
    """Load and run until rank 0 is gone. Raises whatever a step raises; channel and group are closed either way."""
    try:
        setup = channel.down()
        if isinstance(setup, Setup):
            _follow(channel, setup)
    finally:
        channel.close()


def _follow(channel: Channel, setup: Setup) -> None:
    torch.set_num_threads(setup.threads)
    engine, directory = EngineConfig.model_validate(setup.engine), Path(setup.directory)
    device, dtype, context = torch.device(setup.device), getattr(torch, setup.dtype), setup.max_context
    work_on(device)
    group: Group | None = None
    try:
        try:
            split = Split.of(read_config(directory), engine, setup.rank)
            channel.send(messages.encode(Room(asdict(part.plan(split, engine, device, dtype, context, Beside())))))
            begin = channel.down()
            if not isinstance(begin, Begin):
                return
            group = Group(split, Path(setup.store), device, engine.rank_timeout_s)
            made = part.build(
                split, group, directory, engine, setup.target, begin.blocks, context, dtype, device, setup.fitted
            )
            heap.settle()  # a full collection in one rank would stall them all
            channel.send(messages.encode(Ready(made.weight_bytes, made.cache.block_bytes)))
        except (ValueError, OSError) as error:
            with contextlib.suppress(OSError):
                channel.send(messages.encode(Failed(str(error))))
            return
        with torch.inference_mode():
            _run(channel, group, made, device)
    finally:
        if group is not None:
            group.close()


def _run(channel: Channel, group: Group, made: part.Part, device: torch.device) -> None:
    cache = made.cache
    while (message := channel.down()) is not None:
        match message:
            case Forward():
                batch = place(message.layout(cache.block_size), device)
                made.decoder(batch.tokens, batch.positions, Attend(made.attention, cache, batch), batch.rows)
            case Zero(blocks):
                cache.zero(blocks)
            case Copy(pairs):
                cache.copy(pairs)
            case Save(blocks):
                group.give(0, cache.save(blocks))
            case Restore(blocks):
                saved = torch.empty(len(blocks), cache.block_bytes, dtype=torch.uint8)
                cache.restore(blocks, group.take(0, saved))
            case Setup() | Begin():
                raise AssertionError("it was told to start twice")


def main(fd: int, parent_pid: int) -> int:
    """The process. Returns its exit code: 0 when rank 0 let it go."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    lifeline.die_with(parent_pid, stdin=True)
    log.configure("forebay-worker", format="auto", level=os.environ.get(log.LEVEL_ENV) or "info")
    try:
        serve(Channel(socket.socket(fileno=fd)))
    except Exception as error:
        logger.error("rank_failed", exc_info=error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3])))
