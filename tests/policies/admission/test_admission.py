"""Who may join the queue."""

from __future__ import annotations

import pytest

from policies.admission.bounded import BoundedAdmission, BoundedConfig, predicted_wait_s
from policies.admission.open import OpenAdmission
from policies.manager import make_manager
from policies.registry import Registry
from policies.spi import PolicyConfigError, PolicyContext
from policies.testing import make_job
from policies.types import QueueSnapshot

REGISTRY = Registry.from_manager(make_manager())


def queue(
    queued: int = 0,
    own: int = 0,
    tokens: int = 0,
    own_tokens: int = 0,
    share: float = 1.0,
    rate: float | None = None,
    used: float | None = None,
) -> QueueSnapshot:
    return QueueSnapshot(queued, own, tokens, own_tokens, share, rate, 1, used)


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


def test_the_prediction_counts_what_jobs_use_and_not_what_they_might() -> None:
    """Callers that leave max_tokens at 256 and get answers of 20 tokens must not be refused for the other 236."""
    full, tenth = queue(8, 4, 8000, 1000, 0.25, 100.0), queue(8, 4, 8000, 1000, 0.25, 100.0, 0.1)
    assert predicted_wait_s(full) == 40.0
    assert predicted_wait_s(tenth) == pytest.approx(4.0)
    refused = bounded(max_queued=8).check(make_job("x"), queue(8, 4, 80_000, 1000, 1.0, 100.0, 0.5), 0.0)
    assert refused.retry_after_s == 50.0, "half of 10,000 tokens at 100 a second"


def test_output_is_clamped_from_half_of_the_longest_wait_on() -> None:
    policy = bounded(max_wait_s=60.0, overload={"clamp_max_tokens": 32})
    seen = [policy.check(make_job("x"), queue(3, 3, tokens, tokens, 1.0, 100.0), 0.0) for tokens in (3000, 3100, 6100)]
    assert [(decision.admitted, decision.clamp_max_tokens) for decision in seen] == [
        (True, None),
        (True, 32),
        (False, None),
    ]
    early = bounded(max_wait_s=60.0, overload={"clamp_max_tokens": 32, "after_s": 1})
    assert early.check(make_job("x"), queue(3, 3, 200, 200, 1.0, 100.0), 0.0).clamp_max_tokens == 32
    assert early.check(make_job("x"), queue(3, 3, 200, 200, 1.0, None), 0.0).clamp_max_tokens is None, "a guess"
    never = bounded(max_wait_s=None, overload={"clamp_max_tokens": 32})
    assert never.check(make_job("x"), queue(3, 3, 10**9, 10**9, 1.0, 1.0), 0.0).clamp_max_tokens is None


@pytest.mark.parametrize("snapshot", [queue(512), queue(0, 256), queue(3, 3, 10**6, 10**6, 1.0, 1.0)])
def test_every_refusal_names_the_fallback(snapshot: QueueSnapshot) -> None:
    """It stays a refusal for whoever knows nothing of fallbacks."""
    decision = bounded(overload={"fallback_model": "small"}).check(make_job("x"), snapshot, 0.0)
    assert (decision.admitted, decision.fallback_model) == (False, "small")
    assert decision.reason
    assert decision.retry_after_s
    assert bounded().check(make_job("x"), snapshot, 0.0).fallback_model is None
    assert bounded(overload={"fallback_model": "small"}).check(make_job("x"), queue(), 0.0).fallback_model is None


def test_a_fallback_that_is_no_model_stops_the_start_with_its_path() -> None:
    settings = {"overload": {"fallback_model": "smal"}}
    with pytest.raises(PolicyConfigError, match="no model is named 'smal'") as caught:
        REGISTRY.build("admission", "bounded", settings, PolicyContext(models=frozenset({"small", "large"})))
    assert caught.value.path == "with.overload.fallback_model"
    assert REGISTRY.build("admission", "bounded", settings, PolicyContext()) is not None, "where models are not known"
    with pytest.raises(PolicyConfigError, match="clamp_max_tokns"):
        REGISTRY.build("admission", "bounded", {"overload": {"clamp_max_tokns": 3}}, PolicyContext())
