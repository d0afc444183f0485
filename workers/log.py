"""How every process of ours logs: structlog, one JSON object per line (or colours on a terminal), on stderr.

Rules
- Never content, keys or tokens. So the *message* of an exception is not logged, only its type and where it came from:
  a validation or decoding error quotes its input. Our own events carry codes and figures instead.
- Control characters are escaped in both formats (``plain.py``): nobody forges a line or colours a terminal.
- Libraries, and what of ours uses the standard library, go through one handler, libraries from WARNING up; our other
  lines go straight to its stream (``_Lines``). uvicorn's access log is off (one line per request is ours).
"""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
from types import TracebackType
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from workers.plain import escaped

Format = Literal["auto", "json", "console"]
LEVEL_ENV = "FOREBAY_LOG_LEVEL"
"""By which a gateway tells its workers its own level; also for a worker started by hand."""
ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None]

_CREDENTIAL = re.compile(
    r"(?i:bearer)\s+[^\s\"',]+"  # an Authorization value
    r"|eyJ[\w-]{8,}\.[\w-]+\.[\w-]*"  # a JSON web token
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"  # user:password in a URL
)
_SHORTEST_CREDENTIAL = len("://u:p@")
_OURS = ("forebay", "gateway", "policies", "workers")
_QUIET = {"uvicorn.access": logging.CRITICAL + 1, "uvicorn.error": logging.WARNING, "urllib3": logging.ERROR}


def configure(
    service: str,
    *,
    format: Format = "auto",  # noqa: A002 - what the option is called
    level: str = "info",
    stream: TextIO | None = None,
) -> None:
    """Set up logging of this process; calling it again replaces the former set-up.

    ``auto`` is console on a terminal, else json. ``service`` is in every line. Raises ValueError for an unknown level.
    """
    stream = stream or sys.stderr
    threshold = logging.getLevelNamesMapping().get(level.strip().upper())
    if threshold is None:
        raise ValueError(f"log level {level!r} is unknown; use debug, info, warning or error")
    console = format == "console" or (format == "auto" and stream.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _Service(service),
        _exceptions,
        _scrub,
    ]
    renderer: Processor = structlog.dev.ConsoleRenderer(colors=stream.isatty()) if console else _json
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[_first_line, _extras, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old.formatter, structlog.stdlib.ProcessorFormatter)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(max(threshold, logging.WARNING))
    for name in _OURS:
        logging.getLogger(name).setLevel(threshold)
    for name, least in _QUIET.items():
        library = logging.getLogger(name)
        library.setLevel(least)
        library.handlers.clear()
        library.propagate = True
    structlog.configure(
        processors=[*shared, renderer],
        logger_factory=_Lines(handler),
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        cache_logger_on_first_use=False,
    )


def get(name: str) -> structlog.typing.FilteringBoundLogger:
    """A logger of ours; the event is a constant (``worker_lost``), figures are keyword arguments."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(f"forebay.{name}")
    return logger


class _Lines:
    """Where our own lines go: straight to the handler's stream, between its lines. The handler's detour by records and
    formatters is for libraries; it costs three times what a line does. Like a handler's, a failed write is no error.
    """

    def __init__(self, handler: logging.StreamHandler[TextIO]) -> None:
        self._handler = handler

    def __call__(self, *_: object) -> _Lines:
        return self

    def msg(self, line: str) -> None:
        """Write one line."""
        handler = self._handler
        handler.acquire()
        try:
            handler.stream.write(f"{line}\n")
            handler.stream.flush()
        except (OSError, ValueError):
            pass
        finally:
            handler.release()

    debug = info = warning = error = critical = msg


_encode = json.JSONEncoder(default=repr).encode


def _json(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    return _encode(event)


class _Service:
    def __init__(self, service: str) -> None:
        self._service = service

    def __call__(self, _logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event["service"] = self._service
        return event


def _first_line(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Libraries put reprs of tasks and objects on further lines (asyncio does): those may hold content."""
    record = event.get("_record")
    event["logger"] = getattr(record, "name", "")
    event["event"] = str(event["event"]).split("\n", 1)[0]
    return event


_add_extras = structlog.stdlib.ExtraAdder()


def _extras(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """``extra={…}`` of our own modules that log through the standard library; a library's may hold anything."""
    ours = str(event["logger"]).partition(".")[0] in _OURS
    return _add_extras(logger, method, event) if ours else event


def _exceptions(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    info: Any = event.pop("exc_info", None)
    if isinstance(info, BaseException):
        info = (type(info), info, info.__traceback__)
    elif info and not isinstance(info, tuple):
        info = sys.exc_info()
    if info and info[1] is not None:
        event["fault"] = describe(info[1])
    return event


def describe(error: BaseException) -> list[str]:
    """Types and code locations of an exception and its causes, innermost frame last; no message, no values."""
    lines: list[str] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        code = f" errno {current.errno}" if isinstance(current, OSError) and current.errno is not None else ""
        lines.append(f"{type(current).__name__}{code}")
        frames = traceback.extract_tb(current.__traceback__)[-12:]
        lines.extend(f"  {frame.filename}:{frame.lineno} {frame.name}" for frame in frames)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return lines


def _scrub(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = _clean(value)
        elif key != "fault" and isinstance(value, list | tuple | dict | set | bytes | BaseException):
            event[key] = _clean(describe(value)[0] if isinstance(value, BaseException) else str(value))
    return event


def _clean(text: str) -> str:
    if len(text) >= _SHORTEST_CREDENTIAL:
        text = _CREDENTIAL.sub("[redacted]", text)
    return text if text.isascii() and text.isprintable() else escaped(text)
