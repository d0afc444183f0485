"""Roundings that were fitted to a text, kept on disk: each is made once for a model and then read in no time.

Rules
- ``<cache>/roundings/<key>.safetensors``. The key names all that the numbers depend on: weights, decoder, text, method.
- A file appears whole or not at all, and says what its tensors' bytes add up to (SHA-256). One that is damaged, cut off
  or of another layout counts as none, and is made anew over it.
- One process makes them at a time; others that want the same wait and read it. So workers of one cache compute with the
  very same weights, which a second fit need not give (sums come in another order with other threads).
- Those that were used last stay, of all that fit into ``ROOM``. A disk that cannot be written costs the fit at every
  start, nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from workers.model.quant.matrix import Q4K, Quantised
from workers.model.quant.rounding import int4, int8
from workers.model.quant.scheme import stays_fine
from workers.model_store import locked

METHOD = 2
"""Version of ``calibrate.py`` and of the file; a change fits anew."""
ROOM = 32 << 30
"""Bytes of all files together."""
_PARTS = ("codes", *Q4K.parts)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fitted:
    """A rounding (``weights.Rounding``) by name; what was not fitted is rounded without data."""

    matrices: Mapping[str, Quantised]
    digest: str
    """Of all numbers: equal, and the same model computes with the same weights."""
    path: Path | None
    """Where it is kept."""

    def __call__(self, name: str, weight: Tensor) -> Quantised:
        """Raises RangeError for a weight without scale that was not fitted."""
        if stays_fine(name):
            return int8(weight)
        made = self.matrices.get(name)
        if made is None or made.shape != tuple(weight.shape):
            return int4(weight)
        return made.rows(torch.clone)  # it may lie in a mapped file


def find_or_fit(cache: Path, about: Mapping[str, str], fit: Callable[[], dict[str, Quantised]]) -> Fitted:
    """The rounding of what ``about`` names: read, or made by ``fit`` and kept. Raises what ``fit`` does."""
    key = hashlib.sha256(json.dumps({**about, "method": str(METHOD)}, sort_keys=True).encode()).hexdigest()[:32]
    path = cache / "roundings" / f"{key}.safetensors"
    if found := read(path):
        return found
    with contextlib.ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(path.parent / ".lock"))
        except OSError as error:
            return _unkept(fit(), path, error)
        if found := read(path):
            return found
        made = fit()
        try:
            _write(path, made)
        except (OSError, SafetensorError) as error:
            return _unkept(made, path, error)
        _sweep(path)
    return Fitted(made, _digest(made), path)


def _unkept(made: dict[str, Quantised], path: Path, error: Exception) -> Fitted:
    _log.warning("rounding_not_kept", extra={"folder": str(path.parent), "error": type(error).__name__})
    return Fitted(made, _digest(made), None)


def read(path: Path) -> Fitted | None:
    """What lies there; None for no file, and for one that is not whole. Marks it as used."""
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            columns: dict[str, int] = json.loads(about["columns"])
            made = {name: _read(file, name, width) for name, width in columns.items()}
        if _digest(made) != about["digest"]:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return Fitted(made, about["digest"], path)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _read(file: Any, name: str, columns: int) -> Quantised:
    codes, *parts = (file.get_tensor(f"{name}:{part}") for part in _PARTS)
    return Quantised(Q4K, columns, codes, tuple(parts))


def _write(path: Path, made: Mapping[str, Quantised]) -> None:
    tensors = {
        f"{name}:{part}": tensor.contiguous()
        for name, matrix in made.items()
        for part, tensor in zip(_PARTS, matrix.tensors(), strict=True)
    }
    columns = {name: matrix.columns for name, matrix in made.items()}
    handle, scratch = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    try:
        save_file(tensors, scratch, metadata={"columns": json.dumps(columns), "digest": _digest(made)})
        os.chmod(scratch, 0o644)  # mkstemp's 0600 would hide it from other users of a shared cache
        os.replace(scratch, path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise


def _digest(made: Mapping[str, Quantised]) -> str:
    digest = hashlib.sha256()
    for name in sorted(made):
        digest.update(f"{name}\0{made[name].columns}\0".encode())
        for tensor in made[name].tensors():
            digest.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _sweep(newest: Path) -> None:
    """Remove the files that were not used for longest beyond ``ROOM``, and what a process left that died writing."""
    with contextlib.suppress(OSError):
        scratch = [path for path in newest.parent.iterdir() if path.name.startswith(".") and path.name != ".lock"]
        held = [(path.stat(), path) for path in newest.parent.glob("[!.]*.safetensors") if path != newest]
        room, gone = ROOM - newest.stat().st_size, []
        for about, path in sorted(held, key=lambda one: one[0].st_mtime, reverse=True):
            room -= about.st_size
            if room < 0:
                gone.append(path)
        for path in [*scratch, *gone]:
            path.unlink(missing_ok=True)
