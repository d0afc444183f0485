"""The worker process: ``forebay worker …`` by hand, ``python -m workers.main --spec-stdin`` by a gateway.

Order: tie to the parent, open the port, load the model in a thread, start the engine, greet; then serve until SIGTERM
(drain, exit 0), a drain by the gateway (exit 0) or the loss of the engine (exit 1; the gateway starts another).

Threads: the event loop (stream, signals), the engine (steps), the loader while it loads. The interpreter lock changes
hands every ``SWITCH_S`` at the latest: with the default 5 ms another busy thread would cost the engine whole steps.
Compute threads that wait for each other sleep instead of spinning: the gateway and other workers need the cores too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING

from workers import heap, host, lifeline, log
from workers.config import MEAN_REQUEST_TOKENS
from workers.engine.loop import is_out_of_memory
from workers.grammar import Vocabulary
from workers.grammar_desk import GrammarDesk
from workers.model_store import ModelFiles, resolve
from workers.options import OptionsError, WorkerOptions, parse
from workers.station import ServedModel, Station

if TYPE_CHECKING:
    from workers.model.loading import LoadedModel

SWITCH_S = 0.0005
EXIT_S = 5.0
"""After the end of ``run`` the process is gone within so many seconds, whatever a thread does."""
_VERSIONED = ("forebay", "torch", "tokenizers", "grpcio")

logger = log.get("worker")


class LoadError(Exception):
    """The model cannot be loaded; the text is for the operator."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse options and run. Returns the exit code: 0 drained, 1 failed, 2 wrong options."""
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
    except OptionsError as error:
        sys.stderr.write(f"forebay worker: {error}\n")
        return 2
    return run(options)


def run(options: WorkerOptions) -> int:
    """Run one worker in this process, on this (the main) thread, until it is told to end. Returns the exit code."""
    lifeline.die_with(options.parent_pid, stdin=options.stdin_lifeline)
    level = os.environ.get(log.LEVEL_ENV) or "info"
    try:
        log.configure("forebay-worker", format="json" if options.stdin_lifeline else "auto", level=level)
    except ValueError as error:
        sys.stderr.write(f"forebay worker: {log.LEVEL_ENV}: {error}\n")
        return 2
    _log_uncaught()
    sys.setswitchinterval(SWITCH_S)
    try:
        chosen = host.settle(options.engine)
    except ValueError as error:
        logger.error("worker_start_failed", source=options.source, detail=options.placed(error))
        return 1
    return asyncio.run(_run(options, chosen))


async def _run(options: WorkerOptions, chosen: Mapping[str, object]) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _stopper(stop))
    try:
        station = Station(
            options.address,
            secret=options.secret,
            tls=options.tls_files,
            name=options.name,
            model=options.model,
            config=options.engine,
            metrics_host=options.metrics_host,
            metrics_port=options.metrics_port,
        )
        await station.open()
    except (OSError, ValueError) as error:
        logger.error("worker_not_listening", detail=str(error))
        return 1
    logger.info("worker_listening", address=station.server.address, worker=options.name, pid=os.getpid())
    logger.info("worker_host", **chosen)
    code = await _work(station, options, stop)
    _insist(code)
    await station.close()
    return code


async def _work(station: Station, options: WorkerOptions, stop: asyncio.Event) -> int:
    """Load, greet, serve. Returns the exit code."""
    try:
        served = await _until(stop, asyncio.create_task(_load(options)))
        if served is None:
            return 0
        hello = station.serve(served)
        logger.info("worker_ready", worker=options.name, model=options.model, metrics_port=hello.metrics_port)
        return await _serve(station, stop, options.drain_s)
    except (LoadError, OSError, ValueError) as error:
        logger.error("worker_start_failed", source=options.source, detail=options.placed(error))
        await station.server.refuse(options.placed(error))
        return 1


