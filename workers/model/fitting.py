"""From an adapter's files to what this engine's runner takes: read, lay out, count."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from workers.adapters import AdapterError, LoadedAdapter
from workers.config import EngineConfig
from workers.engine.adapters import AdapterTable
from workers.model import lora
from workers.model.config import ModelConfig
from workers.model.deltas import TorchAdapter
from workers.model.native.adapters import NativeAdapter
from workers.model.native.runner import NativeRunner
from workers.model.registry import architecture
from workers.model.runner import TorchRunner


def reject_adapters(engine: EngineConfig, model: ModelConfig, architectures: Mapping[str, str]) -> None:
    """Raises ValueError, before weights are read, for an architecture that takes no adapters."""
    if not getattr(architecture(model.architecture, architectures), "takes_adapters", False):
        field = "adapters" if engine.adapters else "adapter_memory"
        raise ValueError(
            f"engine.{field}: {model.architecture} takes no adapters; merge them into models of their own, or leave "
            f"engine.{field} out"
        )


class AdapterFitter:
    """Reads adapters for one loaded model. ``read`` may be called from any thread, one call at a time."""

    def __init__(
        self,
        model: ModelConfig,
        engine: EngineConfig,
        runner: TorchRunner | NativeRunner,
        dtype: torch.dtype,
        device: torch.device,
        base_dir: str | Path,
    ) -> None:
        self._model, self._engine, self._runner = model, engine, runner
        self._dtype, self._device, self._base_dir = dtype, device, base_dir
        self._sizes = {
            kind: [lora.module_shape(model, module)[0] for module in modules] for kind, modules in lora.KINDS.items()
        }

    def read(self, name: str, source: str) -> LoadedAdapter:
        """Read, check and lay out. Raises AdapterError."""
        engine = self._engine
        with torch.inference_mode():
            found = lora.read(
                name,
                source,
                self._model,
                base_dir=self._base_dir,
                max_rank=engine.max_adapter_rank,
                room=engine.adapter_room,
            )
            try:
                made = (
                    NativeAdapter(found, self._model, self._dtype)
                    if isinstance(self._runner, NativeRunner)
                    else TorchAdapter(found, self._sizes, self._dtype, self._device)
                )
            except (MemoryError, OSError, torch.OutOfMemoryError) as error:
                raise AdapterError(f"adapter {name!r} does not fit in the memory of {self._device}") from error
        return LoadedAdapter(name, found.digest, found.rank, made.bytes, made)

    def table(self) -> AdapterTable:
        """The engine's table with the adapters of ``engine.adapters``. Raises AdapterError naming the one at fault."""
        engine = self._engine
        made = AdapterTable(self._runner, most=engine.max_adapters, room=engine.adapter_room)
        for i, adapter in enumerate(engine.adapters):
            try:
                refused = made.install(self.read(adapter.name, adapter.source))
            except AdapterError as error:
                raise AdapterError(f"engine.adapters[{i}] ({adapter.name}): {error}") from error
            if refused is not None:
                raise AdapterError(f"engine.adapters[{i}] ({adapter.name}): {refused}")
        return made
