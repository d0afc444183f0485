"""Which engines there are, what each needs, and where its interpreter is."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from gateway.bench.report import BenchError

Weights = Literal["directory", "gguf", "gguf-f16"]
OURS = "forebay"
OVERRIDES = "FOREBAY_BENCH_ENGINE"
"""Variable with the engine block (JSON) of the configuration under test, for our own driver."""


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine that can be driven."""

    name: str
    driver: str
    """Module below ``gateway.bench.peers``."""
    module: str
    """What its interpreter must be able to import."""
    weights: Weights
    """In which form it reads the model."""
    variable: str
    """Names its interpreter, where no option does."""
    preload: tuple[str, ...] = ()
    """Libraries that its makers want preloaded; those found are."""


PEERS = (
    Peer(
        "vllm",
        "drive_vllm",
        "vllm",
        "directory",
        "FOREBAY_VLLM_PYTHON",
        preload=("libtcmalloc_minimal.so.4", "libtcmalloc.so.4", "libiomp5.so"),
    ),
    Peer("openvino", "drive_openvino", "openvino_genai", "gguf-f16", "FOREBAY_OPENVINO_PYTHON"),
    Peer("llama.cpp", "drive_llama", "llama_cpp", "gguf", "FOREBAY_LLAMA_PYTHON"),
)
SELF = Peer(OURS, "drive_forebay", "workers", "directory", "")
_LIBRARY_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/local/lib")


@dataclass(frozen=True, slots=True)
class Installed:
    """A peer with the interpreter that has it."""

    peer: Peer
    python: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    """On top of ours."""

    @property
    def preloaded(self) -> list[str]:
        """Files of the libraries to preload that are there, the first of equal ones only."""
        found: dict[str, str] = {}
        for name in self.peer.preload:
            stem = name.partition(".")[0].removesuffix("_minimal")
            for folder in (self.python.parent.parent / "lib", *map(Path, _LIBRARY_FOLDERS)):
                if stem not in found and (folder / name).exists():
                    found[stem] = str(folder / name)
        return list(found.values())


def find(pythons: Mapping[str, Path | None], environ: Mapping[str, str] | None = None) -> list[Installed]:
    """The peers that are installed: named by option or variable, else in this interpreter.

    Raises BenchError when an interpreter that was named cannot import its engine; one that nobody named is left out.
    """
    environ = os.environ if environ is None else environ
    found = []
    for peer in PEERS:
        named = pythons.get(peer.name) or (Path(environ[peer.variable]) if environ.get(peer.variable) else None)
        if named is not None:
            _must_import(named, peer)
            found.append(Installed(peer, named))
        elif importlib.util.find_spec(peer.module) is not None:
            found.append(Installed(peer, Path(sys.executable)))
    return found


def ours(environment: Mapping[str, str] | None = None) -> Installed:
    """Our own engine in this interpreter."""
    return Installed(SELF, Path(sys.executable), environment or {})


def _must_import(python: Path, peer: Peer) -> None:
    program = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({peer.module!r}) is None)"
    try:
        done = subprocess.run([python, "-c", program], capture_output=True, timeout=60, check=False)  # noqa: S603
    except OSError as error:
        raise BenchError(f"{peer.name}: {python} cannot be run: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise BenchError(f"{peer.name}: {python} did not answer within 60 s") from None
    if done.returncode != 0:
        raise BenchError(f"{peer.name}: {python} has no module {peer.module}; install it there or name another one")
