"""Weights by their Hugging Face names, from safetensors (memory-mapped) or straight from GGUF. Never from pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from workers.model_store import ModelStoreError

_IGNORED = (".rotary_emb.inv_freq",)
"""Old checkpoints store the RoPE frequencies; they follow from the config."""


REOPEN_BYTES = 64 << 20
"""A file is mapped anew after so many bytes: pages once read count as this process's memory until it is closed."""


class Source(Protocol):
    """Named tensors as stored."""

    def names(self) -> set[str]:
        """All tensor names."""
        ...

    def read(self, name: str) -> Tensor:
        """One tensor on the CPU, in its stored type."""
        ...


class SafetensorsSource:
    """All ``*.safetensors`` of a directory, or those its index names. A context: leaving it closes the file in use."""

    def __init__(self, directory: Path) -> None:
        """Raises ModelStoreError when there are none or one is damaged."""
        self._where: dict[str, Path] = {}
        self._file: tuple[Path, Any] | None = None
        self._read = 0
        """Bytes read since the file was mapped."""
        index = directory / "model.safetensors.index.json"
        if index.exists():
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        else:
            names = sorted(path.name for path in directory.glob("*.safetensors"))
        if not names:
            raise ModelStoreError(f"{directory} has no *.safetensors")
        for name in names:
            path = directory / Path(name).name
            self._where.update(dict.fromkeys(self._open(path).keys(), path))

    def names(self) -> set[str]:
        """All tensor names."""
        return set(self._where)

    def read(self, name: str) -> Tensor:
        """One tensor, backed by the mapped file."""
        path = self._where[name]
        file = self._file[1] if self._file and self._file[0] == path and self._read < REOPEN_BYTES else self._open(path)
        tensor: Tensor = file.get_tensor(name)
        self._read += tensor.nbytes
        return tensor

    def _open(self, path: Path) -> Any:
        self._close()
        try:
            file: Any = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ModelStoreError(f"{path} is not a readable safetensors file: {error}") from error
        self._file, self._read = (path, file.__enter__()), 0
        return self._file[1]

    def _close(self) -> None:
        if self._file is not None:
            self._file[1].__exit__(None, None, None)
            self._file = None

    def __enter__(self) -> SafetensorsSource:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()


class GgufSource:
    """A GGUF file, dequantised tensor by tensor. Rounded to bfloat16 as unpacking does, so that both ways are equal."""

    def __init__(self, model: Any) -> None:
        """``model`` is a ``gguf_unpack.GgufModel``."""
        self._model = model

    def names(self) -> set[str]:
        """All tensor names."""
        return set(self._model.shapes())

    def read(self, name: str) -> Tensor:
        """One tensor."""
        return torch.from_numpy(self._model.tensor(name)).to(torch.bfloat16)

    def __enter__(self) -> GgufSource:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class Weights:
    """Hands tensors out once each, checked and converted; afterwards tells what nobody asked for."""

    def __init__(self, source: Source, dtype: torch.dtype, device: torch.device, *, fresh: bool = True) -> None:
        """``fresh`` False: a tensor that needs no conversion lies in the mapped file, for a taker that copies it."""
        self._source, self._dtype, self._device, self._fresh = source, dtype, device, fresh
        self._left = {name for name in source.names() if not name.endswith(_IGNORED)}

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor ``name``, contiguous. Raises ModelStoreError when it is missing or shaped otherwise."""
        if name not in self._left:
            raise ModelStoreError(
                f"the weights lack {name!r} (or it was asked for twice); is config.json of this model?"
            )
        self._left.discard(name)
        stored = self._source.read(name)
        if tuple(stored.shape) != shape:
            raise ModelStoreError(f"weight {name!r} has shape {list(stored.shape)}, config.json says {list(shape)}")
        if not stored.is_floating_point():
            raise ModelStoreError(f"weight {name!r} has type {stored.dtype}; quantised safetensors are not supported")
        if not self._fresh and stored.dtype == self._dtype and stored.data_ptr() % stored.itemsize == 0:
            return stored
        # A copy even when nothing changes: mapped bytes may be unaligned, and would change with the file.
        return torch.empty(shape, dtype=self._dtype, device=self._device).copy_(stored)

    def close(self, allowed: frozenset[str] = frozenset()) -> None:
        """Raises ModelStoreError when weights were left that the architecture has no place for."""
        left = sorted(self._left - allowed)
        if left:
            raise ModelStoreError(f"{len(left)} weights have no place in this architecture, among them {left[0]!r}")


class LayerWeights:
    """The weights of one layer, by their names within it."""

    def __init__(self, weights: Weights, index: int) -> None:
        self._weights, self._prefix = weights, f"model.layers.{index}."

    def weight(self, name: str, *shape: int) -> Tensor:
        """``<layer>.name.weight``. Raises ModelStoreError as ``Weights.take`` does; so do the others."""
        return self._weights.take(f"{self._prefix}{name}.weight", shape)

    def bias(self, name: str, size: int) -> Tensor:
        """``<layer>.name.bias``."""
        return self._weights.take(f"{self._prefix}{name}.bias", (size,))

    def fused(
        self, names: tuple[str, ...], rows: tuple[int, ...], columns: int, biased: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Linears that read the same input as one: weight [sum of rows, columns] and, where there is one, bias."""
        parts = [self.weight(name, size, columns) for name, size in zip(names, rows, strict=True)]
        weight = parts[0] if len(parts) == 1 else torch.cat(parts)
        if not biased:
            return weight, None
        return weight, torch.cat([self.bias(name, size) for name, size in zip(names, rows, strict=True)])
