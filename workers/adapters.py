"""LoRA adapters by name, source and content: what gateway and worker both know of them. No torch.

Rules
- An adapter *is* its content: sha256 over the two files that make it. Cache keys, requests in flight and the worker's
  table go by this digest, so that another content under an old name can meet neither its blocks nor its requests.
- A name is what people say. It means one content at a time, and the gateway decides which (``gateway/adapters.py``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ConfigDict, Field

from policies.strict import StrictScalars

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
MAX_NAME_CHARS = 128


class AdapterSource(StrictScalars):
    """One adapter of ``engine.adapters``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS, pattern=NAME_PATTERN)
    """What clients ask for, as a model of its own or as ``<model>:<name>``."""
    source: str = Field(min_length=1, max_length=4096)
    """A directory in PEFT's layout; relative to the YAML's folder."""


class AdapterError(ValueError):
    """An adapter that cannot be used; the text names file, field, value and remedy, for the operator."""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter that was read, checked and laid out for its runner, and is not in use yet."""

    name: str
    digest: str
    """``sha256:…`` of its files."""
    rank: int
    """The highest of its modules."""
    bytes: int
    """What it occupies."""
    weights: object = field(repr=False)
    """In the runner's own layout."""


def folder_of(source: str, base_dir: str | Path = ".") -> Path:
    """The adapter's directory. Raises AdapterError where it, or one of its two files, is not there."""
    try:
        folder = Path(base_dir) / Path(source).expanduser()
        there = folder.is_dir()
        files = {name: (folder / name).is_file() for name in (CONFIG_FILE, WEIGHTS_FILE, "adapter_model.bin")}
    except (OSError, ValueError, RuntimeError) as error:  # not ours to enter, a zero byte in it, no such home
        raise AdapterError(f"adapter source {source!r} cannot be looked at: {error}") from error
    if not there:
        raise AdapterError(f"adapter source {source!r}: {folder} is no directory")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not files[name]:
            pickled = files["adapter_model.bin"]
            remedy = "; adapter_model.bin is a pickle, which is never read: save as safetensors" if pickled else ""
            raise AdapterError(f"adapter source {source!r}: {folder} has no {name}{remedy}")
    return folder
