"""Where files live: the shipped YAML files, the user's cache, and the development key.

Rules
- Nothing is ever written into the repository or the installed package.
- A secret file is made with mode 0600, whole or not at all; one that others may read, or that is a link or somebody
  else's, is refused, not mended: it may be known already.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import tempfile
from pathlib import Path

from workers.model_store import cache_dir

__all__ = [
    "PathError",
    "cache_dir",
    "config_dir",
    "dev_key",
    "dev_key_path",
    "resolve_config",
    "shipped_configs",
    "state_dir",
]
_SERVES = re.compile(r"^models:", re.MULTILINE)

DEV_KEY_FILE = "dev-jwt.key"


class PathError(ValueError):
    """A file is missing or not as it has to be; the text names it and the remedy."""


def config_dir() -> Path:
    """The folder of the shipped YAML files: inside an installed wheel, else ``config/`` of the repository."""
    here = Path(__file__).resolve().parent
    packed = here / "_config"
    return packed if packed.is_dir() else here.parent / "config"


def shipped_configs() -> list[Path]:
    """The shipped files that configure a gateway; beside them are those of the tools around it (Jaeger)."""
    return [path for path in sorted(config_dir().glob("*.yaml")) if _SERVES.search(path.read_text(encoding="utf-8"))]


def resolve_config(name: str) -> Path:
    """The file that ``name`` means: a path, or the name of a shipped file (``demo``). Raises PathError listing both."""
    path = Path(name).expanduser()
    if path.is_file():
        return path.absolute()
    shipped = config_dir() / f"{name}.yaml"
    if path.name == name and shipped.is_file():
        return shipped
    if path.is_dir():
        raise PathError(f"{name!r} is a folder; name the YAML file in it")
    known = ", ".join(file.stem for file in shipped_configs()) or "none"
    raise PathError(
        f"there is no file {name!r} (looked at {path.absolute()}), and no shipped one of that name ({known})"
    )


def state_dir() -> Path:
    """What must outlive a cleared cache: ``$FOREBAY_STATE``, else ``$XDG_STATE_HOME/forebay``, else below the home.

    A ``$FOREBAY_CACHE`` without ``$FOREBAY_STATE`` keeps state in it too, so that one variable moves everything.
    """
    if own := os.environ.get("FOREBAY_STATE"):
        return Path(own).expanduser()
    if cache := os.environ.get("FOREBAY_CACHE"):
        return Path(cache).expanduser() / "state"
    if xdg := os.environ.get("XDG_STATE_HOME"):
        return Path(xdg).expanduser() / "forebay"
    return Path.home() / ".local" / "state" / "forebay"


def dev_key_path() -> Path:
    """Where ``dev_key`` keeps its key."""
    return state_dir() / DEV_KEY_FILE


def dev_key() -> str:
    """The key of development tokens (64 hex digits), made on the first call; all processes of a user get the same.

    Raises PathError for a key file that is not the user's alone, or has no key in it, and where none can be made.
    """
    path = dev_key_path()
    try:
        if not path.is_symlink() and not path.exists():
            _create(path, secrets.token_hex(32))
    except OSError as error:
        raise PathError(
            f"the development key {path} cannot be made ({error.strerror}); set FOREBAY_STATE to a folder that can be "
            f"written, or set a key of your own"
        ) from None
    return _read(path)


def _create(path: Path, text: str) -> None:
    """Write beside and link into place: readers see the whole file, and of two writers the first wins."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=".key-")  # mode 0600
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(scratch, path)
    finally:
        os.unlink(scratch)


def _read(path: Path) -> str:
    remedy = f"delete {path} and start again (tokens made with it end to be valid)"
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise PathError(f"the development key cannot be read ({error.strerror}); {remedy}") from None
    with os.fdopen(handle) as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
            raise PathError(f"the development key is not this user's alone (mode {info.st_mode & 0o777:o}); {remedy}")
        text = file.read(4096).strip()
    if len(text) < 32:
        raise PathError(f"the development key is too short; {remedy}")
    return text
