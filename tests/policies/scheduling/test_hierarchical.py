"""Two levels: members share their tenant's part; any two policies; stand-ins that change seats."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import testing
from policies.queue import JobQueue
from policies.scheduling import _member_counters, _members
from policies.scheduling._levels import StandIns, TwoLevels, levels
from policies.scheduling._lines import Lines
from policies.scheduling._member_counters import MemberCounters
from policies.scheduling._members import MemberLines
from policies.scheduling.vtc import VtcScheduler
from policies.spi import PolicyConfigError, PolicyContext
from policies.testing import always, make_job
from policies.types import Charge, Job, JobId, RequeueReason, TenantId
from tests.policies.scheduling.driver import REGISTRY, TARIFF, Driver, build

NAMES = ["fcfs", "vtc", "wfq", "drr", "locality", "priority", "edf", "sjf"]


def pair(outer: str, inner: str, **more: Any) -> Any:
    return build("hierarchical", outer={"use": outer}, inner={"use": inner}, **more)


def by_user(job: Job) -> TenantId:
    return TenantId(job.user or "")


def pop(policy: Any) -> Job:
    job = policy.pop(0.0, always)
    assert job is not None
    return job


def backlog(driver: Driver, tenant: str, users: list[str], **fields: Any) -> None:
    def make(n: int, now: float) -> tuple[Job, int]:
        user = users[n % len(users)]
        name = f"{tenant}-{user}-{n}"
        return make_job(name, tenant, prompt=40, output=20, user=user, arrived_at=now, **fields), 20

    driver.backlog(make, depth=16 + 2 * len(users))


@pytest.mark.parametrize("outer", ["vtc", "wfq", "drr"])
def test_splitting_a_tenant_over_many_keys_gains_nothing(outer: str) -> None:
    """engine J7: one tenant with 20 keys against one with one."""
    driver = Driver(pair(outer, "vtc"), slots=4, chunk=64)
    backlog(driver, "many", [f"key{i}" for i in range(20)])
    backlog(driver, "one", ["key"])
    driver.go(3000)
    assert driver.service["many"] / sum(driver.service.values()) == pytest.approx(0.5, abs=0.02)
    shares = [driver.by_user[f"key{i}"] / driver.service["many"] for i in range(20)]
    assert all(share == pytest.approx(0.05, abs=0.01) for share in shares)


def test_members_have_weights_and_a_greedy_one_takes_from_nobody() -> None:
    driver = Driver(build("hierarchical", weights={"boss": 3.0}), slots=4, chunk=64)
    for user, depth in (("boss", 16), ("greedy", 200), ("modest", 16)):

        def make(n: int, now: float, user: str = user) -> tuple[Job, int]:
            return make_job(f"{user}{n}", "t", prompt=40, output=20, user=user, arrived_at=now), 20

        driver.backlog(make, depth)
    driver.go(3000)
    whole = driver.service["t"]
    assert driver.by_user["boss"] / whole == pytest.approx(0.6, abs=0.02)
    assert driver.by_user["greedy"] / whole == pytest.approx(0.2, abs=0.02)


def test_a_member_is_a_user_or_a_key() -> None:
    def first_two(by: str) -> list[str]:
        policy = build("hierarchical", by=by)
        for i, (user, key) in enumerate((("u", "k1"), ("u", "k2"), ("v", "k1"))):
            policy.push(make_job(f"{user}-{key}", "t", prompt=10 + i, user=user, key_id=key), 0.0)
        return [pop(policy).id for _ in range(2)]

    assert first_two("user") == ["u-k1", "v-k1"]
    assert first_two("key") == ["u-k1", "u-k2"]
    policy = build("hierarchical", by="key")
    policy.push(make_job("by user", "t", user="u"), 0.0)
    policy.push(make_job("by nothing", "t"), 0.0)
    assert pop(policy).id == "by user"
    assert sorted(policy.dump()["inner"]["t"]["service"]) == ["", "u"]


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["push", "push", "pop", "requeue", "discard", "charge", "end", "swap"]), st.integers(0, 99)
    ),
    max_size=120,
)

CHEAP = [
    ("vtc", {}),
    ("vtc", {"predict": "max", "output_cost": 0.3}),
    ("drr", {"predict": "none", "quantum": 30.0}),
    ("drr", {"predict": "max"}),
]
"""Inner policies that take the jobs themselves, without stand-ins."""


OUTER = [
    ("vtc", {}),
    ("vtc", {"predict": "max"}),
    ("wfq", {}),
    ("wfq", {"predict": "none"}),
    ("drr", {"predict": "max"}),
]
Use = tuple[str, dict[str, Any]]


def both_ways(outer: Use, inner: Use) -> tuple[TwoLevels, TwoLevels]:
    """The cheap way and the general one."""

    def make() -> Any:
        return build(inner[0], **inner[1])

    weights = {TenantId("u1"): 3.0}
    cheap = levels(build(outer[0], **outer[1]), make, by_user, weights)
    assert isinstance(cheap._lines, MemberCounters)
    over = build(outer[0], **outer[1])
    dear = MemberLines(make, by_user, weights)
    over.over(dear)
    return cheap, TwoLevels(over, dear)


class Decided(NamedTuple):
    """A way through two levels that is to be the same for both kinds of lower level."""

    policies: tuple[TwoLevels, TwoLevels]

    def each(self, ask: Callable[[TwoLevels], Any]) -> Any:
        one, other = (ask(policy) for policy in self.policies)
        assert one == other
        return one

    def popped(self, now: float, most: int) -> Job | None:
        def ask(policy: TwoLevels) -> tuple[Job | None, Any]:
            job = policy.pop(now, lambda job: job.prompt_tokens <= most)
            return job, job and policy.explain(job)

        job: Job | None = self.each(ask)[0]
        return job


@settings(max_examples=80, deadline=None)
@given(st.data(), st.sampled_from(OUTER), st.sampled_from(CHEAP))
def test_members_without_stand_ins_get_the_same_decisions(data: st.DataObject, outer: Use, inner: Use) -> None:
    """Also where both levels charge alike and the outer one repeats what the inner one reckoned."""
    both = Decided(both_ways(outer, inner))
    queued: dict[str, Job] = {}
    running: dict[str, Job] = {}
    for serial, (action, number) in enumerate(data.draw(ACTIONS)):
        now = float(serial)
        if action == "push":
            job = make_job(
                f"j{serial}",
                f"t{number % 3}",
                prompt=1 + number,
                output=number % 7,
                user=f"u{number % 4}",
                weight=1 + number % 2,
            )
            both.each(lambda policy, job=job, now=now: policy.push(job, now))
            queued[job.id] = job
        elif action == "pop":
            picked = both.popped(now, 20 + number)
            if picked is not None:
                running[picked.id] = queued.pop(picked.id)
        elif action == "discard" and queued:
            job = queued.pop(sorted(queued)[number % len(queued)])
            assert both.each(lambda policy, job=job: policy.discard(job.id))
        elif action == "swap":
            state = both.each(dumped)
            fresh = both_ways(outer, inner)
            left = both.each(TwoLevels.drain)
            assert sorted(job.id for job in left) == sorted(queued)
            both = Decided(fresh)
            for policy in fresh:
                policy.load(json.loads(json.dumps(state)))
                for job in left:
                    policy.push(job, now)
        elif running:
            job = running[sorted(running)[number % len(running)]]
            if action == "requeue":
                both.each(lambda policy, job=job, now=now: policy.requeue(job, now, RequeueReason.WORKER_LOST))
                queued[job.id] = running.pop(job.id)
            else:
                charge = Charge(number % 11, number % 3, number % 5)
                final = action == "end"
                both.each(
                    lambda policy, job=job, now=now, charge=charge, final=final: policy.charge(job, charge, now, final)
                )
                if final:
                    del running[job.id]
        assert both.each(len) == len(queued)
    both.each(dumped)
    while queued:
        picked = both.popped(1e6, 10**6)
        assert picked is not None
        del queued[picked.id]
    assert both.popped(1e6, 10**6) is None


def dumped(policy: TwoLevels) -> Any:
    lines: Any = policy._lines
    if isinstance(lines, MemberCounters):
        for tenant in list(lines._inside):
            lines._policy(tenant)  # until then it has what it was given
    else:
        assert all(inside.policy is not None for inside in lines._inside.values())  # likewise
    return policy.dump()


@pytest.mark.parametrize("outer", NAMES)
@pytest.mark.parametrize("inner", NAMES)
def test_any_two_policies_keep_the_contract(outer: str, inner: str) -> None:
    for check in testing.checks("scheduling"):
        if "ten_thousand" not in check:
            getattr(testing.suite("scheduling", lambda: pair(outer, inner))(), check)()


def test_the_inner_choice_runs_and_the_outer_account_is_right() -> None:
    """The stand-in that comes up is another job's: they swap, and every token is charged once on both levels."""
    policy = StandIns(VtcScheduler(TARIFF), MemberLines(lambda: build("sjf"), by_user, {}))
    policy.push(make_job("long", "a", prompt=500, output=1, user="u"), 0.0)
    policy.push(make_job("short", "a", prompt=10, output=1, user="u"), 0.0)
    policy.push(make_job("other", "b", prompt=100, output=1), 0.0)
    first = pop(policy)
    assert first.id == "short"
    why = policy.explain(first).picked_because
    assert why.startswith("tenant: least service/weight (0)")
    assert "member: shortest of 2 queued" in why
    policy.charge(first, Charge(10, 0, 1), 1.0, True)
    assert policy.dump()["service"] == {"a": 12.0, "b": 0.0}
    assert [pop(policy).id, pop(policy).id] == ["other", "long"]
    assert policy.dump()["prepaid"] == {"other": 100, "long": 10}, "what its stand-in paid; reports correct it"
    policy.charge(make_job("long", "a", prompt=500, output=1, user="u"), Charge(500, 0, 1), 2.0, True)
    assert policy.dump()["service"]["a"] == 12.0 + 502.0
    assert len(policy._stand_ins) == len(policy._sitting) == 1


