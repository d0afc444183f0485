"""Our side of a driver process: start it, hand it loads, read what became of them, end it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from gateway.bench.load import Load, Timeline
from gateway.bench.peers.known import OURS, Installed
from gateway.bench.peers.wire import Settings
from gateway.bench.pump import Progress
from gateway.bench.report import BenchError

OPEN_S = 900.0
RUN_S = 3600.0
CLOSE_S = 30.0
_BOOT = Path(__file__).with_name("boot.py")
_FIELDS = {item.name for item in fields(Timeline)}


class Driver:
    """A running driver with its engine loaded. Made by ``driving``."""

    def __init__(self, installed: Installed, process: subprocess.Popen[str], log: Path) -> None:
        self._name, self._process, self._log = installed.peer.name, process, log
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, name=f"{self._name}-reader", daemon=True).start()
        self.versions: dict[str, str] = {}
        self.load_s = 0.0
        self.peak_rss_bytes = 0

    def open(self, model: Path, settings: Settings) -> None:
        """Load the model. Raises BenchError with what the driver said last."""
        answer = self._ask({"op": "open", "model": str(model), "settings": settings.to_json()}, "ready", OPEN_S)
        self.versions, self.load_s = answer["versions"], answer["load_s"]

    def run(self, load: Load, progress: Progress = lambda done, total: None) -> list[Timeline]:
        """Timelines of a load. Raises BenchError."""
        answer = self._ask({"op": "run", "load": load.to_json()}, "result", RUN_S, progress)
        self.peak_rss_bytes = answer["peak_rss_bytes"]
        return [Timeline(**{key: value for key, value in line.items() if key in _FIELDS}) for line in answer["lines"]]

    def close(self) -> None:
        """End the process: by the end of its input, else by force."""
        process = self._process
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        try:
            process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def _ask(
        self, message: dict[str, Any], wanted: str, seconds: float, progress: Progress = lambda done, total: None
    ) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._failure("ended") from None
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise self._failure(f"did not answer within {seconds:g} s") from None
            if line is None:
                raise self._failure("ended")
            answer: dict[str, Any] = json.loads(line)
            if answer["event"] == wanted:
                return answer
            if answer["event"] == "progress":
                progress(answer["done"], answer["total"])
            else:
                raise self._failure(f"failed: {answer.get('message', answer['event'])}")

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # closed while reading
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put(None)

    def _failure(self, what: str) -> BenchError:
        lines = self._log.read_text(errors="replace").splitlines()[-12:]
        said = "\n".join(f"    {line[:200]}" for line in lines)
        return BenchError(f"{self._name} {what}" + (f"; its last words:\n{said}" if said else ""))


@contextlib.contextmanager
def driving(installed: Installed, model: Path, settings: Settings) -> Iterator[Driver]:
    """A driver whose engine is loaded; ended, with all that it holds, whatever happens. Raises BenchError."""
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as scratch:
        log = Path(scratch) / "log.txt"
        with log.open("wb") as errors:
            try:
                process = subprocess.Popen(  # noqa: S603 - an interpreter that the user named
                    [str(installed.python), "-P", str(_BOOT), installed.peer.driver],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    encoding="utf-8",
                    env=_environment(installed, settings),
                    cwd=scratch,
                )
            except OSError as error:
                raise BenchError(f"{installed.peer.name}: {installed.python}: {error.strerror}") from None
        driver = Driver(installed, process, log)
        try:
            driver.open(model, settings)
            yield driver
        finally:
            driver.close()


def _environment(installed: Installed, settings: Settings) -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(settings.threads), **installed.environment}
    if installed.peer.name == OURS:
        # Ours needs our own packages, found where this process found them.
        root = str(Path(__file__).resolve().parents[3])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
        environment.pop("OMP_NUM_THREADS")
    libraries = [*filter(None, (environment.get("LD_PRELOAD"),)), *installed.preloaded]
    if libraries:
        environment["LD_PRELOAD"] = ":".join(libraries)
    return environment
