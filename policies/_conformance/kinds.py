"""What every policy of the other kinds must keep."""

from __future__ import annotations

import json
import random
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, ClassVar

from policies._conformance.base import Conformance, make_job, run
from policies.spi import AuthError, PolicyUnavailableError
from policies.types import (
    AuthRequest,
    CacheScope,
    Charge,
    JobId,
    Limits,
    PrefixKey,
    Principal,
    QueueSnapshot,
    TenantId,
    WorkerView,
)


class QuotaConformance(Conformance):
    """For ``quota``. ``enforces`` names the limits that the policy looks at."""

    kind = "quota"
    enforces: ClassVar[tuple[str, ...]] = ("requests_per_minute", "tokens_per_minute", "concurrent")

    def test_settles_once_and_ignores_unknown_ids(self) -> None:
        async def story(policy: Any) -> None:
            assert (await policy.reserve(make_job("x"), 0.0)).admitted
            assert "refunded" in await policy.settle(JobId("x"), Charge(10, 0, 5), 1.0)
            assert (await policy.settle(JobId("x"), Charge(10, 0, 5), 2.0))["refunded"] == 0
            assert (await policy.settle(JobId("unknown"), Charge(1, 0, 1), 2.0))["refunded"] == 0

        policy = self.make()
        run(story(policy), policy)

    def test_one_that_never_waits_does_not(self) -> None:
        policy = self.make()
        if getattr(policy, "never_waits", False):
            assert not _suspends(policy.reserve(make_job("x"), 0.0))
            assert not _suspends(policy.settle(JobId("x"), Charge(10, 0, 5), 1.0))

    def test_reserving_twice_takes_once(self) -> None:
        async def story(policy: Any) -> None:
            limits = Limits(concurrent=1, requests_per_minute=2, tokens_per_minute=100)
            for _ in range(5):
                assert (await policy.reserve(make_job("x", limits=limits), 0.0)).admitted
            await policy.settle(JobId("x"), Charge(10, 0, 10), 0.0)
            assert (await policy.reserve(make_job("y", limits=limits), 0.0)).admitted

        policy = self.make()
        run(story(policy), policy)

    def test_each_limit_refuses_takes_nothing_and_names_a_wait_that_works(self) -> None:
        async def story(policy: Any, name: str, limits: Limits) -> None:
            for i in range(4):
                assert (await policy.reserve(make_job(f"ok{i}", limits=limits), 0.0)).admitted
            refused = [await policy.reserve(make_job(f"no{i}", limits=limits), 0.0) for i in range(3)]
            assert {(decision.admitted, decision.limit, decision.never) for decision in refused} == {
                (False, name, False)
            }
            assert len({decision.retry_after_s for decision in refused}) == 1, "a refusal has taken something"
            later = refused[0].retry_after_s
            assert later is not None
            assert later > 0
            if name == "concurrent":
                await policy.settle(JobId("ok0"), Charge(10, 0, 10), later)
            assert (await policy.reserve(make_job("again", limits=limits), later)).admitted
            other = make_job("other", "b", limits=limits)
            assert (await policy.reserve(other, later)).admitted, "another tenant pays for this one"

        for name, value in (("requests_per_minute", 4), ("tokens_per_minute", 80), ("concurrent", 4)):
            if name in self.enforces:
                policy = self.make()
                run(story(policy, name, Limits(**{name: value})), policy)

    def test_state_survives_a_swap(self) -> None:
        async def story(old: Any, new: Any) -> None:
            limits = Limits(concurrent=1)
            assert (await old.reserve(make_job("x", limits=limits), 0.0)).admitted
            new.load(json.loads(json.dumps(old.dump(), allow_nan=False)))
            refused = await new.reserve(make_job("y", limits=limits), 0.0)
            assert refused.admitted != ("concurrent" in self.enforces)
            await new.settle(JobId("x"), Charge(1, 0, 1), 0.0)
            assert (await new.reserve(make_job("z", limits=limits), 0.0)).admitted
            new.load({"a key of the future": 1})

        old, new = self.make(), self.make()
        run(story(old, new), old, new)


def _suspends(call: Coroutine[Any, Any, Any]) -> bool:
    try:
        call.send(None)
    except StopIteration:
        return False
    call.close()
    return True