def test_an_id_used_again_while_its_stand_in_serves_another() -> None:
    policy = pair("fcfs", "sjf")
    policy.push(make_job("x", "a", prompt=500, output=0), 0.0)
    policy.push(make_job("y", "a", prompt=10, output=0), 0.0)
    assert pop(policy).id == "y"  # in the place of x
    policy.charge(make_job("y", "a", prompt=10, output=0), Charge(10, 0, 0), 0.0, True)
    policy.push(make_job("y", "a", prompt=20, output=0), 0.0)
    assert len(policy) == 2
    assert [pop(policy).id, pop(policy).id] == ["y", "x"]
    with pytest.raises(ValueError, match="'x' is already queued"):
        policy.push(make_job("x", "a"), 0.0)


class Fickle(VtcScheduler):
    """Asks about everybody and then takes the last, or fails."""

    failing = False

    def pop(self, now: float, fits: Any) -> Job | None:
        fitting = [seat.key for seat in self.waiting if fits(cast(Lines, self._lines).head(seat.key))]
        if self.failing:
            raise RuntimeError("failing")
        last = fitting[-1] if fitting else None
        return super().pop(now, lambda job: job.tenant == last)


def test_an_outer_policy_that_asks_and_takes_another_loses_nothing() -> None:
    outer = Fickle(TARIFF)
    policy = StandIns(outer, MemberLines(lambda: VtcScheduler(TARIFF), by_user, {}))
    for i in range(9):
        policy.push(make_job(f"j{i}", f"t{i % 3}"), 0.0)
    assert pop(policy).id == "j2"
    outer.failing = True
    with pytest.raises(RuntimeError, match="failing"):
        pop(policy)
    outer.failing = False
    got = [pop(policy).id for _ in range(8)]
    assert sorted(got) == sorted(f"j{i}" for i in range(9) if i != 2)
    for tenant in range(3):
        mine = [name for name in got if int(name[1]) % 3 == tenant]
        assert mine == sorted(mine)


