"""What a person sees on stderr while it measures: bars on a terminal, else a line when something begins."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

Tick = Callable[[int, int], None]
"""(done, total)."""


class Display:
    """``with Display() as display: with display.task("8 running") as tick: tick(3, 10)``. Tasks may nest."""

    def __init__(self) -> None:
        self._bars: Progress | None = None

    def __enter__(self) -> Display:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._bars is not None:
            self._bars.console.print(text, highlight=False, markup=False)
        else:
            print(text, file=sys.stderr, flush=True)  # noqa: T201 - a command's voice

    @contextmanager
    def task(self, name: str) -> Iterator[Tick]:
        """Something that takes a while."""
        if self._bars is None:
            self.say(f"{name} …")
            yield lambda done, total: None
            return
        bars = self._bars
        task = bars.add_task(name, total=None)
        shown = 0.0

        def tick(done: int, total: int) -> None:
            nonlocal shown
            now = time.monotonic()
            if done == total or now - shown > 0.1:
                shown = now
                bars.update(task, completed=done, total=total)

        try:
            yield tick
        finally:
            bars.remove_task(task)
