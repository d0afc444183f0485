"""Whether a grammar compiles, found out in a child process that is killed when it takes too long.

Rules
- Asked before admission and quota: a schema that does not compile costs its caller a 400 and nobody anything else.
- A child answers one question at a time. One that overran, died or was left in the middle of a question is killed and
  replaced, so a question never gets another's answer. One that was gone before it had read a question costs nobody
  anything: the next one is asked.
- A tenant has one question under way at most: slow schemas of one delay nobody else's while a child is free.
- Answers are remembered, at most ``REMEMBERED``, by digest: no schema is kept. Children start with the first question.
- That one took too long is remembered for ``OVERRUN_S`` only: a machine that was busy with something else is no reason
  to refuse a schema for good.
- Only the event loop touches this.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakValueDictionary

from gateway import log
from gateway.errors import ApiError, unavailable
from workers.launchers.local import harmless

CHILDREN = 2
COMPILE_S = 1.0
"""How long a grammar may take to compile."""
OVERRUN_S = 60.0
"""How long one that took longer is refused without being tried again."""
LOAD_S = 30.0
"""How long a child may take to start and to read a model's vocabulary."""
REMEMBERED = 4096
ATTEMPTS = 3
"""Children that are asked the same, where one is lost."""
PAUSE_S = 0.1
"""Before another one is: what took the first may still be at work."""
COMMAND = (sys.executable, "-m", "workers.grammar_child")

_Answer = tuple[str | None, float]
"""Why not, or None, and until when that holds."""

_log = log.get("grammar")


class GrammarRefusedError(Exception):
    """The grammar cannot be used; the text says why and is fit for the caller."""


class _LostError(Exception):
    """A child is gone, and has not read its question."""


class GrammarCheck:
    """Asks children. One per gateway."""

    def __init__(
        self, *, children: int = CHILDREN, compile_s: float = COMPILE_S, command: Sequence[str] = COMMAND
    ) -> None:
        self._compile_s = compile_s
        self._command = (*command, str(os.getpid()))
        self._places = asyncio.Semaphore(children)
        self._idle: list[Process] = []
        self._known: OrderedDict[tuple[str, bytes], _Answer] = OrderedDict()
        self._tenants: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def check(self, grammar: str, model_dir: Path, tenant: str) -> None:
        """Return when the grammar compiles for the model. Raises GrammarRefusedError, ApiError 503."""
        key = str(model_dir), hashlib.sha256(grammar.encode()).digest()
        if not self._is_known(key):
            lock = self._tenants.setdefault(tenant, asyncio.Lock())
            async with lock:
                if not self._is_known(key):  # meanwhile, by the same tenant's request before this one
                    async with self._places:
                        self._known[key] = await self._ask(grammar, model_dir)
        reason, _ = self._known[key]
        self._known.move_to_end(key)
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        if reason is not None:
            raise GrammarRefusedError(reason)

    async def close(self) -> None:
        """End the children."""
        idle, self._idle = self._idle, []
        for child in idle:
            await _end(child)

    def _is_known(self, key: tuple[str, bytes]) -> bool:
        """And still holds."""
        return key in self._known and time.monotonic() < self._known[key][1]

    async def _ask(self, grammar: str, model_dir: Path) -> _Answer:
        """One question."""
        question = json.dumps({"directory": str(model_dir), "grammar": grammar}).encode() + b"\n"
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(PAUSE_S)
            child = self._idle.pop() if self._idle else await self._start()
            with contextlib.suppress(_LostError):
                return await self._answer(child, question)
        raise _gone()

    async def _answer(self, child: Process, question: bytes) -> _Answer:
        """What one child says. Raises _LostError when it is gone without having begun."""
        answered = False
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            async with asyncio.timeout(LOAD_S):
                await _tell(child.stdin, question)
                if await child.stdout.readline() != b"loaded\n":
                    raise _LostError
            try:
                async with asyncio.timeout(self._compile_s):
                    line = await child.stdout.readline()
            except TimeoutError:
                return f"it takes longer than {self._compile_s:g} s to compile", time.monotonic() + OVERRUN_S
            if not line.endswith(b"\n"):  # it died of it: out of memory or stack
                return "it takes more memory than a grammar may", math.inf
            answered = True
            return json.loads(line)["error"], math.inf
        except (TimeoutError, ConnectionError):
            raise _gone() from None
        finally:
            if answered:
                self._idle.append(child)
            else:
                _log.warning("grammar_child_ended", pid=child.pid, returncode=child.returncode)
                await _end(child)

    async def _start(self) -> Process:
        try:
            return await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, env=harmless(os.environ), start_new_session=True
            )
        except OSError as error:
            _log.error("grammar_child_failed", failure=log.describe(error))
            raise _gone() from None


async def _tell(stdin: asyncio.StreamWriter, question: bytes) -> None:
    try:
        stdin.write(question)
        await stdin.drain()
    except (ConnectionError, RuntimeError) as error:  # the second from uvloop, for a pipe that is closed already
        raise _LostError from error


def _gone() -> ApiError:
    return unavailable("Grammars cannot be compiled at the moment.", "grammar_compiler")


async def _end(child: Process) -> None:
    """Kill and reap it, whoever is cancelled meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        child.kill()
    if child.stdin is not None:
        child.stdin.close()
    await asyncio.shield(asyncio.ensure_future(child.wait()))