def test_the_inner_policy_gives_up_late_jobs() -> None:
    queue = JobQueue(pair("vtc", "edf"))
    for i in range(4):
        queue.offer(make_job(f"j{i}", f"t{i % 2}", deadline=10.0 + i), 0.0)
    assert queue.next_expiry() == 10.0
    assert queue.expire(10.0) == []
    assert [job.id for job in queue.expire(11.5)] == ["j0", "j1"]
    assert queue.next_expiry() == 12.0
    assert queue.next(12.0, always) is not None
    assert [job.id for job in queue.expire(99.0)] == ["j3"]
    assert queue.next_expiry() is None
    assert len(queue) == 0


def test_state_moves_on_to_and_from_one_level() -> None:
    flat = build("vtc")
    for i in range(4):
        flat.push(make_job(f"j{i}", f"t{i % 2}", user=f"u{i}"), 0.0)
    running = pop(flat)
    flat.charge(running, Charge(4, 0, 500), 1.0, False)
    both = build("hierarchical")
    both.load(flat.dump())
    for job in flat.drain():
        both.push(job, 2.0)
    assert pop(both).tenant == "t1"
    both.charge(running, Charge(6, 0, 0), 3.0, True)
    assert both.dump()["service"]["t0"] == 1010.0
    both.requeue(make_job("foreign", "t1", user="u9"), 3.0, RequeueReason.WORKER_LOST)
    again = build("hierarchical")
    again.load(both.dump())
    for job in both.drain():
        again.push(job, 4.0)
    assert again.dump()["inner"].keys() == {"t0", "t1"}
    assert len(again) == 3
    with pytest.raises(ValueError, match="'inner' must map tenants"):
        again.load({"inner": {"t0": 3}})