async def _serve(station: Station, stop: asyncio.Event, drain_s: float) -> int:
    waits = [asyncio.create_task(event.wait()) for event in (stop, station.drained, station.failed)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if station.failed.is_set():
        logger.error("engine_lost")
        return 1
    if not station.drained.is_set():
        logger.info("worker_draining", requests=len(station.server.live), timeout_s=drain_s)
        if not await station.drain(drain_s):
            logger.warning("drain_timed_out", requests=len(station.server.live), timeout_s=drain_s)
    logger.info("worker_stopped")
    return 0


async def _until(stop: asyncio.Event, task: asyncio.Task[ServedModel]) -> ServedModel | None:
    """The task's result; None when ``stop`` came first (a thread that loads cannot be interrupted: leave it)."""
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        stopped.cancel()


async def _load(options: WorkerOptions) -> ServedModel:
    """Load the model on a daemon thread, which does not keep the process from ending. Raises LoadError."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[ServedModel] = loop.create_future()

    def settle(result: ServedModel | None, error: Exception | None) -> None:
        if future.cancelled():
            return
        if result is not None:
            future.set_result(result)
        else:
            future.set_exception(error or LoadError("the loader ended without a model"))

    def work() -> None:
        result, error = None, None
        try:
            result = load_model(options)
        except Exception as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name="loader", daemon=True).start()
    try:
        return await future
    except (LoadError, OSError, ValueError):
        raise
    except Exception as error:
        logger.error("model_load_failed", exc_info=error)
        if is_out_of_memory(error):
            raise LoadError(
                f"engine.kv_cache={options.engine.kv_cache}: the model does not fit in memory beside it; lower it, "
                "write engine.weight_dtype: int8 or int4, or take a smaller model"
            ) from error
        raise LoadError(f"loading failed with {type(error).__name__}; the log line before has the place") from error


def load_model(options: WorkerOptions) -> ServedModel:
    """Load with torch and log what it takes. Raises ValueError, OSError, and whatever torch finds."""
    began = time.monotonic()
    files = resolve(options.source, base_dir=options.base_dir, progress=_progress())
    _read_ahead(files)
    from workers.model.loading import load  # torch: seconds, and in vain if there were no model
    from workers.model.memory import held, touching
    from workers.model.mover import layout_of, mover_of
    from workers.model.registry import BUILTIN
    from workers.model.runner import compiled_since

    known = {**BUILTIN, **options.architectures}
    loaded = load(files, options.engine, base_dir=options.base_dir, architectures=known)
    frozen = heap.settle()
    logger.info("model_loaded", seconds=round(time.monotonic() - began, 2), frozen_objects=frozen, **figures(loaded))
    mover = mover_of(loaded.runner) if options.engine.role != "both" else None
    budget = loaded.budget
    (logger.warning if budget.short else logger.info)("memory_budget", short=budget.short, **budget.figures())
    return ServedModel(
        runner=loaded.runner,
        blocks=loaded.blocks,
        max_context=loaded.max_context,
        revision=loaded.revision,
        tokenizer_sha256=loaded.tokenizer_sha256,
        eos_ids=loaded.eos_ids,
        vocab_size=loaded.vocab_size,
        weight_bytes=loaded.weight_bytes,
        kv_bytes_per_token=loaded.kv_bytes_per_token,
        windows=loaded.windows,
        twice_at=loaded.twice_at,
        spare=touching(loaded.runner),
        device=loaded.device,
        dtype=loaded.dtype,
        store=loaded.store,
        grammars=GrammarDesk(lambda: Vocabulary.load(files.dir, eos=loaded.eos_ids, size=loaded.vocab_size)),
        mover=mover,
        layout="" if mover is None else layout_of(mover, loaded.numbers, loaded.dtype, options.engine),
        versions=versions(loaded.attention, loaded.kv_dtype, loaded.weight_dtype),
        ranks=loaded.ranks,
        memory=lambda: held(
            loaded.device,
            loaded.weight_bytes,
            loaded.cache_tokens * loaded.kv_bytes_per_token,
            options.engine.ranks,
        ),
        adapters=loaded.adapters,
        read_adapter=loaded.read_adapter,
        compiled=compiled_since(loaded.runner),
    )


def _read_ahead(files: ModelFiles) -> None:
    """Have the disk read the weights while torch is being imported, where the system can be told to."""
    if hasattr(os, "posix_fadvise"):
        for path in files.dir.glob("*.safetensors"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def figures(loaded: LoadedModel) -> dict[str, object]:
    """What an operator wants to know at start: bytes, blocks, and what the cache holds."""
    return {
        "architecture": loaded.config.architecture,
        "device": loaded.device,
        "ranks": 1 if loaded.ranks is None else loaded.ranks.alive,
        "dtype": loaded.dtype,
        "attention": loaded.attention,
        **({"attention_passed_over": loaded.fallback} if loaded.fallback else {}),
        "weight_dtype": loaded.weight_dtype,
        "weight_bytes": loaded.weight_bytes,
        "kv_dtype": loaded.kv_dtype,
        "kv_bytes_per_token": loaded.kv_bytes_per_token,
        "kv_bytes": loaded.cache_tokens * loaded.kv_bytes_per_token,
        "blocks": loaded.blocks,
        "block_size": loaded.block_size,
        "cache_tokens": loaded.cache_tokens,
        "mean_request_tokens": MEAN_REQUEST_TOKENS,
        "requests_of_mean_length": loaded.cache_tokens // MEAN_REQUEST_TOKENS,
        "max_context": loaded.max_context,
    }


def versions(attention: str, kv_dtype: str, weight_dtype: str) -> dict[str, str]:
    """Versions for Hello, metrics and traces."""
    kept = {"kv_dtype": kv_dtype, "weight_dtype": weight_dtype}
    found = {"python": platform.python_version(), "attention": attention, **kept}
    for name in _VERSIONED:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _progress() -> Callable[[str, int, int], None]:
    """Logs a stage's start, and then every tenth of it."""
    shown: dict[str, int] = {}

    def report(stage: str, done: int, total: int) -> None:
        tenth = 10 * done // total if total else 0
        if shown.get(stage) != tenth:
            shown[stage] = tenth
            logger.info("model_progress", stage=stage, percent=10 * tenth, bytes=done, total=total)

    return report


def _stopper(stop: asyncio.Event) -> Callable[[], None]:
    """The first signal asks for a drain, the second ends the process at once."""

    def on_signal() -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()

    return on_signal


def _log_uncaught() -> None:
    """What nobody caught is logged like everything else: type and place, no message, which might hold content."""

    def report(error: BaseException | None) -> None:
        if error is not None and not isinstance(error, SystemExit | KeyboardInterrupt):
            logger.error("uncaught", exc_info=error)

    sys.excepthook = lambda kind, error, trace: report(error)
    threading.excepthook = lambda arguments: report(arguments.exc_value)


def _insist(code: int) -> None:
    """See to it that the process ends, even if a thread hangs in a step or in a library."""

    def give_up() -> None:
        time.sleep(EXIT_S)
        os._exit(code)

    threading.Thread(target=give_up, name="exit", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
