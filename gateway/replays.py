"""Requests with an ``Idempotency-Key``: sent again, they get the same answer, and it is charged once.

Rules
- A key belongs to its tenant, user and route. The same key with another body is 422.
- The first request runs, and its bytes are recorded as they go out. One that comes meanwhile joins it: what was said so
  far, then the rest as it comes. One that comes later gets it all. Neither is charged, nor reserves anything.
- A request with a key outlives its caller by ``linger_s``, and as long as somebody follows it: who sends it again after
  a broken connection finds it running. A caller that does not read counts as gone: a connection may break silently.
- Only what ended well is kept. A failure is told to those who follow it, and forgotten.
- Only the recorded request's own task writes a recording, and ends it once (``Replays.close``).
- Bounded: an answer lives for ``keep_s``, a tenant's answers take ``max_bytes_per_tenant`` (its own oldest go first),
  all together ``max_bytes`` (the oldest of who has most). An answer that is too large for that is not kept, but its
  key is: it never runs twice.
- Answers are in this process's memory only. Gateways that count in one ledger know of each other's keys
  (``Gatekeeper.claim``): one that another has is 409 here, or 422 with another body, and does not run. Others do not.
- A purge of the tenant's cache forgets its answers.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from starlette.types import Message, Send

from gateway.errors import ApiError, bad_request, unavailable
from gateway.gatekeeper import joined_headers
from gateway.settings import Idempotency
from gateway.timed import unwrap
from policies.spi import SharedKeys
from policies.types import TenantId

if TYPE_CHECKING:
    from gateway.gatekeeper import Gatekeeper
    from gateway.visit import Visit

HEADER = "idempotency-key"
REPLAYED = "x-forebay-replayed"
INLINE_BYTES = 256 * 1024
"""A longer body is hashed in a thread."""
ENTRY_BYTES = 1024
"""What a key takes besides its answer."""
CHUNK_BYTES = 64
"""What each piece of an answer takes besides its content."""
_SANE_KEY = re.compile(r"[\x21-\x7e]{1,255}")


class Key(NamedTuple):
    """Whose request it is."""

    tenant: TenantId
    user: str | None
    epoch: int
    """Of the tenant's caches: a purge makes older answers unreachable."""
    route: str
    key: str


class Claim(NamedTuple):
    """A key that was claimed, and the policy where."""

    keys: SharedKeys
    name: str


