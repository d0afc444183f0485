"""One block of keys and values as a file: who it belongs to, its bytes, and checksums over both. No torch, no pickle.

Layout: magic (8) · header length (4, little-endian) · header (MessagePack) · BLAKE2b-128 of all before · payload ·
BLAKE2b-128 of the header's checksum and the payload.

Rules
- A file is what it should be in every bit, or it is not read: another model, format, layout or key, a damaged or cut
  off file are all the same ``BadFileError``.
- Files are made under another name and renamed when they are whole; mode 0600.
"""

from __future__ import annotations

import contextlib
import os
from hashlib import blake2b
from pathlib import Path

import msgspec

from workers.engine.block_hash import BlockKey
from workers.engine.block_pool import Holding
from workers.engine.tier_files import File

MAGIC = b"FBKV\x00\x00\x00\x01"
SUFFIX, UNFINISHED = ".kv", ".tmp"
_DIGEST = 16
_PREFIX = len(MAGIC) + 4
MAX_HEADER = 1 << 20


class BadFileError(ValueError):
    """Not a file of this worker's, or damaged."""


class Header(msgspec.Struct, frozen=True, array_like=True):
    """What a restart and a purge must know of a file."""

    fingerprint: bytes
    key: bytes
    scope: bytes
    owner: str
    weight: float
    labels: list[bytes]
    expires: float
    size: int
    """Bytes of the payload."""

    def file(self) -> File:
        """For the index."""
        holding = Holding(self.scope, self.owner, self.weight, frozenset(self.labels))
        return File(BlockKey(self.key), holding, self.expires)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Header).decode


def write(path: Path, fingerprint: bytes, file: File, data: bytes) -> None:
    """Make ``path``. Raises OSError, and then leaves nothing behind."""
    holding = file.holding
    header = _encode(
        Header(
            fingerprint,
            file.key,
            holding.scope,
            holding.owner,
            holding.weight,
            sorted(holding.labels),
            file.expires,
            len(data),
        )
    )
    head = MAGIC + len(header).to_bytes(4, "little") + header
    check = _digest(head)
    aside = path.with_suffix(UNFINISHED)
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb", buffering=0) as out:
            for part in (head + check, data, _digest(check, data)):
                _write_all(out.fileno(), part)
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise


def read(path: Path, fingerprint: bytes, key: BlockKey, size: int) -> memoryview:
    """The payload, ``size`` bytes. Raises BadFileError, OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb", buffering=0) as source:
        length = os.fstat(descriptor).st_size
        if not size < length <= size + MAX_HEADER:
            raise BadFileError(f"{length} bytes")
        whole = bytearray(length)
        view, got = memoryview(whole), 0
        while got < length:
            count = source.readinto(view[got:])
            if not count:
                raise BadFileError("cut off")
            got += count
        os.utime(descriptor)  # the order of use outlives the process
    header, end = _parse(view)
    if header.fingerprint != fingerprint or header.key != key or header.size != size:
        raise BadFileError("another block")
    payload = view[end : end + size]
    if view[end + size :] != _digest(view[end - _DIGEST : end], payload):
        raise BadFileError("checksum")
    return payload


def read_header(path: Path, fingerprint: bytes, size: int) -> Header:
    """Whose block it is, without reading it. Raises BadFileError, OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb", buffering=0) as source:
        start = source.read(4096)
        if len(start) >= _PREFIX and start.startswith(MAGIC):
            needed = min(int.from_bytes(start[len(MAGIC) : _PREFIX], "little"), MAX_HEADER) + _PREFIX + _DIGEST
            if needed > len(start):
                start += source.read(needed - len(start))
        header, end = _parse(memoryview(start))
        length = os.fstat(descriptor).st_size
    if header.fingerprint != fingerprint or header.size != size or path.stem != header.key.hex():
        raise BadFileError("another model's, or another block")
    if length != end + size + _DIGEST:
        raise BadFileError("cut off")
    return header


def _parse(view: memoryview) -> tuple[Header, int]:
    """The header and where the payload begins."""
    if len(view) < _PREFIX + _DIGEST or view[: len(MAGIC)] != MAGIC:
        raise BadFileError("not a block")
    end = _PREFIX + int.from_bytes(view[len(MAGIC) : _PREFIX], "little")
    if end + _DIGEST > len(view) or view[end : end + _DIGEST] != _digest(view[:end]):
        raise BadFileError("checksum of the header")
    try:
        return _decode(view[_PREFIX:end]), end + _DIGEST
    except msgspec.DecodeError as error:
        raise BadFileError("header") from error


def _digest(*parts: bytes | memoryview) -> bytes:
    made = blake2b(digest_size=_DIGEST)
    for part in parts:
        made.update(part)
    return made.digest()


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
