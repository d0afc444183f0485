"""Architectures by name: what is listed is what a worker can build."""

from __future__ import annotations

import pytest

from policies.manager import make_manager
from policies.registry import Registry
from workers.model.registry import BUILTIN, architecture
from workers.model_store import ModelStoreError


def test_what_the_plugins_hook_lists_is_what_workers_know() -> None:
    """The built-in ones are registered through the hook that plugins use; both name the same classes."""
    listed = {item.spec.architecture: item.spec.target for item in Registry.from_manager(make_manager()).models()}
    assert listed == BUILTIN


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_every_name_leads_to_a_decoder(name: str) -> None:
    made = architecture(name)
    assert made.__module__ == BUILTIN[name].partition(":")[0]
    assert callable(made)


@pytest.mark.parametrize(
    ("target", "wrong"),
    [
        ("workers.model.llama:Nobody", "which fails"),
        ("nowhere.at_all:Decoder", "which fails"),
        ("workers.model.llama", "is not module:attribute"),
    ],
)
def test_a_target_that_is_not_there_is_named(target: str, wrong: str) -> None:
    with pytest.raises(ModelStoreError, match=wrong):
        architecture("MineForCausalLM", {"MineForCausalLM": target})


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ModelStoreError, match=r"'Mine' is not supported \(supported: Gemma2ForCausalLM, "):
        architecture("Mine")
