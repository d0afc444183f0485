"""What is noted on a request's way is counted when somebody looks, and never later than it may be."""

from __future__ import annotations

import pytest

from gateway.later import Later
from gateway.log import RequestSummary
from gateway.metrics import Metrics
from policies.types import Charge
from tests.gateway import tracing


def test_charges_are_added_up_and_notes_kept_in_order_until_they_are_booked() -> None:
    booked: list[object] = []
    later = Later(lambda tenant, service_class, charged: booked.append((tenant, service_class, dict(charged))))
    later.note((booked.append, "one"))
    later.note((booked.append, "two"))
    later.served("a", "x", Charge(3, 2, 1))
    later.served("a", "x", Charge(output=4))
    later.served("b", "x", Charge(prompt=1))
    assert booked == []
    later.book()
    assert booked[:2] == ["one", "two"]
    assert sorted(map(str, booked[2:])) == [
        "('a', 'x', {'prompt': 3, 'cached': 2, 'output': 5})",
        "('b', 'x', {'prompt': 1, 'cached': 0, 'output': 0})",
    ]
    later.book()
    assert len(booked) == 4


def test_a_request_that_ends_leaves_nothing_to_be_booked(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics(tracing.settings())
    metrics.policy_timer("auth/jwt")(0.25)
    metrics.charged("search", "interactive", Charge(prompt=7))
    booked: list[object] = []
    monkeypatch.setattr(metrics, "_book_route", booked.append)
    metrics.routed("w", "load")
    metrics.request_finished(RequestSummary("r", tracing.ROUTE, "ok", 1.0))
    assert booked == [("w", "load")]
    assert not metrics._later._notes
    assert not metrics._later._charges


def test_who_reads_finds_everything_counted() -> None:
    metrics = Metrics(tracing.settings())
    metrics.policy_timer("auth/jwt")(0.25)
    metrics.quota_decided("search", "interactive", "admit")
    metrics.routed("w", "load")
    metrics.charged("search", "interactive", Charge(prompt=7))
    read = metrics.registry.get_sample_value
    assert read("forebay_policy_seconds_sum", {"policy": "auth/jwt"}) == 0.25
    assert read("forebay_quota_decisions_total", {"tenant": "search", "class": "interactive", "decision": "admit"}) == 1
    assert read("forebay_route_decisions_total", {"worker": "w", "reason": "load"}) == 1
    assert read("forebay_service_tokens_total", {"tenant": "search", "class": "interactive", "kind": "prompt"}) == 7
    metrics.charged("search", "interactive", Charge(output=2))
    assert metrics.service.totals() == {"search": 9}