def test_equal_prices_are_reckoned_once_unless_only_one_level_was_paid() -> None:
    def paid(**config: Any) -> Any:
        policy = build("hierarchical", **config)
        for i in range(3):
            policy.push(make_job(f"j{i}", f"t{i % 2}", prompt=100), 0.0)
        pop(policy)
        return policy

    once = paid()
    assert once._outer.repeats
    assert not paid(inner={"use": "vtc", "with": {"output_cost": 3}})._outer.repeats
    assert not paid(outer={"use": "vtc", "with": {"predict": "max"}})._outer.repeats
    again = build("hierarchical")
    again.load(once.dump())
    assert again._outer.repeats
    flat = build("vtc")
    flat.load(once.dump())
    above = build("hierarchical")
    above.load(flat.dump())
    assert not above._outer.repeats, "within, nothing was paid for what runs"
    with pytest.raises(ValueError, match="'waiting' must be"):
        once.load({"waiting": 3})
    once.charge(make_job("j0", "t0", prompt=100), Charge(60, 40, 1), 1.0, True)
    assert once.dump()["service"]["t0"] == once.dump()["inner"]["t0"]["service"][""] == 62.0


@pytest.mark.parametrize("inner", ["vtc", "wfq"])
def test_what_is_paid_for_tenants_not_heard_of_since_moves_on(inner: str) -> None:
    """Two swaps in a row, while a job of a tenant without queued ones runs: it is not paid twice."""
    policy = pair("vtc", inner)
    policy.push(make_job("runs", "t", prompt=100, output=5, user="u"), 0.0)
    job = pop(policy)
    for _ in range(2):
        after = pair("vtc", inner)
        after.load(policy.dump())
        policy = after
    policy.charge(job, Charge(100, 0, 5), 1.0, True)
    state = policy.dump()
    assert state["inner"]["t"]["service"] == {"u": 110.0}
    assert not state["inner"]["t"]["prepaid"]


@pytest.mark.parametrize("inner", ["vtc", "wfq"])
def test_inner_policies_of_idle_tenants_are_dropped(inner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_members, "IDLE_KEPT", 20)
    monkeypatch.setattr(_member_counters, "IDLE_KEPT", 20)
    policy = pair("vtc", inner)
    policy.push(make_job("stays", "steady"), 0.0)
    for i in range(500):
        policy.push(make_job(f"j{i}", f"t{i}"), 0.0)
        job = policy.pop(0.0, lambda job: job.tenant != "steady")
        assert job is not None
        policy.charge(job, Charge(10, 0, 1), 0.0, True)
    assert len(policy._lines._inside) <= 40
    assert pop(policy).id == "stays"


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"inner": {"use": "vtk"}}, "with.inner.use"),
        ({"outer": {"use": "drr", "with": {"quantum": 0}}}, "with.outer.with.quantum"),
        ({"outer": {"use": "hierarchical"}}, "with.outer.use"),
        ({"weights": {"u": 0.0}}, "with.weights.u"),
        ({"weights": {"u": 1e-320}}, "with.weights.u"),
        ({"by": "tenant"}, "with.by"),
    ],
)
def test_mistakes_are_named_with_their_path(config: dict[str, Any], path: str) -> None:
    with pytest.raises(PolicyConfigError) as caught:
        REGISTRY.build("scheduling", "hierarchical", config, PolicyContext())
    assert [mistake for mistake, _ in caught.value.mistakes] == [path]


