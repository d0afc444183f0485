"""What a caller may be told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway import errors
from gateway.errors import ApiError

ROOT = Path(__file__).parents[2]

MADE = [
    (errors.bad_request("x", "n"), 400, "error"),
    (errors.bad_request("x", status=422), 422, "error"),
    (errors.unauthenticated(), 401, "error"),
    (errors.forbidden("x"), 403, "error"),
    (errors.model_not_found("m"), 404, "error"),
    (errors.too_large(5), 413, "error"),
    (errors.throttled("x", "concurrent", 1.0), 429, "throttled"),
    (errors.shed("x", "queue_full", 1.0), 429, "shed"),
    (errors.unavailable("x", "no_worker"), 503, "error"),
    (errors.timed_out("x", "first_token"), 504, "timeout"),
    (errors.internal(), 500, "error"),
]


@pytest.mark.parametrize(("error", "status", "outcome"), MADE, ids=lambda value: str(value)[:20])
def test_every_error_has_the_apis_body(error: ApiError, status: int, outcome: str) -> None:
    assert (error.status, error.outcome) == (status, outcome)
    body = error.body()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert body["error"]["code"]


@pytest.mark.parametrize(("seconds", "header"), [(0.001, "1"), (0.0, "1"), (None, "1"), (1.01, "2"), (59.5, "60")])
def test_retry_after_is_long_enough(seconds: float | None, header: str) -> None:
    """DESIGN §6: a Retry-After that works is rounded up, never down to 0."""
    assert errors.throttled("x", "tokens_per_minute", seconds).headers() == {"retry-after": header}
    assert errors.shed("x", "queue_full", seconds).headers() == {"retry-after": header}


def test_busy_and_broken_differ_in_status_and_reason() -> None:
    """gateway B9: a full queue is 429, no worker is 503, each with its machine-readable reason."""
    busy, broken = errors.shed("x", "queue_full", 3), errors.unavailable("x", "no_worker", 3)
    assert (busy.status, busy.reason) == (429, "queue_full")
    assert (broken.status, broken.reason) == (503, "no_worker")
    assert busy.headers() == broken.headers() == {"retry-after": "3"}


def test_refusals_of_a_credential_are_all_alike() -> None:
    """gateway D3: no detail on which check failed."""
    assert errors.unauthenticated().body() == errors.unauthenticated().body()
    assert errors.unauthenticated().headers() == {"www-authenticate": "Bearer"}  # a 401 must name the scheme


def test_an_unknown_model_is_named_but_not_at_length() -> None:
    assert "'nosuch'" in errors.model_not_found("nosuch").message
    assert len(errors.model_not_found("x" * 10_000).message) < 300


def test_what_never_passes_has_no_retry_after() -> None:
    for error in (errors.bad_request("x"), errors.forbidden("x"), errors.model_not_found("m"), errors.too_large(1)):
        assert error.headers() == {}


def test_every_status_that_the_gateway_answers_with_is_in_the_docs() -> None:
    """Callers look up what a number means; one that is missing there was not thought of."""
    sources = [path.read_text() for path in (ROOT / "gateway").rglob("*.py") if "bench" not in path.parts]
    found = {status for text in sources for status in re.findall(r"(?:ApiError\(\s*|\bstatus=)([45]\d\d)\b", text)}
    assert {"401", "429", "502", "503"} <= found
    table = "\n".join(re.findall(r"^\| ([\d, ]+) \|", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE))
    assert sorted(found - set(re.findall(r"\d{3}", table))) == []
