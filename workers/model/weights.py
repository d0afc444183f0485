"""Weights by their Hugging Face names, from safetensors (memory-mapped) or straight from GGUF. Never from pickle."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from workers import heap
from workers.model.fields import part, read_object
from workers.model.quant.gguf_blocks import kept, quantised_bytes
from workers.model.quant.matrix import Matrix, Quantised, joined
from workers.model.quant.rounding import RangeError
from workers.model_store import ModelStoreError

_IGNORED = (".rotary_emb.inv_freq",)
"""Old checkpoints store the RoPE frequencies; they follow from the config."""


REOPEN_BYTES = 64 << 20
"""A file is mapped anew after so many bytes: pages once read count as this process's memory until it is closed. Then
what copies of these bytes left free goes back to the system too."""


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
        names = _indexed(index) if index.exists() else sorted(path.name for path in directory.glob("*.safetensors"))
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
        heap.trim()
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


def _indexed(index: Path) -> list[str]:
    """The files that an index names. Raises ModelStoreError."""
    files = part(read_object(index), "weight_map", str(index)).values()
    if not all(isinstance(file, str) for file in files):
        raise ModelStoreError(f"{index}: weight_map must name a file for each weight")
    return sorted(set(files))


class GgufSource:
    """A GGUF file, dequantised tensor by tensor. Rounded to bfloat16 as unpacking does, so that both ways are equal.

    ``quantised`` hands out what need not be dequantised: the same numbers in fewer bytes.
    """

    def __init__(self, model: Any) -> None:
        """``model`` is a ``gguf_unpack.GgufModel``."""
        self._model = model

    @property
    def metadata(self) -> Any:
        """What the file says beside its tensors."""
        return self._model.metadata

    def names(self) -> set[str]:
        """All tensor names."""
        return set(self._model.shapes())

    def read(self, name: str) -> Tensor:
        """One tensor."""
        return torch.from_numpy(self._model.tensor(name)).to(torch.bfloat16)

    def quantised(self, name: str) -> Quantised | None:
        """One matrix in the file's own bits; None for what is no matrix or of a type that no kernel reads."""
        shape = self._model.shapes()[name]
        made = kept(*self._model.stored(name), *shape) if len(shape) == 2 else None
        heads = self._model.permuted(name)
        return made.rows(lambda part: _unpermuted(part, heads)) if made is not None and heads else made

    def kept_bytes(self, width: int) -> int:
        """Bytes of all tensors where matrices stay quantised if they can, and the rest has ``width`` bytes a number."""
        total = 0
        for name, shape in self._model.shapes().items():
            size = quantised_bytes(self._model.stored(name)[0], *shape) if len(shape) == 2 else None
            total += math.prod(shape) * width if size is None else size
        return total

    def __enter__(self) -> GgufSource:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def _unpermuted(part: Tensor, heads: int) -> Tensor:
    """As ``gguf_unpack.unpermute``: rows of q or k from interleaved pairs to halves."""
    return part.view(heads, len(part) // heads // 2, 2, -1).transpose(1, 2).reshape(part.shape)


Rounding = Callable[[str, Tensor], Quantised]
"""(name, weights as stored [rows, columns]) → the matrix that is computed with."""


class Weights:
    """Hands tensors out once each, checked and converted; afterwards tells what nobody asked for."""

    def __init__(
        self,
        source: Source,
        dtype: torch.dtype,
        device: torch.device,
        *,
        fresh: bool = True,
        rounding: Rounding | None = None,
        keep: bool = False,
    ) -> None:
        """``fresh`` False: a tensor that needs no conversion lies in the mapped file, for a taker that copies it.

        ``rounding``: of matrices. ``keep``: matrices stay as the source has them quantised, where it has.
        """
        self._source, self._dtype, self._device, self._fresh = source, dtype, device, fresh
        self._rounding, self._keep = rounding, keep
        self.quantised = 0
        """Matrices handed out in 8 or 4 bits so far."""
        self._left = {name for name in source.names() if not name.endswith(_IGNORED)}

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return self._dtype

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor ``name``, contiguous. Raises ModelStoreError when it is missing or shaped otherwise."""
        stored = self._stored(name, shape)
        if not self._fresh and stored.dtype == self._dtype and stored.data_ptr() % stored.itemsize == 0:
            return stored
        # A copy even when nothing changes: mapped bytes may be unaligned, and would change with the file.
        return torch.empty(shape, dtype=self._dtype, device=self._device).copy_(stored)

    def matrix(self, name: str, shape: tuple[int, int]) -> Tensor | Quantised:
        """As ``take``, for what a linear multiplies with: quantised where that is asked for."""
        made = None
        if self._keep and isinstance(self._source, GgufSource) and name in self._left:
            made = self._source.quantised(name)
            if made is not None:
                self._left.discard(name)
                _same_shape(name, made.shape, shape)
        elif self._rounding is not None:
            try:
                made = self._rounding(name, self._stored(name, shape))
            except RangeError as error:
                raise unfit(name, error) from error
        if made is None:
            return self.take(name, shape)
        self.quantised += 1
        return made.rows(lambda part: part.to(self._device))

    def _stored(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._left:
            raise ModelStoreError(
                f"the weights lack {name!r} (or it was asked for twice); is config.json of this model?"
            )
        self._left.discard(name)
        stored = self._source.read(name)
        _same_shape(name, tuple(stored.shape), shape)
        if not stored.is_floating_point():
            raise ModelStoreError(f"weight {name!r} has type {stored.dtype}; quantised safetensors are not supported")
        return stored

    def close(self, allowed: frozenset[str] = frozenset()) -> None:
        """Raises ModelStoreError when weights were left that the architecture has no place for."""
        left = sorted(self._left - allowed)
        if left:
            raise ModelStoreError(f"{len(left)} weights have no place in this architecture, among them {left[0]!r}")


def unfit(name: str, error: RangeError) -> ModelStoreError:
    """What to raise for a weight that cannot be rounded."""
    return ModelStoreError(f"weight {name!r}: {error}; load it with engine.weight_dtype: auto")


def _same_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise ModelStoreError(f"weight {name!r} has shape {list(found)}, config.json says {list(wanted)}")


def norm_weight(weight: Tensor, unit: bool) -> Tensor:
    """What a norm multiplies by: the weight, or in fp32 1 + the weight (``ModelConfig.unit_norms``)."""
    return weight.float() + 1.0 if unit else weight


class LayerWeights:
    """The weights of one layer, by their names within it."""

    def __init__(self, weights: Weights, index: int) -> None:
        self._weights, self._prefix = weights, f"model.layers.{index}."

    def weight(self, name: str, *shape: int) -> Tensor:
        """``<layer>.name.weight``. Raises ModelStoreError as ``Weights.take`` does; so do the others."""
        return self._weights.take(f"{self._prefix}{name}.weight", shape)

    def matrix(self, name: str, rows: int, columns: int) -> Tensor | Quantised:
        """``<layer>.name.weight`` of a linear, quantised where that is asked for."""
        return self._weights.matrix(f"{self._prefix}{name}.weight", (rows, columns))

    def norm(self, name: str, size: int, unit: bool) -> Tensor:
        """``<layer>.name.weight`` as a norm multiplies by it (``norm_weight``)."""
        return norm_weight(self.weight(name, size), unit)

    def bias(self, name: str, size: int) -> Tensor:
        """``<layer>.name.bias``."""
        return self._weights.take(f"{self._prefix}{name}.bias", (size,))

    def fused(
        self, names: tuple[str, ...], rows: tuple[int, ...], columns: int, biased: bool
    ) -> tuple[Matrix, Tensor | None]:
        """Linears that read the same input as one: weight [sum of rows, columns] and, where there is one, bias."""
        weight = joined([self.matrix(name, size, columns) for name, size in zip(names, rows, strict=True)])
        if not biased:
            return weight, None
        return weight, torch.cat([self.bias(name, size) for name, size in zip(names, rows, strict=True)])
