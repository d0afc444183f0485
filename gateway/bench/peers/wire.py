"""What host and driver say to each other: JSON lines on the driver's standard input and output.

``{"op": "open", "model": …, "settings": {…}}`` → ``{"event": "ready", "versions": {…}, "load_s": …}``
``{"op": "run", "load": {…}}`` → ``{"event": "progress", …}`` … → ``{"event": "result", "lines": […]}``
Anything that goes wrong → ``{"event": "error", "message": …}``, after which the driver ends. End of input ends it too.
"""

from __future__ import annotations

import json
import resource
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TextIO

from gateway.bench import pump
from gateway.bench.load import Load
from gateway.bench.pump import StepEngine

PROGRESS_S = 0.5


@dataclass(frozen=True, slots=True)
class Settings:
    """What every engine is asked for; None leaves it to the engine."""

    max_running: int = 64
    max_step_tokens: int | None = None
    """Token budget of a step: the chunk that long prompts are cut into."""
    max_context: int = 4096
    kv_tokens: int = 46_592
    """Tokens that the cache holds."""
    dtype: str = "bfloat16"
    """Of weights and cache."""
    threads: int = 1
    prefix_cache: bool = True

    def to_json(self) -> dict[str, Any]:
        """For the other side."""
        return asdict(self)


class Driven(StepEngine, Protocol):
    """An engine with the versions of what it is made of."""

    def versions(self) -> dict[str, str]:
        """Name → version."""
        ...


Opener = Callable[[str, Settings], Driven]
"""Loads the model that lies at a path."""


def serve(open_engine: Opener, commands: TextIO, answers: TextIO) -> int:
    """Answer until the input ends. Returns the exit code."""
    say = _Speaker(answers)
    engine: Driven | None = None
    try:
        for line in commands:
            message = json.loads(line)
            if message["op"] == "open":
                begin = time.perf_counter()
                engine = open_engine(message["model"], Settings(**message["settings"]))
                say("ready", versions=engine.versions(), load_s=round(time.perf_counter() - begin, 3))
            elif message["op"] == "run" and engine is not None:
                lines = pump.run(engine, Load.from_json(message["load"]), say.progress)
                say("result", lines=[timeline.to_json() for timeline in lines], peak_rss_bytes=_peak_rss())
            else:
                raise ValueError(f"op {message['op']!r} is unknown, or comes before open")
    except Exception as error:
        traceback.print_exc()
        say("error", message=f"{type(error).__name__}: {error}")
        return 1
    return 0


class _Speaker:
    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._shown = 0.0

    def __call__(self, event: str, **fields: Any) -> None:
        self._out.write(json.dumps({"event": event, **fields}) + "\n")
        self._out.flush()

    def progress(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._shown > PROGRESS_S:
            self._shown = now
            self("progress", done=done, total=total)


def _peak_rss() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
