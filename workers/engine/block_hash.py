"""Chain keys of the prefix cache (DESIGN §7). Standard library only: the gateway computes the same keys for locality.

Rules
- ``key[i] = sha256(key[i-1] ‖ header ‖ tokens of block i)``; every field carries a tag and its length, so that no two
  different inputs have the same encoding (no adapter name can pose as a scope, no block border can move unseen).
- The same in every process and on every machine: nothing depends on ``hash()``, byte order or start-up.
- Only full blocks have a key. A key names everything before its block too, through the chain.
- Blocks wholly inside an operator's public prefix carry the public tag instead of the tenant's scope; the first block
  that is not wholly inside turns the chain private, and all that follow are.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from typing import NewType

BlockKey = NewType("BlockKey", bytes)
"""32 bytes that name the content of one full block and of everything before it."""

ROOT = BlockKey(bytes(32))
"""Predecessor of a first block."""

_VERSION = b"forebay-kv/1"
_TOKEN_BYTES = 4
_SWAP = sys.byteorder == "big"


def _field(tag: bytes, data: bytes) -> bytes:
    return tag + len(data).to_bytes(8, "little") + data


def _packed(tokens: Sequence[int]) -> bytes:
    """Tokens as 32-bit little-endian integers. Raises ValueError for one that is none."""
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError) as error:
        bad = next((t for t in tokens if not isinstance(t, int) or not 0 <= t < 2**32), None)
        raise ValueError(f"tokens: {bad!r} is not a token id; ids are integers from 0 to 2**32 - 1") from error
    if _SWAP:
        packed.byteswap()
    return packed.tobytes()


@lru_cache(1024)
def _headers(scope: bytes, revision: str, adapter: str | None, block_size: int) -> tuple[bytes, bytes]:
    """What a block's key says besides its tokens: of a private one, and of one in a public prefix."""
    shared = _field(b"V", _VERSION) + _field(b"R", revision.encode())
    shared += _field(b"a", b"") if adapter is None else _field(b"A", adapter.encode())
    tokens = b"T" + block_size.to_bytes(8, "little")
    return shared + _field(b"S", scope) + tokens, shared + _field(b"P", b"") + tokens


class KeyChain:
    """Makes the keys of one token line; holds what is the same for all its blocks.

    ``public_tokens``: how many leading tokens lie in a public prefix. Raises ValueError for a block size below 1.
    """

    __slots__ = ("_private", "_public", "_public_blocks", "block_size")

    def __init__(
        self, scope: bytes, revision: str, adapter: str | None, block_size: int, *, public_tokens: int = 0
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size: {block_size} is not a block size; use 1 or more tokens")
        self._private, self._public = _headers(scope, revision, adapter, block_size)
        self._public_blocks = max(0, public_tokens) // block_size
        self.block_size = block_size

    def is_public(self, index: int) -> bool:
        """Whether block ``index`` lies wholly inside the public prefix."""
        return index < self._public_blocks

    def extend(self, keys: list[BlockKey], tokens: Sequence[int], blocks: int | None = None) -> None:
        """Append the missing keys of the full blocks of ``tokens`` to ``keys``, at most up to ``blocks`` keys.

        ``tokens`` is the whole line from its first token; ``keys`` are those made of its beginning.
        """
        size = self.block_size
        full = len(tokens) // size
        if blocks is not None and blocks < full:
            full = blocks
        done = len(keys)
        if done >= full:
            return
        data = _packed(tokens[done * size : full * size])
        width = size * _TOKEN_BYTES
        key: bytes = keys[-1] if keys else ROOT
        for index in range(done, full):
            offset = (index - done) * width
            header = self._public if index < self._public_blocks else self._private
            key = sha256(key + header + data[offset : offset + width]).digest()
            keys.append(BlockKey(key))


def chain_keys(
    scope: bytes,
    revision: str,
    adapter: str | None,
    tokens: Sequence[int],
    block_size: int,
    *,
    known: Sequence[BlockKey] = (),
    public_tokens: int = 0,
) -> list[BlockKey]:
    """Keys of the full blocks of ``tokens``, first to last.

    ``known``: keys made earlier of the beginning of the same tokens; only the rest is computed.
    Raises ValueError for a token that is not an integer in [0, 2**32) and for a block size below 1.
    """
    keys = list(known)
    KeyChain(scope, revision, adapter, block_size, public_tokens=public_tokens).extend(keys, tokens)
    return keys
