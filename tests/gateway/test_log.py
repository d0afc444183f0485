"""The log: one line per request, JSON, and no content, credential or forged line in it, whoever writes."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from gateway import log
from gateway.log import RequestSummary, log_request
from policies.types import Usage
from tests.gateway.logs import undisturbed

CANARY = "CANARY-prompt-7f3a"
TOKEN = ".".join(["eyJhbGciOiJIUzI1NiJ9", "eyJ0ZW5hbnQiOiJzZWFyY2gifQ", "c2lnbmF0dXJl"])


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Where the log goes; the process's own logging comes back afterwards."""
    with undisturbed():
        yield io.StringIO()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    """What was logged."""
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def summary(**fields: Any) -> RequestSummary:
    """A request that went well."""
    defaults: dict[str, Any] = {
        "request_id": "req-1", "route": "/v1/chat/completions", "outcome": "ok", "duration_s": 1.25, "status": 200,
        "trace_id": "a" * 32, "tenant": "search", "service_class": "interactive", "model": "tiny", "worker": "local-0",
        "usage": Usage(prompt=3, cached=2, output=5), "queue_wait_s": 0.2, "first_token_s": 0.3, "stream": True,
    }  # fmt: skip
    return RequestSummary(**{**defaults, **fields})


def test_one_line_per_request(stream: io.StringIO) -> None:
    log.configure("forebay-gateway", format="json", stream=stream)
    log_request(log.get("request"), summary())
    (line,) = lines(stream)
    assert line.pop("timestamp")
    assert line == {
        "event": "request", "level": "info", "service": "forebay-gateway", "request_id": "req-1", "trace_id": "a" * 32,
        "route": "/v1/chat/completions", "status": 200, "outcome": "ok", "tenant": "search", "class": "interactive",
        "model": "tiny", "worker": "local-0", "stream": True, "prompt_tokens": 5, "cached_tokens": 2,
        "output_tokens": 5, "queue_ms": 200.0, "first_token_ms": 300.0, "duration_ms": 1250.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("outcome", "status", "level"),
    [
        ("ok", 200, "info"),
        ("throttled", 429, "info"),
        ("shed", 429, "info"),
        ("cancelled", None, "info"),
        ("error", 400, "info"),
        ("error", 500, "warning"),
        ("error", 200, "warning"),
        ("timeout", 504, "warning"),
    ],
)
def test_level_of_the_line(outcome: Any, status: int | None, level: str, stream: io.StringIO) -> None:
    log.configure("forebay-gateway", format="json", stream=stream)
    log_request(log.get("request"), summary(outcome=outcome, status=status, reason="code"))
    (line,) = lines(stream)
    assert line["level"] == level
    assert line["reason"] == "code"


class Body(BaseModel):
    """A model whose validation error quotes its input."""

    max_tokens: int


def test_sampled_lines_say_so_and_failures_always_have_one(stream: io.StringIO) -> None:
    log.configure("gateway", format="json", stream=stream)
    logger = log.get("request")
    for number in range(2_000):
        log_request(logger, summary(request_id=f"r{number}"), 0.1)
    written = lines(stream)
    assert 100 < len(written) < 320
    assert {line["sampled"] for line in written} == {0.1}
    stream.truncate(0)
    stream.seek(0)
    for outcome, status in (("timeout", 504), ("error", 500), ("shed", 429)):
        log_request(logger, summary(outcome=outcome, status=status), 0.0)
    log_request(logger, summary(), 0.0)
    log_request(logger, summary(), 1.0)
    written = lines(stream)
    assert [line["outcome"] for line in written] == ["timeout", "error", "shed", "ok"]
    assert not [line for line in written if "sampled" in line]


def test_exceptions_do_not_quote_what_they_were_about(stream: io.StringIO) -> None:
    log.configure("forebay-gateway", format="json", stream=stream)
    try:
        try:
            Body.model_validate({"max_tokens": CANARY})
        except ValueError as error:
            raise RuntimeError(f"failed on {CANARY}") from error
    except RuntimeError as error:
        log.get("x").exception("broke")
        logging.getLogger("gateway.http").exception("broke too")
        logging.getLogger("uvicorn.error").error("Exception in ASGI application\n", exc_info=error)
        log.get("x").warning("broke", error=error)
    text = stream.getvalue()
    assert CANARY not in text
    first = lines(stream)[0]["fault"]
    assert first[0] == "RuntimeError"
    assert any("test_log.py" in frame for frame in first)
    assert "ValidationError" in first
    assert len(lines(stream)) == 4


def test_library_lines_are_cut_to_their_first(stream: io.StringIO) -> None:
    """asyncio logs the repr of a failed task, exception and all, on the lines below."""
    log.configure("forebay-gateway", format="json", stream=stream)
    message = f"Task exception was never retrieved\nfuture: <Task finished exception=ValueError('{CANARY}')>"
    logging.getLogger("asyncio").error(message, extra={"prompt": CANARY})
    logging.getLogger("gateway.dispatch").warning("worker lost", extra={"worker": "local-0"})
    first, second = lines(stream)
    assert first["event"] == "Task exception was never retrieved"
    assert CANARY not in stream.getvalue()
    assert second["worker"] == "local-0"
    assert second["logger"] == "gateway.dispatch"


@pytest.mark.parametrize("style", ["json", "console"])
def test_credentials_are_redacted_and_lines_cannot_be_forged(style: Any, stream: io.StringIO) -> None:
    log.configure("forebay-gateway", format=style, stream=stream)
    log.get("x").info("seen", header=f"Bearer {TOKEN}", token=TOKEN, url="http://user:secret@host/x")
    log.get("x").info("name", model='x\n{"event": "request", "tenant": "forged"}\x1b[31m\u2028')
    logging.getLogger("gateway.auth").warning("bad token %s", TOKEN)
    text = stream.getvalue()
    assert TOKEN not in text
    assert "secret" not in text
    assert "eyJ" not in text
    assert "\x1b" not in text
    assert "\u2028" not in text
    assert len(text.splitlines()) == 3


def test_libraries_are_quiet_and_ours_are_not(stream: io.StringIO) -> None:
    log.configure("forebay-gateway", format="json", stream=stream)
    logging.getLogger("uvicorn.access").critical("GET /?prompt=%s", CANARY)
    logging.getLogger("uvicorn.error").info("Started server process")
    logging.getLogger("httpx").info("HTTP Request")
    logging.getLogger("gateway.pool").info("worker ready")
    log.get("x").debug("detail")
    assert [line["event"] for line in lines(stream)] == ["worker ready"]


def test_configuring_again_replaces(stream: io.StringIO) -> None:
    log.configure("a", format="json", stream=io.StringIO())
    log.configure("b", format="json", level="debug", stream=stream)
    log.get("x").debug("detail")
    assert [(line["event"], line["service"]) for line in lines(stream)] == [("detail", "b")]
    with pytest.raises(ValueError, match="log level 'loud' is unknown; use debug"):
        log.configure("b", level="loud", stream=stream)


def test_a_loop_of_causes_ends(stream: io.StringIO) -> None:
    first, second = ValueError(CANARY), OSError(2, CANARY)
    first.__cause__, second.__cause__ = second, first
    assert log.describe(first) == ["ValueError", "FileNotFoundError errno 2"]