class AuthConformance(Conformance):
    """For ``auth``. ``accepts_anybody`` is for policies without credentials."""

    kind = "auth"
    accepts_anybody: ClassVar[bool] = False

    def good_request(self) -> AuthRequest | None:
        """A request that must pass, where the suite can have one."""
        return None

    def test_accepts_a_good_credential(self) -> None:
        request = self.good_request()
        if request is not None:
            first, second = run(self.make().authenticate(request)), run(self.make().authenticate(request))
            assert isinstance(first, Principal)
            assert first.tenant
            assert first == second

    def test_refuses_everything_else_with_auth_error(self) -> None:
        nasty = (
            "",
            " ",
            "x",
            "' OR 1=1 --",
            "a.b.c",
            "e30.e30.",
            "\x00",
            "ü" * 9,
            "x" * 2**20,
            "{}",
            "=" * 40,
            "." * 99,
        )
        requests = [AuthRequest({})] + [
            AuthRequest({header: prefix + text})
            for text in nasty
            for header, prefix in (("authorization", "Bearer "), ("authorization", "Basic "), ("x-api-key", ""))
        ]
        for request in requests:
            try:
                principal = run(self.make().authenticate(request))
            except (AuthError, PolicyUnavailableError):
                assert not self.accepts_anybody
            else:
                assert self.accepts_anybody, f"accepted {principal} for {str(request)[:80]}"


class CacheScopeConformance(Conformance):
    """For ``cache_scope``."""

    kind = "cache_scope"

    def test_same_caller_same_scope(self) -> None:
        principal = Principal(TenantId("a"), "u", frozenset({"g", "h"}), key_id="k1")
        assert self.make().scope(principal, 3) == self.make().scope(replace(principal, key_id="k2"), 3)

    def test_tenants_and_epochs_never_share(self) -> None:
        policy = self.make()
        names = ["a", "b", "ab", "a\x00", "a:1", "a1", "tenant", "user", "", "é", "e\u0301"]
        users = [None, "", "a", "b"]
        scopes: dict[bytes, tuple[str, int]] = {}
        for name in names:
            for epoch in (0, 1, 11):
                for user in users:
                    for groups in (frozenset[str](), frozenset({"a"}), frozenset({"a", "b"})):
                        scope = policy.scope(Principal(TenantId(name), user, groups), epoch)
                        assert isinstance(scope, CacheScope)
                        assert len(scope.key) >= 16
                        assert scopes.setdefault(scope.key, (name, epoch)) == (name, epoch)
                        assert scope.name


class RoutingConformance(Conformance):
    """For ``routing``."""

    kind = "routing"

    def test_chooses_one_of_those_it_was_given(self) -> None:
        policy = self.make()
        rng = random.Random(1)  # noqa: S311 - a reproducible walk, not a secret
        keys = tuple(PrefixKey(bytes([i]) * 32) for i in range(8))
        for step in range(300):
            workers = [
                WorkerView(
                    f"w{i}",
                    "model",
                    "pool",
                    inflight=rng.randrange(5),
                    total_blocks=rng.choice([0, 100]),
                    hot_prefixes=frozenset(rng.sample(keys, 2)),
                    stale_s=rng.choice([0.0, 60.0]),
                )
                for i in rng.sample(range(5), rng.randrange(1, 5))
            ]
            job = make_job(f"j{step}", prompt=64, prefix_keys=keys[: rng.randrange(9)])
            decision = policy.choose(job, workers, float(step))
            assert decision.worker in {worker.name for worker in workers}
            assert decision.reason in ("prefix", "load", "only")
            assert (decision.reason == "only") == (len(workers) == 1)
            assert 0 <= decision.prefix_hit_tokens < job.prompt_tokens

    def test_equal_workers_share_the_work(self) -> None:
        policy = self.make()
        inflight = dict.fromkeys(("w0", "w1", "w2"), 0)
        for step in range(30):
            workers = [
                WorkerView(name, "model", "pool", inflight=count, max_running=64) for name, count in inflight.items()
            ]
            job = make_job(f"j{step}", prefix_keys=(PrefixKey(step.to_bytes(32, "big")),))
            inflight[policy.choose(job, workers, float(step)).worker] += 1
        assert max(inflight.values()) - min(inflight.values()) <= 2, inflight


class AdmissionConformance(Conformance):
    """For ``admission``."""

    kind = "admission"

    def test_is_pure_and_explains_refusals(self) -> None:
        policy = self.make()
        for queued in (0, 1, 10_000):
            for rate in (None, 0.001, 1e6):
                snapshot = QueueSnapshot(queued, queued, queued * 100, queued * 100, 1.0, rate, 1)
                decision = policy.check(make_job("x", max_wait_s=5.0), snapshot, 0.0)
                assert decision == policy.check(make_job("x", max_wait_s=5.0), snapshot, 0.0)
                if not decision.admitted:
                    assert decision.reason
                    assert decision.retry_after_s is not None
                    assert decision.retry_after_s > 0

    def test_an_empty_queue_admits(self) -> None:
        for workers in (0, 1):
            assert self.make().check(make_job("x"), QueueSnapshot(0, 0, 0, 0, 1.0, 100.0, workers), 0.0).admitted
