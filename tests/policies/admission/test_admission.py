"""Who may join the queue."""

from __future__ import annotations

import pytest

from policies.admission.bounded import BoundedAdmission, BoundedConfig, predicted_wait_s
from policies.admission.open import OpenAdmission
from policies.testing import make_job
from policies.types import QueueSnapshot


def queue(
    queued: int = 0, own: int = 0, tokens: int = 0, own_tokens: int = 0, share: float = 1.0, rate: float | None = None
) -> QueueSnapshot:
    return QueueSnapshot(queued, own, tokens, own_tokens, share, rate, 1)


def bounded(**config: object) -> BoundedAdmission:
    return BoundedAdmission(BoundedConfig(**config))  # type: ignore[arg-type]


def test_open_admits_whatever_there_is() -> None:
    assert OpenAdmission().check(make_job("x"), queue(10**6, 10**6, 10**9, 10**9, 1.0, 0.1), 0.0).admitted


def test_a_full_queue_refuses_with_its_reason() -> None:
    """gateway B15: an over-full queue is a refusal with a reason, never an error."""
    policy = bounded(max_queued=10, max_queued_per_tenant=5, max_wait_s=None)
    assert policy.check(make_job("x"), queue(9, 4), 0.0).admitted
    assert policy.check(make_job("x"), queue(10, 0), 0.0).reason == "queue_full"
    assert policy.check(make_job("x"), queue(9, 5), 0.0).reason == "tenant_queue_full"
    assert bounded(max_queued=None, max_queued_per_tenant=None).check(make_job("x"), queue(10**6, 10**6), 0.0).admitted


def test_one_tenants_full_line_is_its_own_affair() -> None:
    """gateway B1: no refusal for a tenant below its own bound while another fills its line."""
    assert bounded(max_queued=500, max_queued_per_tenant=200).check(make_job("x"), queue(200, 0), 0.0).admitted


def test_retry_after_is_computed_from_the_measured_rate() -> None:
    policy = bounded(max_queued=10)
    assert policy.check(make_job("x"), queue(10, 1, 5000, 500, 0.5, 100.0), 0.0).retry_after_s == 5.0
    assert policy.check(make_job("x"), queue(10, 1, 5000, 500, 0.5, 1e9), 0.0).retry_after_s == 1.0
    assert policy.check(make_job("x"), queue(10, 1, 5000, 500, 0.5, 0.1), 0.0).retry_after_s == 60.0
    assert policy.check(make_job("x"), queue(10, 1, 5000, 500, 0.5, None), 0.0).retry_after_s == 1.0
    own = bounded(max_queued_per_tenant=5).check(make_job("x"), queue(9, 5, 5000, 500, 0.5, 100.0), 0.0)
    assert (own.reason, own.retry_after_s) == ("tenant_queue_full", 2.0)


def test_predicted_wait_follows_the_tenants_share() -> None:
    assert predicted_wait_s(queue(8, 4, 8000, 1000, 0.25, 100.0)) == 40.0
    assert predicted_wait_s(queue(8, 4, 2000, 1000, 0.25, 100.0)) == 20.0, "no longer than the whole queue takes"
    assert predicted_wait_s(queue(8, 0, 8000, 0, 0.25, 100.0)) == 0.0
    assert predicted_wait_s(queue(8, 4, 8000, 1000, 0.25, None)) is None
    assert predicted_wait_s(QueueSnapshot(8, 4, 8000, 1000, 0.25, 100.0, 0)) is None, "no worker, no prediction"


@pytest.mark.parametrize(
    ("fields", "limit"),
    [({}, 60.0), ({"max_wait_s": 20.0}, 20.0), ({"deadline": 1012.0}, 12.0), ({"max_wait_s": 500.0}, 60.0)],
)
def test_the_shortest_bound_on_the_wait_decides(fields: dict[str, float], limit: float) -> None:
    policy = bounded(max_wait_s=60.0)
    job = make_job("x", **fields)  # type: ignore[arg-type]
    just = policy.check(job, queue(3, 3, 10**6, int(limit * 100), 1.0, 100.0), 1000.0)
    assert (just.admitted, just.predicted_wait_s) == (True, limit)
    over = policy.check(job, queue(3, 3, 10**6, int(limit * 100) + 500, 1.0, 100.0), 1000.0)
    assert (over.admitted, over.reason, over.retry_after_s) == (False, "predicted_wait", 5.0)


def test_without_a_measurement_nothing_is_refused_for_its_wait() -> None:
    """gateway B7: the gate does not refuse on a guess."""
    assert bounded(max_wait_s=0.1).check(make_job("x"), queue(100, 100, 10**9, 10**9), 0.0).admitted
