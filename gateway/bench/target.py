"""Which model and ``engine:`` block a measurement is about: those of a pool in a configuration file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.bench.engine import overridden
from gateway.bench.report import BenchError

if TYPE_CHECKING:
    from gateway.config_file import Loaded
    from workers.config import EngineConfig
    from workers.model_store import ModelFiles


@dataclass(frozen=True, slots=True)
class Target:
    """A model source, the folder that relative sources start at, and engine settings."""

    source: str
    base_dir: Path
    engine: EngineConfig

    def files(self) -> ModelFiles:
        """The model on disk; fetches and unpacks it when need be. Raises BenchError."""
        from workers.model_store import ModelStoreError, resolve

        try:
            return resolve(self.source, base_dir=self.base_dir)
        except ModelStoreError as error:
            raise BenchError(str(error)) from None


def pick(loaded: Loaded, model: str | None, pool: str | None, settings: Iterable[str] = ()) -> Target:
    """The first model and pool, or the ones named, with ``key=value`` settings on top. Raises BenchError."""
    models = {item.name: item for item in loaded.settings.models}
    if model is not None and model not in models:
        raise BenchError(f"--model {model!r} is not in {loaded.path}; it has {', '.join(models)}")
    chosen = models[model] if model is not None else loaded.settings.models[0]
    if chosen.source is None:
        raise BenchError(f"model {chosen.name!r} has no source: no engine of ours runs it")
    pools = {item.name: item for item in chosen.pools}
    if pool is not None and pool not in pools:
        raise BenchError(f"--pool {pool!r} is no pool of model {chosen.name!r}; it has {', '.join(pools)}")
    engine = (pools[pool] if pool is not None else chosen.pools[0]).engine
    return Target(chosen.source, loaded.base_dir, overridden(engine, settings))
