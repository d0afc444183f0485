"""The folder that ``state.path`` names.

Rules
- It is made with mode 0700, with its parents; one that other users can enter is refused, not mended: what is in it may
  have been read or replaced already.
- Nothing here opens a file in it: whoever keeps one makes sure of its own rights.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from gateway.settings import State


class StateError(ValueError):
    """The state cannot be kept where the configuration says; the text names the key and the remedy."""


def folder(state: State, base_dir: Path) -> Path | None:
    """The folder, there and ours; None where ``state.path`` is null. Raises StateError."""
    if state.path is None:
        return None
    path = base_dir / Path(state.path).expanduser()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.stat()
    except OSError as error:
        raise StateError(f"state.path: {path} cannot be made ({error.strerror}); name a folder of your own") from None
    if info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise StateError(
            f"state.path: {path} is open to other users (mode {stat.S_IMODE(info.st_mode):o}); "
            f"give it to this user alone: chmod 700 {path}"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise StateError(f"state.path: {path} cannot be written; name a folder of your own")
    return path
