"""Who may talk to a worker, one at a time, and what each is told: the part of a session that no transport changes.

The rules are in ``workers.rpc``. All methods but ``Outbox``'s belong to the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Callable

import msgspec

from workers.protocol import Cancel, Down, Generate, Hello, decode_down, encode
from workers.rpc.outbox import Outbox, frames
from workers.rpc.transport import Caller
from workers.rpc.wire import MAX_FRAME, ORPHAN_WAIT_S, SessionError, cancel_all

MAX_REASON = 2000
"""Characters; a status travels in a header."""


class Reception:
    """Of one worker."""

    def __init__(self, on_message: Callable[[Down], None], secret: bytes | None) -> None:
        self.outbox = Outbox(self._news)
        self._on_message = on_message
        self._secret = secret
        self._hello: asyncio.Future[Hello] | None = None
        self._session: _Session | None = None
        self._takeover = asyncio.Lock()

    @property
    def connected(self) -> bool:
        """Is there a session?"""
        return self._session is not None

    def open(self) -> None:
        """From now on gateways may come; they wait for the greeting."""
        self._hello = asyncio.get_running_loop().create_future()

    def ready(self, hello: Hello) -> None:
        """Greet the waiting gateway, and every later one."""
        assert self._hello is not None, "start() first"
        if not self._hello.done():
            self._hello.set_result(hello)

    async def refuse(self, reason: str, timeout_s: float) -> None:
        """There will be no greeting: who waits hears why, and who comes later."""
        assert self._hello is not None, "start() first"
        if not self._hello.done():
            self._hello.set_exception(SessionError("failed_precondition", reason[:MAX_REASON]))
            self._hello.exception()  # perhaps nobody waits for it
        await self._wait_for_end(timeout_s)

    def renew(self, hello: Hello) -> None:
        """What every later gateway is told instead."""
        self._hello = asyncio.get_running_loop().create_future()
        self._hello.set_result(hello)

    async def end_session(self, timeout_s: float) -> None:
        """Send what is unsent and end the session in good order."""
        session = self._session
        if session is not None:
            session.finishing = True
            session.caller.news()
            await self._wait_for_end(timeout_s)

    def close(self) -> None:
        """Nobody is greeted any more."""
        if self._hello is not None:
            self._hello.cancel()

    def admits(self, offered: bytes) -> bool:
        """Is this the secret? In a time that tells nothing of it."""
        return self._secret is None or hmac.compare_digest(offered, self._secret)

    async def serve(self, caller: Caller) -> None:
        """One session, from letting in to the end. Raises SessionError, for the caller to hear."""
        session = _Session(caller, self.outbox, self._on_message)
        async with self._takeover:
            if self._session is not None:
                self._session.replaced.set()
                await self._session.ended.wait()
            self._session = session
        talk = asyncio.create_task(self._talk(session))
        replaced = asyncio.create_task(session.replaced.wait())
        try:
            await asyncio.wait({talk, replaced}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            try:
                await cancel_all(talk, replaced)
            finally:  # though its connection is lost at that moment: the next one waits for it
                self._close(session)
        if not talk.cancelled():
            talk.result()
        elif session.replaced.is_set():
            raise SessionError("aborted", "another gateway took this worker over")

    def _close(self, session: _Session) -> None:
        """Nothing of it is left, and the next one may begin."""
        try:
            for request_id in self.outbox.close():
                self._on_message(Cancel(id=request_id))
        finally:
            self._session = None
            session.ended.set()

    async def _talk(self, session: _Session) -> None:
        await session.caller.let_in()
        await session.caller.greet(encode(await self._greeting()))
        session.number = self.outbox.open()
        await session.caller.talk(session)

    async def _greeting(self) -> Hello:
        assert self._hello is not None
        hello = await asyncio.shield(self._hello)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + ORPHAN_WAIT_S
        while self.outbox.orphans:
            if loop.time() > deadline:
                raise SessionError("unavailable", "the requests of the last session are still not cancelled")
            await asyncio.sleep(0.01)
        return hello

    async def _wait_for_end(self, timeout_s: float) -> None:
        session = self._session
        if session is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(session.ended.wait(), timeout_s)

    def _news(self) -> None:
        """From any thread."""
        session = self._session
        if session is not None:
            session.caller.news()


class _Session:
    """A ``Desk``."""

    def __init__(self, caller: Caller, outbox: Outbox, on_message: Callable[[Down], None]) -> None:
        self.caller = caller
        self.number = 0
        self.finishing = False
        self.replaced = asyncio.Event()
        self.ended = asyncio.Event()
        self._outbox = outbox
        self._on_message = on_message

    def heard(self, data: bytes) -> None:
        try:
            messages = decode_down(data)
        except msgspec.DecodeError as error:
            raise SessionError("invalid_argument", f"not a message of this protocol: {error}") from None
        for message in messages:
            if isinstance(message, Generate) and not self._outbox.register(message.id, message.n):
                continue  # an id that is running: its outputs could not be told apart
            self._on_message(message)

    def take(self) -> list[bytes]:
        return [frame for message in self._outbox.take(self.number) for frame in frames(message, MAX_FRAME)]
