"""Compile the kernel once per machine and source, and load it.

Rules
- A library appears in the cache whole or not at all (built beside its place, renamed there), under a lock, so that
  workers starting together compile once.
- It ends with its own digest, which the loader of the system does not look at. One that a full disk, a crash or a copy
  cut off or changed is built anew: mapping a file that is shorter than it says ends a process (SIGBUS).
- Its name carries what decides its content: sources, options, this machine's CPU flags where it is compiled for them
  (``native``), compiler and its version. Without a compiler one that any compiler made is taken: an image may bring it.
- ``-ffast-math`` is never used: with GCC 12 it sets flush-to-zero in every thread that loads the library.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from workers.model_store import cache_dir

SOURCES = (
    "vec.h",
    "memory.h",
    "pool.h",
    "lora.h",
    "integers.h",
    "quantised.h",
    "fixed.h",
    "folded.h",
    "linear.h",
    "kept.h",
    "attention.h",
    "rows.h",
    "draw.h",
    "abi.h",
    "adapted.h",
    "plan.h",
    "step.cpp",
)
OPTIONS = ("-std=c++20", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC", "-pthread", "-w")
_HERE = Path(__file__).parent
_DIGEST = hashlib.sha256().digest_size


class NativeUnavailableError(RuntimeError):
    """The kernel cannot be used here; the message says why. The engine then runs its torch backend."""


def compiler() -> str | None:
    """The C++ compiler: ``$CXX``, else g++, c++ or clang++ on the path; None when there is none."""
    named = os.environ.get("CXX")
    return next((found for name in (named, "g++", "c++", "clang++") if name and (found := shutil.which(name))), None)


def architecture_flag() -> str:
    """``-march=native``, or what ``FOREBAY_NATIVE_MARCH`` says (tests build the AVX2 and portable paths with it)."""
    return f"-march={os.environ.get('FOREBAY_NATIVE_MARCH', 'native')}"


def optimisation() -> str:
    """``-O3``, or what ``FOREBAY_NATIVE_OPT`` says (a test compiles faster with ``-O1``)."""
    return os.environ.get("FOREBAY_NATIVE_OPT", "-O3")


def place_of(cxx: str) -> Path:
    """Where the kernel that ``cxx`` makes lies, or will lie, in the cache."""
    return cache_dir() / "kernels" / f"step-{_key(cxx)}.so"


def ready(cxx: str | None) -> Path | None:
    """The kernel that is there already: what ``cxx`` made, or any compiler where there is none.

    Raises OSError for one that cannot be read, SubprocessError for a compiler that does not run.
    """
    if cxx is not None:
        place = place_of(cxx)
        return place if is_whole(place) else None
    for place in sorted((cache_dir() / "kernels").glob(f"step-{_content()}-*.so")):
        with suppress(OSError):
            if is_whole(place):
                return place
    return None


def library() -> Path:
    """Path of the compiled kernel, compiling it when it is not in the cache (about 20 s, once).

    Raises NativeUnavailableError without a compiler or a place to write to, or with the compiler's first error line.
    """
    cxx = compiler()
    if cxx is None:
        if (found := ready(None)) is not None:
            return found
        raise NativeUnavailableError("no C++ compiler (g++, c++ or clang++) on the path; install one or set CXX")
    try:
        return ready(cxx) or _built(cxx)
    except (OSError, subprocess.SubprocessError) as error:  # no place to build in, or a compiler that does not run
        raise NativeUnavailableError(f"{Path(cxx).name} could not build it in {cache_dir()}: {error}") from error


def _built(cxx: str) -> Path:
    """The library, by whoever comes first."""
    place = place_of(cxx)
    place.parent.mkdir(parents=True, exist_ok=True)
    with (place.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_whole(place):
            _compile(cxx, place.parent, place)
    return place


def is_whole(place: Path) -> bool:
    """Whether a library is there, as it was built. Raises OSError for one that cannot be read."""
    try:
        content = place.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]


def _compile(cxx: str, folder: Path, place: Path) -> None:
    handle, name = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    command = [cxx, *OPTIONS, optimisation(), architecture_flag(), "-o", name, str(_HERE / "step.cpp")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)  # noqa: S603
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise NativeUnavailableError(f"{Path(cxx).name} failed: {lines[0][:300] if lines else 'no message'}")
        with Path(name).open("r+b") as built:
            digest = hashlib.file_digest(built, "sha256").digest()
            built.seek(0, os.SEEK_END)
            built.write(digest)
            os.fchmod(built.fileno(), 0o755)  # else its maker alone could read it, and an image runs as somebody else
        os.replace(name, place)
    finally:
        Path(name).unlink(missing_ok=True)


@cache
def _key(cxx: str) -> str:
    version = subprocess.run([cxx, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout  # noqa: S603
    maker = hashlib.sha256(f"{cxx} {version}".encode()).hexdigest()
    return f"{_content()}-{maker[:8]}"


def _content() -> str:
    """Names what is compiled, whoever compiles it."""
    digest = hashlib.sha256()
    for source in SOURCES:
        digest.update((_HERE / source).read_bytes())
    own = _cpu_flags() if architecture_flag().endswith("native") else ""
    for part in (" ".join(OPTIONS), optimisation(), architecture_flag(), own, platform.machine()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:20]


def _cpu_flags() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    lines = (line for line in text.splitlines() if line.startswith(("flags", "Features")))
    return next(lines, platform.processor())


@cache
def load() -> ctypes.CDLL:
    """The kernel, with argument types set. Raises NativeUnavailableError."""
    path = library()
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailableError(f"{path.name} does not load: {error}") from error
    lib.fb_isa.restype = ctypes.c_char_p
    lib.fb_create.restype = ctypes.c_void_p
    lib.fb_create.argtypes = [ctypes.c_void_p, ctypes.c_int]
    lib.fb_destroy.restype = None
    lib.fb_destroy.argtypes = [ctypes.c_void_p]
    lib.fb_step.restype = ctypes.c_int
    lib.fb_step.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    lib.fb_fold.restype = ctypes.c_long
    lib.fb_fold.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    return lib