class Recording:
    """One request's answer, as it goes out."""

    def __init__(self, key: Key, digest: bytes) -> None:
        self.key = key
        self.digest = digest
        self.status: int | None = None
        self.headers: list[tuple[str, str]] = []
        self.size = ENTRY_BYTES
        self.whole = False
        """The last byte is here."""
        self.lost = False
        """It broke off, or grew too large: there is no more to come."""
        self.closed = False
        self.stale = False
        """A purge came while it ran."""
        self.followers = 0
        self.timer: asyncio.TimerHandle | None = None
        self.claim: Claim | None = None
        """Its key is ours among several gateways."""
        self._chunks: list[bytes] = []
        self._news = asyncio.Event()

    def take(self, message: Message) -> int:
        """Record what goes out; the bytes that it added."""
        before = self.size
        if message["type"] == "http.response.start":
            self.status = message["status"]
            pairs = ((name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in message["headers"])
            self.headers = [(name, value) for name, value in pairs if not name.startswith("x-ratelimit-")]
        else:
            data = message.get("body", b"")
            self._chunks.append(data)
            self.size += len(data) + CHUNK_BYTES
            self.whole = not message.get("more_body", False)
        self._changed()
        return self.size - before

    def lose(self) -> None:
        """There is no more to come."""
        self.lost = True
        self._chunks.clear()
        self._changed()

    def _changed(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def follow(self) -> AsyncGenerator[bytes]:
        """What was and is said, until the end; the first piece, empty, comes when the status is known.

        Raises ApiError 503 where it breaks off.
        """
        self.followers += 1
        self._changed()
        said = 0
        try:
            while True:
                news = self._news
                if self.lost:
                    raise unavailable("The request that this one repeats was broken off. Send it again.", "replay_lost")
                if self.status is not None and said == 0:
                    yield b""
                if said < len(self._chunks):
                    data = b"".join(self._chunks[said:])
                    said = len(self._chunks)
                    yield data
                elif self.whole:
                    return
                else:
                    await news.wait()
        finally:
            self.followers -= 1
            self._changed()

    async def deserted(self, linger_s: float) -> None:
        """Return when nobody has followed it for ``linger_s``."""
        while True:
            news = self._news
            if self.followers:
                await news.wait()
                continue
            try:
                async with asyncio.timeout(linger_s):
                    while not self.followers:
                        await self._news.wait()
            except TimeoutError:
                return


class Onward:
    """The way of a recorded answer to its own caller, into the recording first. ``leave``: the caller gets no more."""

    def __init__(self, record: Callable[[Message], None], send: Send) -> None:
        self._record = record
        self._send = send
        self._left = False
        self._writing: asyncio.Task[None] | None = None

    async def __call__(self, message: Message) -> None:
        """ASGI's ``send``."""
        self._record(message)
        if self._left:
            return
        self._writing = writing = asyncio.ensure_future(_sent(self._send, message))
        try:
            await asyncio.wait((writing,))
        finally:
            self._writing = None
            writing.cancel()  # of no effect once it is done
        if not self._left:
            writing.result()

    def leave(self) -> None:
        """Whatever it waits for the caller to take, it waits no more."""
        self._left = True
        if self._writing is not None:
            self._writing.cancel()


async def _sent(send: Send, message: Message) -> None:
    await send(message)


class _Shelf:
    """One tenant's recordings, the one that was longest not asked for first."""

    def __init__(self) -> None:
        self.kept: OrderedDict[Key, Recording] = OrderedDict()
        self.bytes = 0

    def oldest(self) -> Recording | None:
        """The first that is finished."""
        return next((recording for recording in self.kept.values() if recording.closed), None)


class Replays:
    """All recordings of a gateway."""

    def __init__(self, settings: Idempotency, gatekeeper: Gatekeeper | None = None) -> None:
        """``gatekeeper`` asks the quota policy, where several gateways share one."""
        self._gatekeeper = gatekeeper
        self.settings = settings
        """May be changed at any time."""
        self.bytes = 0
        """Memory that recordings take."""
        self._shelves: dict[TenantId, _Shelf] = {}

    def __len__(self) -> int:
        return sum(len(shelf.kept) for shelf in self._shelves.values())

    def claim(self, key: Key, digest: bytes) -> tuple[Recording, bool]:
        """The recording of ``key``, and whether it is new: then the caller runs the request and closes it.

        Raises ApiError 422 for another body, 409 for an answer that was too large to keep.
        """
        shelf = self._shelves.setdefault(key.tenant, _Shelf())
        found = shelf.kept.get(key)
        if found is None:
            made = shelf.kept[key] = Recording(key, digest)
            self._count(made, made.size)
            return made, True
        if found.digest != digest:
            raise _reused()
        if found.lost:
            raise ApiError(
                409,
                "The answer under this Idempotency-Key is too large to be sent again. Use a new key to run it anew.",
                type="invalid_request_error",
                code="replay_too_large",
                param="Idempotency-Key",
            )
        shelf.kept.move_to_end(key)
        return found, False

    async def join(self, visit: Visit, body: bytes) -> Recording | None:
        """The recording that answers a request; None for one that has to run, which is recorded if it brings a key.

        Raises ApiError 400, 409, 422.
        """
        given = joined_headers(visit.scope).get(HEADER)
        if given is None:
            return None
        assert visit.principal is not None
        assert visit.tenant is not None
        digest = await asyncio.to_thread(_digest, body) if len(body) > INLINE_BYTES else _digest(body)
        tenant = visit.tenant
        key = Key(tenant.id, visit.principal.user, tenant.epoch, visit.endpoint.route, sane_key(given))
        recording, new = self.claim(key, digest)
        if not new:
            return recording
        visit.recording = recording
        await self._claimed(recording, visit)
        visit.reply.send = visit.onward = Onward(partial(self.record, recording), visit.reply.send)
        return None

    async def _claimed(self, recording: Recording, visit: Visit) -> None:
        """The key is this gateway's among those that share a ledger. Raises ApiError 409, 422, 503."""
        if self._gatekeeper is None:
            return
        key = recording.key
        name = hashlib.sha256("\0".join(("k", key.tenant, key.user or "", key.route, key.key)).encode()).hexdigest()
        found = await self._gatekeeper.claim(name, recording.digest.hex(), visit.policies)
        if found == "other_body":
            raise _reused()
        if found == "elsewhere":
            raise ApiError(
                409,
                "Another gateway runs or has answered the request with this Idempotency-Key. Send it again there: "
                "it is not run twice.",
                type="invalid_request_error",
                code="idempotency_key_elsewhere",
                param="Idempotency-Key",
                retry_after_s=1.0,
            )
        keys = unwrap(visit.policies.quota)
        if isinstance(keys, SharedKeys):
            recording.claim = Claim(keys, name)

    def record(self, recording: Recording, message: Message) -> None:
        """Note what went out of a request that runs."""
        if not recording.lost:
            self._count(recording, recording.take(message))

    def close(self, recording: Recording, *, good: bool) -> None:
        """The request is over. ``good``: it ended well, and its answer may be given again."""
        if recording.closed:
            return
        recording.closed = True
        if good and (recording.whole or recording.lost) and not recording.stale:
            loop = asyncio.get_running_loop()
            recording.timer = loop.call_later(self.settings.keep_s, self._drop, recording)
            if recording.claim is not None:
                recording.claim.keys.keep(recording.claim.name, time.monotonic() + self.settings.keep_s)
            return
        self._drop(recording)
        if not recording.whole:
            recording.lose()

    def forget(self, tenant: TenantId) -> None:
        """Drop a tenant's answers; what still runs is not kept either."""
        shelf = self._shelves.get(tenant, _Shelf())
        for running in shelf.kept.values():
            running.stale = True
        while (recording := shelf.oldest()) is not None:
            self._drop(recording)

    def _count(self, recording: Recording, more: int) -> None:
        """``recording`` takes ``more`` bytes by now: make room, or stop to record it."""
        self._add(recording, more)
        while (full := self._full(recording.key.tenant)) is not None:
            victim = full.oldest()
            if victim is None:
                self._shorten(recording)
                return
            self._drop(victim)

    def _full(self, tenant: TenantId) -> _Shelf | None:
        """The shelf that has to give way: the tenant's own, or the largest where all together take too much."""
        own = self._shelves[tenant]
        if own.bytes > self.settings.max_bytes_per_tenant:
            return own
        if self.bytes > self.settings.max_bytes:
            return max(self._shelves.values(), key=lambda shelf: shelf.bytes)
        return None

    def _shorten(self, recording: Recording) -> None:
        """Keep the key without the answer."""
        more = ENTRY_BYTES - recording.size
        recording.size = ENTRY_BYTES
        self._add(recording, more)
        if more:
            recording.lose()

    def _add(self, recording: Recording, more: int) -> None:
        self.bytes += more
        self._shelves[recording.key.tenant].bytes += more

    def _drop(self, recording: Recording) -> None:
        tenant = recording.key.tenant
        shelf = self._shelves.get(tenant)
        if shelf is None or shelf.kept.get(recording.key) is not recording:
            return
        del shelf.kept[recording.key]
        self._add(recording, -recording.size)
        if recording.timer is not None:
            recording.timer.cancel()
        if recording.claim is not None:
            recording.claim.keys.release(recording.claim.name)
        if not shelf.kept:
            del self._shelves[tenant]


def _reused() -> ApiError:
    return bad_request(
        "This Idempotency-Key was used with another body. Use a new key for a new request.",
        param="Idempotency-Key",
        code="idempotency_key_reused",
        status=422,
    )


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()


def sane_key(value: str) -> str:
    """The caller's key. Raises ApiError 400."""
    if not _SANE_KEY.fullmatch(value):
        raise bad_request(
            f"Idempotency-Key must have 1 to 255 printable ASCII characters without spaces, got {len(value)}.",
            param="Idempotency-Key",
        )
    return value
