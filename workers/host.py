"""What a worker process takes from its machine: allocator, cores, OpenMP's settings. Chosen before torch is loaded.

Rules
- The allocator is the launcher's choice, since a library can only be preloaded into a process that is not there yet:
  tcmalloc or jemalloc where one is installed. A worker started by hand has the one that its ``LD_PRELOAD`` names.
- Variables that the operator has set stay as they are.
- As many threads as cores that this process may use, fewer where its control group gets less time (``docker run
  --cpus``, Kubernetes' limits): threads beyond it would be stopped in turn, while the others wait for them.
- Nothing is bound to cores unless ``engine.cores`` says so: gateway and other workers need cores too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path

from workers import cgroup
from workers.config import EngineConfig

ALLOCATORS: Mapping[str, tuple[str, ...]] = {
    "tcmalloc": ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4"),
    "jemalloc": ("libjemalloc.so.2",),
}
_PACKAGES = {"tcmalloc": "libtcmalloc-minimal4", "jemalloc": "libjemalloc2"}
LIBRARY_DIRS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
)


def find(names: Iterable[str] = ALLOCATORS, dirs: Iterable[str] | None = None) -> tuple[str, Path] | None:
    """The first of the allocators ``names`` that is installed: (name, library)."""
    places = [Path(folder) for folder in (LIBRARY_DIRS if dirs is None else dirs)]
    for name in names:
        for folder in places:
            for library in ALLOCATORS[name]:
                if (folder / library).exists():
                    return name, folder / library
    return None


def preload(choice: str, env: Mapping[str, str], dirs: Iterable[str] | None = None) -> dict[str, str]:
    """``LD_PRELOAD`` for a worker with ``engine.allocator``; nothing where ``env`` names an allocator already.

    Raises ValueError for a named one that is not installed.
    """
    given = env.get("LD_PRELOAD", "")
    if choice == "system" or any(name in given for name in (*ALLOCATORS, "mimalloc")):
        return {}
    found = find(ALLOCATORS if choice == "auto" else (choice,), dirs)
    if found is None:
        if choice == "auto":
            return {}
        raise ValueError(
            f"engine.allocator={choice}: {' or '.join(ALLOCATORS[choice])} is not installed (Debian: "
            f"{_PACKAGES[choice]}); install it or write auto"
        )
    return {"LD_PRELOAD": f"{found[1]}:{given}" if given else str(found[1])}


def loaded_allocator() -> str:
    """The allocator in this process: ``tcmalloc``, ``jemalloc``, ``mimalloc`` or ``system``."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return "system"
    return next((name for name in (*ALLOCATORS, "mimalloc") if f"lib{name}" in maps), "system")


def parse_cores(text: str) -> set[int]:
    """``"0-3,8"`` → {0, 1, 2, 3, 8}. Raises ValueError for a range that runs backwards."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found = range(int(first), int(last or first) + 1)
        if not found:
            raise ValueError(f"engine.cores={text!r}: {part} runs backwards; write {last}-{first}")
        cores.update(found)
    return cores


def settle(engine: EngineConfig, env: MutableMapping[str, str] = os.environ) -> dict[str, object]:
    """Bind to cores, set OpenMP's variables; what was chosen, for the log. Call it before torch is imported.

    Raises ValueError naming the cores that this process may not use.
    """
    if engine.cores is not None:
        _bind(engine.cores)
    wanted = {
        # Spinning at each barrier, steps took twelve times as long on a busy machine.
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": str(engine.threads or _usable()),
    }
    if engine.cores is not None:
        wanted |= {"OMP_PROC_BIND": "close", "OMP_PLACES": "threads"}
    for name, value in wanted.items():
        env.setdefault(name, value)
    shown = {name.lower(): env[name] for name in wanted}
    return {"allocator": loaded_allocator(), "threads": engine.threads, "cores": _text(_cores()), **shown}


def _bind(text: str) -> None:
    wanted = parse_cores(text)
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError(f"engine.cores={text!r}: this system binds no process to cores; leave it out")
    missing = wanted - _cores()
    if missing:
        raise ValueError(
            f"engine.cores={text!r}: core {_text(missing)} is not there for this process; it may use {_text(_cores())}"
        )
    os.sched_setaffinity(0, wanted)


def _cores() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _usable() -> int:
    """How many threads can run at once without being stopped."""
    return int(max(1, min(len(_cores()), cgroup.cores())))


def _text(cores: Iterable[int]) -> str:
    """{0, 1, 2, 3, 8} → ``0-3,8``."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
