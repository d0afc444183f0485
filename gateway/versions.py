"""What runs: the gateway's own versions and those of the engines behind it (``forebay_build_info``)."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable

from gateway.version import version
from workers.protocol import Hello

_LABEL = re.compile(r"[a-z][a-z0-9_]{0,62}")
_LONGEST = 128
"""Characters of a value: it is a worker's word."""


def own() -> dict[str, str]:
    """The gateway's."""
    return {"forebay": version(), "python": platform.python_version()}


def of_worker(hello: Hello) -> dict[str, str]:
    """What a worker told of its model and itself, its packages and kernels as ``worker_…``; not what it left out."""
    told = {
        "model": hello.model,
        "model_revision": hello.model_revision,
        "tokenizer_sha256": hello.tokenizer_sha256,
        "device": hello.device,
        "dtype": hello.dtype,
        **{f"worker_{name}": value for name, value in hello.versions.items() if _LABEL.fullmatch(name)},
    }
    return {name: value[:_LONGEST] for name, value in told.items() if value}


def of_workers(hellos: Iterable[Hello]) -> list[dict[str, str]]:
    """What runs behind the gateway: each kind of worker once, in a fixed order."""
    kinds = {tuple(sorted(of_worker(hello).items())) for hello in hellos}
    return [dict(kind) for kind in sorted(kinds)]