@settings(max_examples=60, deadline=None)
@given(ACTIONS, st.sampled_from(NAMES), st.sampled_from(NAMES))
def test_both_levels_hold_the_same_jobs_at_every_moment(actions: list[tuple[str, int]], outer: str, inner: str) -> None:
    policy = pair(outer, inner)
    queued: dict[str, Job] = {}
    running: dict[str, Job] = {}
    for serial, (action, number) in enumerate(actions):
        now = float(serial)
        if action == "push":
            name = f"j{number % 20}"
            if name not in queued and name not in running:
                job = make_job(name, f"t{number % 3}", prompt=1 + number, user=f"u{number % 4}", arrived_at=now)
                policy.push(job, now)
                queued[name] = job
        elif action == "pop":
            picked = policy.pop(now, lambda job, number=number: job.prompt_tokens <= 20 + number)
            if picked is not None:
                assert queued.pop(picked.id) is picked
                running[picked.id] = picked
        elif action == "discard" and queued:
            assert policy.discard(queued.pop(sorted(queued)[number % len(queued)]).id)
        elif action != "swap" and running:
            job = running[sorted(running)[number % len(running)]]
            if action == "requeue":
                policy.requeue(job, now, RequeueReason.WORKER_LOST)
                queued[job.id] = running.pop(job.id)
            else:
                policy.charge(job, Charge(1, 0, number % 5), now, action == "end")
                if action == "end":
                    del running[job.id]
        lines: Any = policy._lines
        assert len(policy) == len(policy._outer) == len(lines) == len(queued)
        assert {job.tenant for job in queued.values()} == set(lines.open)
        if isinstance(lines, MemberCounters):
            assert set(lines._queue.jobs) == set(queued)
            payers = lines.paid.tenants()
            assert set(payers) >= set(running)
            assert set(payers) <= {*queued, *running}
            assert all({**queued, **running}[job_id].tenant == tenant for job_id, tenant in payers.items())
            for tenant, inner in lines._inside.items():
                own = [one for one in queued.values() if one.tenant == tenant]
                assert lines.open.get(tenant) is (inner if own else None)
                if isinstance(inner, list):
                    assert [one.id for one in inner] == [one.id for one in own]
                    continue
                assert {seat.key for seat in inner.waiting} == {one.user for one in own}
                found = {seat.key: lines._queue.live(seat) for seat in inner.waiting}
                assert sorted(entry.job.id for line in found.values() for entry in line) == sorted(
                    one.id for one in own
                )
                assert all(entry.job.user == user for user, line in found.items() for entry in line)
                assert all(seat.line is found[seat.key][0] and seat.last.next is None for seat in inner.waiting)
                assert all(seat.line is None for seat in inner.seats.values() if seat.at is None)
        else:
            assert set(lines._members) == {*queued, *running}
            for tenant, inside in lines._inside.items():
                assert len(inside.policy) == inside.queued == sum(job.tenant == tenant for job in queued.values())
                assert inside.jobs - inside.queued == sum(job.tenant == tenant for job in running.values())
        if isinstance(policy, StandIns):
            assert set(policy._stand_ins) == {*queued, *running}
            assert policy._sitting == {own.id: job_id for job_id, own in policy._stand_ins.items()}
            for job_id, own in policy._stand_ins.items():
                assert own.tenant == {**queued, **running}[job_id].tenant
    assert policy.discard(JobId("nobody")) is False
