"""The native kernel in the three forms that the tests run, compiled in the background when the whole suite starts.

Compiling takes most of a minute of one core. Whoever needs a form that is not there yet waits for it at the lock of
``workers/model/native/build.py``; a form that is in the cache already costs nothing.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest

from workers.model.native import build

FORMS: Mapping[str, Mapping[str, str]] = {
    "native": {},
    "avx2": {"FOREBAY_NATIVE_MARCH": "x86-64-v3", "FOREBAY_NATIVE_OPT": "-O0"},
    "portable": {"FOREBAY_NATIVE_MARCH": "x86-64", "FOREBAY_NATIVE_OPT": "-O0"},
}
"""Environment of each. The narrower ones are compiled the fast way: what they compute is tested, not how soon."""


@contextlib.contextmanager
def form(name: str) -> Iterator[None]:
    """``build`` makes and finds this form meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in FORMS[name].items():
            patch.setenv(variable, value)
        build._key.cache_clear()
        yield
    build._key.cache_clear()


def start_building(config: pytest.Config) -> None:
    """In a process of its own, which the session waits for at its end: what it made serves the next one."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.kernels"],
        cwd=config.rootpath,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # a compiler that fails is reported by every test that needs what it makes
    )
    config.add_cleanup(process.wait)


if __name__ == "__main__":
    for name in FORMS:
        with form(name), contextlib.suppress(build.NativeUnavailableError):
            build.library()
