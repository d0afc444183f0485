"""Chain keys: injective, chained, the same everywhere."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engine.block_hash import ROOT, BlockKey, KeyChain, chain_keys

tokens = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=24)
fields = st.tuples(
    st.binary(max_size=8),
    st.text("rev1AS", max_size=4),
    st.none() | st.text("rev1AS", max_size=4),
    tokens,
    st.integers(1, 4),
)


@given(fields, fields)
def test_encoding_is_injective(a: tuple[Any, ...], b: tuple[Any, ...]) -> None:
    """security 3, security 11, engine A1: keys are equal only if every field and all tokens up to the block are."""
    one, two = chain_keys(*a), chain_keys(*b)
    for i, key in enumerate(one):
        for j, other in enumerate(two):
            size = a[4]
            same = i == j and a[:3] == b[:3] and size == b[4] and a[3][: (i + 1) * size] == b[3][: (j + 1) * size]
            assert (key == other) == same


@given(fields, st.integers(0, 24))
def test_extension_equals_one_go(a: tuple[Any, ...], cut: int) -> None:
    scope, revision, adapter, line, size = a
    known = chain_keys(scope, revision, adapter, line[:cut], size)
    assert chain_keys(scope, revision, adapter, line, size, known=known) == chain_keys(*a)
    assert len(chain_keys(*a)) == len(line) // size


def test_adapter_is_not_a_scope() -> None:
    """engine A1, engine A5, security 3: a salt or scope named like an adapter never meets its blocks."""
    line = list(range(8))
    with_adapter = chain_keys(b"", "r", "X", line, 4)
    posing = [
        chain_keys(b"X", "r", None, line, 4),
        chain_keys(b"", "r", None, line, 4),
        chain_keys(b"", "r", "", line, 4),
        chain_keys(b"", "rX", None, line, 4),
        chain_keys(b"X", "r", "", line, 4),
        chain_keys(b"", "r", "Y", line, 4),
    ]
    keys = [set(keys) for keys in (with_adapter, *posing)]
    assert len(set().union(*keys)) == 2 * len(keys)


def test_compensating_edits_change_the_key() -> None:
    """security 13: adding to one token what is taken from the next is another content."""
    line = [100, 200, 300, 400]
    for shift in (1, 31, 256, 65536):
        edited = [line[0] + shift, line[1] - 1, *line[2:]]
        assert chain_keys(b"s", "r", None, edited, 4) != chain_keys(b"s", "r", None, line, 4)


def test_borders_matter() -> None:
    """security 19: the same tokens under other block borders have other keys."""
    line = [7] * 16
    assert not set(chain_keys(b"s", "r", None, line, 4)) & set(chain_keys(b"s", "r", None, line, 8))
    assert len(set(chain_keys(b"s", "r", None, line, 4))) == 4


def test_same_in_every_process() -> None:
    """engine A7, security 1, security 19: neither PYTHONHASHSEED nor start-up takes part; keys are 256 bits."""
    code = "from workers.engine.block_hash import *; print(chain_keys(b's', 'r', 'a', range(40), 16)[-1].hex())"
    seen = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("0", "1", "random")
    }
    assert seen == {chain_keys(b"s", "r", "a", range(40), 16)[-1].hex()}
    assert len(bytes.fromhex(seen.pop())) == 32


def test_known_value_never_changes() -> None:
    """A shared tier outlives a release: whoever changes the encoding must change its version too."""
    assert chain_keys(b"s", "r", None, [1, 2], 2)[0].hex() == (
        "0b4af6efc79727425a77abd0e21398701e74593b7520123f0c27858be648c661"
    )


def test_light_import() -> None:
    """The gateway calls it: no torch, no third party."""
    code = (
        "import sys, workers.engine.block_hash; print([m for m in ('torch', 'msgspec', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_prefix() -> None:
    """Blocks wholly inside the public prefix are the same for all scopes; the chain turns private at its end."""
    line = list(range(20))
    one = chain_keys(b"one", "r", None, line, 4, public_tokens=10)
    two = chain_keys(b"two", "r", None, line, 4, public_tokens=10)
    assert one[:2] == two[:2]
    assert not set(one[2:]) & set(two[2:])
    assert not set(one) & set(chain_keys(b"one", "r", None, line, 4))
    chain = KeyChain(b"one", "r", None, 4, public_tokens=10)
    assert [chain.is_public(i) for i in range(4)] == [True, True, False, False]


def test_extend_stops_where_told() -> None:
    keys: list[BlockKey] = []
    chain = KeyChain(b"s", "r", None, 2)
    chain.extend(keys, [1, 2, 3, 4, 5, 6], 2)
    assert len(keys) == 2
    chain.extend(keys, [1, 2, 3, 4, 5, 6], 1)
    assert len(keys) == 2
    chain.extend(keys, [1, 2, 3, 4, 5, 6])
    assert keys == chain_keys(b"s", "r", None, [1, 2, 3, 4, 5, 6], 2)
    assert ROOT not in keys


@pytest.mark.parametrize("bad", [-1, 2**32, 1.5, "7", None])
def test_bad_token_is_named(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"tokens: .* is not a token id"):
        chain_keys(b"s", "r", None, [1, bad], 2)


def test_bad_block_size() -> None:
    with pytest.raises(ValueError, match="block_size: 0"):
        chain_keys(b"s", "r", None, [1], 0)
