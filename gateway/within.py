"""``asyncio.timeout`` for what mostly answers at once: a timer is only made for an answer that has to be waited for.

A policy that keeps its state in memory and a body that came with its headers never suspend; arming and disarming a
timer for them costs more than they do.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


async def within(seconds: float, coroutine: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result. Raises TimeoutError when it suspends and does not end within ``seconds``.

    Its first part runs at once, in this task; so does the rest, under the time limit.
    """
    try:
        waited = coroutine.send(None)
    except StopIteration as ended:
        result: T = ended.value
        return result
    async with asyncio.timeout(seconds):
        return await _rest(coroutine, waited)


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits. Raises RuntimeError for one that does, and ends it."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        result: T = ended.value
        return result
    coroutine.close()
    raise RuntimeError("a call that should never wait did")


@types.coroutine
def _rest(coroutine: Coroutine[Any, Any, T], waited: Any) -> Generator[Any, Any, T]:
    """Go on with a coroutine that waits for ``waited``, as ``await`` would have."""
    error: BaseException | None
    while True:
        try:
            value = yield waited
        except GeneratorExit:
            coroutine.close()
            raise
        except BaseException as raised:
            value, error = None, raised
        else:
            error = None
        try:
            waited = coroutine.send(value) if error is None else coroutine.throw(error)
        except StopIteration as ended:
            result: T = ended.value
            return result
