"""A report: what was measured, of what, on what. JSON for programs; the words that every report shares.

Keys of ``runs[]``: those of ``metrics.summarise``, with ``concurrency``, ``input``, ``output`` and, where it was
measured, ``floor`` = {``output_tokens_s`` …}.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.config import EngineConfig
    from workers.model.loading import LoadedModel
    from workers.model_store import ModelFiles

FORMAT = 1
LIBRARIES = ("torch", "numpy", "tokenizers", "triton", "flashinfer-python")
"""Those of them that are installed."""


class BenchError(Exception):
    """The measurement cannot be made; the text says why and what would help."""


@dataclass(slots=True)
class Report:
    """One invocation of ``forebay bench``."""

    kind: str
    """engine, serve, floor, compare, peers, tables or techniques."""
    versions: Mapping[str, Any]
    parameters: Mapping[str, Any]
    runs: list[dict[str, Any]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    """Further top-level keys."""
    at: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))

    def to_json(self) -> dict[str, Any]:
        """The whole."""
        return {
            "format": FORMAT,
            "kind": self.kind,
            "at": self.at,
            "versions": dict(self.versions),
            "parameters": dict(self.parameters),
            "runs": self.runs,
            **self.extra,
        }

    def write(self, path: Path) -> None:
        """Write JSON; ``-`` is standard output. Raises BenchError when that is impossible."""
        text = json.dumps(self.to_json(), indent=2) + "\n"
        if str(path) == "-":
            sys.stdout.write(text)
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except OSError as error:
            raise BenchError(f"--json {path}: cannot be written: {error.strerror}") from None


def read(path: Path) -> dict[str, Any]:
    """A report that ``write`` made. Raises BenchError naming the file."""
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise BenchError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise BenchError(f"{path}: is not JSON: {error}") from None
    return checked(data, str(path))


def checked(data: Any, where: str) -> dict[str, Any]:
    """``data`` if it has the shape of a report. Raises BenchError."""
    if not isinstance(data, dict) or not isinstance(data.get("runs"), list):
        raise BenchError(f"{where}: is no report of forebay bench (a JSON object with runs)")
    return data


def machine() -> dict[str, Any]:
    """What the process runs on, and how busy that was just now."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load_1m": round(os.getloadavg()[0], 2),
    }


def software() -> dict[str, str]:
    """Versions of what computes, and the allocator under it."""
    from workers.host import loaded_allocator

    found = {"python": platform.python_version(), "forebay": _version("forebay") or "source tree"}
    found["allocator"] = loaded_allocator()
    return {**found, **{name: version for name in LIBRARIES if (version := _version(name))}}


def engine_versions(loaded: LoadedModel, config: EngineConfig, source: str) -> dict[str, Any]:
    """Runtime, kernels, model and tokenizer hash, device."""
    return {
        **software(),
        "kernels": loaded.attention,
        **model_versions(source, loaded),
        "device": loaded.device,
        "device_name": loaded.device_name,
        "dtype": loaded.dtype,
        "threads": config.threads or machine()["cores"],
        "machine": machine(),
    }


def model_versions(source: str, files: LoadedModel | ModelFiles) -> dict[str, str]:
    """Which weights and which tokenizer, by their hashes."""
    return {"model": source, "model_revision": files.revision, "tokenizer_sha256": files.tokenizer_sha256}


def busy() -> str | None:
    """A warning when others use the machine; their share would be in every figure."""
    load, cores = os.getloadavg()[0], machine()["cores"]
    if load > 0.5 * cores:
        return f"the machine is busy (load {load:.1f} on {cores} cores): figures will be too low and will vary"
    return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
