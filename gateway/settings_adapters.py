"""Names of models and of their LoRA adapters, as the YAML has them: one space of names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from gateway.settings_base import Mistake

if TYPE_CHECKING:
    from gateway.settings import Model


def known(models: Iterable[Model]) -> frozenset[str]:
    """What may be asked for: models, adapters, and these as ``<model>:<adapter>``."""
    names: set[str] = set()
    for model in models:
        names.add(model.name)
        for pool in model.pools:
            names |= {
                name for adapter in pool.engine.adapters for name in (adapter.name, f"{model.name}:{adapter.name}")
            }
    return frozenset(names)


def could_be(name: str, models: Iterable[Model]) -> bool:
    """Whether ``name`` is ``<model>:<adapter>`` of a model for which adapters can be loaded while it runs."""
    return any(
        name.startswith(f"{model.name}:") and any(pool.engine.adapter_room for pool in model.pools) for model in models
    )


def clashes(models: Iterable[Model]) -> Iterator[Mistake]:
    """Adapters that are called like a model or another model's adapter."""
    models = list(models)
    owner: dict[str, str] = {}
    for i, model in enumerate(models):
        for j, pool in enumerate(model.pools):
            for k, adapter in enumerate(pool.engine.adapters):
                path = (i, "pools", j, "engine", "adapters", k, "name")
                if any(other.name in (adapter.name, f"{model.name}:{adapter.name}") for other in models):
                    yield path, f"{adapter.name!r} is a model's name; clients could not tell them apart"
                elif owner.setdefault(adapter.name, model.name) != model.name:
                    yield path, f"{adapter.name!r} is an adapter of the model {owner[adapter.name]!r} already"
