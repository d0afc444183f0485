"""Every way a request can end, as a real collector receives it from a gateway and its worker: one sound tree each.

Shape, parents, links, kinds, times and the types of attributes; over gRPC and over http/protobuf.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import Any, Literal

import httpx
import pytest
import pytest_asyncio

from tests.gateway.conftest import Start
from tests.gateway.harness import MODEL, Site, pool, running, tickets, token, until
from tests.otlp import OtlpReceiver, ReceivedSpan, Tree, check_tree
from workers.testing import Echo

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = "POST /v1/completions"
CHAT, INFERENCE = f"chat {MODEL}", f"inference {MODEL}"
CALLER = "ab" * 8
SLACK_NS = 20_000_000
"""Each process reads the wall clock for itself."""
BEFORE = ["auth", "tokenize", "quota reserve", "queue"]
"""What a request passes until it waits."""
SETTINGS: dict[str, Any] = {
    "policies": {"admission": {"use": "bounded", "with": {"max_queued_per_tenant": 1}}},
    "classes": {"hasty": {"priority": 0, "max_wait_s": 0.3}},
    "tenants": [
        {"id": "alpha", "weight": 4},
        {"id": "beta"},
        {"id": "single", "limits": {"concurrent": 1}},
        {"id": "hasty", "class": "hasty"},
    ],
    "models": [pool(max_running=1)],
}


class Traced:
    """A gateway that exports to a receiver, and what the receiver got."""

    def __init__(self, site: Site, collector: OtlpReceiver) -> None:
        self.site = site
        self.collector = collector

    def new(self) -> tuple[str, dict[str, str]]:
        """A trace id, and headers of a caller that traces."""
        trace = secrets.token_hex(16)
        return trace, {"traceparent": f"00-{trace}-{CALLER}-01"}

    async def tree(self, trace: str, *names: str) -> tuple[Tree, list[ReceivedSpan]]:
        """The trace, once it has its root and ``names``, as one sound tree."""
        spans = await asyncio.to_thread(self.collector.wait_for_trace, trace, {ROOT, *names}, 30.0)
        return check_tree(spans, remote_parent=CALLER, clock_slack_ns=SLACK_NS), spans

    @contextlib.asynccontextmanager
    async def busy(self, tenant: str = "beta") -> AsyncIterator[None]:
        """The only slot, and the worker's own line, are taken meanwhile."""
        calls = [asyncio.create_task(self.site.complete(tenant, max_tokens=4000)) for _ in range(1)]
        try:
            await until(lambda: any(t.first_token_at for t in tickets(self.site)), "it runs")
            calls.append(asyncio.create_task(self.site.complete(tenant, max_tokens=4000)))
            await until(lambda: self.site.dispatcher.in_flight == 2, "the line inside is full")
            yield
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            await self.site.at_rest()

    async def post(self, tenant: str, headers: dict[str, str], **body: Any) -> httpx.Response:
        """One request."""
        return await self.site.complete(tenant, headers=headers, **body)

    async def leave(self, tenant: str, headers: dict[str, str], **body: Any) -> asyncio.Task[httpx.Response]:
        """One request whose caller will hang up."""
        return asyncio.create_task(self.post(tenant, headers, **body))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["grpc", "http/protobuf"])
async def traced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Traced]:
    with OtlpReceiver(request.param) as collector, pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        telemetry = {"otlp_endpoint": collector.endpoint, "otlp_protocol": collector.protocol}
        changes = {**SETTINGS, "telemetry": telemetry}
        async with running(tmp_path_factory.mktemp("traced"), changes, echo=Echo(step_s=0.01)) as site:
            yield Traced(site, collector)


def stations(tree: Tree) -> list[str]:
    """The root's children, in order."""
    return [span.name for span in tree.of(tree.root)]


def decided(tree: Tree) -> tuple[Any, Any, bool]:
    """Outcome, status, and whether the root is an error."""
    return (
        tree.root.attributes["forebay.outcome"],
        tree.root.attributes.get("http.response.status_code"),
        tree.root.error,
    )


async def test_ok(traced: Traced) -> None:
    trace, headers = traced.new()
    answer = await traced.post("alpha", headers)
    tree, spans = await traced.tree(trace, CHAT, INFERENCE, "decode", "quota settle")
    assert decided(tree) == ("ok", 200, False)
    assert stations(tree) == [*BEFORE, "route", CHAT, "quota settle"]
    assert [name for name, _, _ in tree.root.events] == ["first_byte", "last_byte"]
    chat, inference = tree.named(CHAT), tree.named(INFERENCE)
    assert [span.name for span in tree.of(chat)] == [INFERENCE]
    assert [span.name for span in tree.of(inference)] == ["wait for slot", "prefill", "decode"]
    assert [span.name for span in tree.of(tree.named("prefill"))] == ["prefill chunk"]
    assert (tree.root.kind, chat.kind, inference.kind, tree.named("queue").kind) == (
        "SERVER", "CLIENT", "SERVER", "INTERNAL",
    )  # fmt: skip
    assert {span.service for span in spans} == {"forebay-gateway", "forebay-worker"}
    usage = answer.json()["usage"]
    assert chat.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert chat.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert tree.named("decode").attributes["forebay.tokens"] == usage["completion_tokens"]
    first_chunk = chat.attributes["gen_ai.response.time_to_first_chunk"]
    assert 0 < first_chunk * 1e9 <= chat.end_ns - chat.start_ns, "from the chat's start, not from the queue's"
    assert not [span.name for span in spans if span.error]


@pytest.mark.parametrize(
    ("route", "asked", "operation"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}, "chat"),
        ("/v1/responses", {"input": "hello", "max_output_tokens": 3}, "chat"),
        ("/v1/completions", {"prompt": "hello", "max_tokens": 3}, "text_completion"),
    ],
)
async def test_the_operation_is_the_endpoint_s(
    traced: Traced, route: str, asked: dict[str, Any], operation: str
) -> None:
    trace, headers = traced.new()
    headers["authorization"] = f"Bearer {token('alpha')}"
    answer = await traced.site.http.post(route, json={"model": MODEL, **asked}, headers=headers)
    assert answer.status_code == 200
    wanted = {f"POST {route}", CHAT, INFERENCE}
    spans = await asyncio.to_thread(traced.collector.wait_for_trace, trace, wanted, 30.0)
    tree = check_tree(spans, remote_parent=CALLER, clock_slack_ns=SLACK_NS)
    assert tree.root.name == f"POST {route}"
    assert tree.named(CHAT).attributes["gen_ai.operation.name"] == operation


@pytest.mark.parametrize("phase", ["queued", "running", "streaming"])
async def test_cancelled(traced: Traced, phase: Literal["queued", "running", "streaming"]) -> None:
    """gateway C1: whenever the caller leaves, one tree that says so and no error: nobody failed."""
    trace, headers = traced.new()
    if phase == "queued":
        async with traced.busy():
            call = await traced.leave("alpha", headers)
            await until(lambda: len(traced.site.dispatcher.queue) == 1, "it waits")
            call.cancel()
            tree, spans = await traced.tree(trace, "quota settle")
        assert stations(tree) == [*BEFORE, "quota settle"]
        assert tree.named("queue").attributes["forebay.queue.wait_ms"] > 0
        assert "forebay.queue.picked_because" not in tree.named("queue").attributes
    else:
        call = await traced.leave("alpha", headers, max_tokens=4000, stream=phase == "streaming")
        await until(lambda: any(ticket.first_token_at for ticket in tickets(traced.site)), "it runs")
        call.cancel()
        tree, spans = await traced.tree(trace, "quota settle", INFERENCE)
        assert stations(tree) == [*BEFORE, "route", CHAT, "quota settle"]
        assert tree.named(INFERENCE).attributes["forebay.finish"] == ["cancelled"]
        ran = tree.named(CHAT).attributes["gen_ai.usage.output_tokens"]
        assert 0 < ran < 4000, "what ran before it left is counted"
        assert tree.named("quota settle").attributes["forebay.usage.output"] == ran
    assert decided(tree)[0] == "cancelled"
    assert decided(tree)[1] == (200 if phase == "streaming" else None)
    assert [name for name, _, _ in tree.root.events][-1] == "client_disconnected"
    assert not [span.name for span in spans if span.error]
    await traced.site.at_rest()


async def test_throttled(traced: Traced) -> None:
    trace, headers = traced.new()
    call = asyncio.create_task(traced.site.complete("single", max_tokens=4000))
    await until(lambda: traced.site.slots("single") == 1, "its one slot is taken")
    assert (await traced.post("single", headers)).status_code == 429
    call.cancel()
    tree, _ = await traced.tree(trace)
    assert decided(tree) == ("throttled", 429, False)
    assert stations(tree) == ["auth", "tokenize", "quota reserve"]
    reserve = tree.named("quota reserve")
    assert reserve.error
    assert (reserve.attributes["forebay.quota.decision"], reserve.attributes["forebay.quota.limit"]) == (
        "throttle", "concurrent",
    )  # fmt: skip
    await traced.site.at_rest()


async def test_shed(traced: Traced) -> None:
    trace, headers = traced.new()
    async with traced.busy():
        waits = asyncio.create_task(traced.site.complete("alpha"))
        await until(lambda: len(traced.site.dispatcher.queue) == 1, "its line is full")
        answer = await traced.post("alpha", headers)
        tree, _ = await traced.tree(trace)
        waits.cancel()
    assert answer.status_code == 429
    assert decided(tree) == ("shed", 429, False)
    assert stations(tree) == ["auth", "tokenize", "admission"]
    reason = answer.json()["error"]["code"]
    assert tree.root.attributes["forebay.shed.reason"] == reason
    assert tree.named("admission").attributes["forebay.admission.decision"] == reason


async def test_its_wait_in_the_queue_ran_out(traced: Traced) -> None:
    trace, headers = traced.new()
    async with traced.busy():
        answer = await traced.post("hasty", headers)
        tree, _ = await traced.tree(trace)
    assert answer.status_code == 429
    assert decided(tree) == ("shed", 429, False)
    assert tree.root.attributes["forebay.shed.reason"] == "queue_timeout"
    assert stations(tree) == [*BEFORE, "quota settle"]
    queue = tree.named("queue")
    assert (queue.error, queue.attributes["error.type"]) == (True, "queue_timeout")
    assert queue.attributes["forebay.queue.wait_ms"] >= 300
    assert tree.named("quota settle").attributes["forebay.usage.refunded"] > 0


async def test_a_policy_is_swapped_while_it_waits(traced: Traced) -> None:
    """It joined under one policy and was picked by another: the span names both, the root its generation at arrival."""
    trace, headers = traced.new()
    generation = traced.site.gateway.parts.runtime.current.generation
    async with traced.busy():
        call = await traced.leave("alpha", headers)
        await until(lambda: len(traced.site.dispatcher.queue) == 1, "it waits")
        swapped = await traced.site.admin.post("/admin/policies", json={"scheduling": {"use": "wfq"}})
        assert swapped.status_code == 200
    assert (await call).status_code == 200
    tree, _ = await traced.tree(trace, INFERENCE)
    queue = tree.named("queue").attributes
    assert (queue["forebay.queue.policy"], queue["forebay.queue.picked_by"]) == ("fcfs", "wfq")
    assert isinstance(queue["forebay.queue.virtual_start"], float), "the new policy has a virtual time"
    assert tree.root.attributes["forebay.policy.generation"] == generation
    assert decided(tree)[0] == "ok"
    back = await traced.site.admin.post("/admin/policies", json={"scheduling": {"use": "fcfs"}})
    assert back.status_code == 200


@pytest.mark.parametrize(
    ("status", "names"),
    [(401, ["auth"]), (403, ["auth"]), (404, ["auth"]), (400, ["auth"])],
    ids=["nobody", "unknown tenant", "unknown model", "bad request"],
)
async def test_refused_at_the_door(traced: Traced, status: int, names: list[str]) -> None:
    """A caller's mistake is no error of the server's: the root says what, and stays unset."""
    trace, headers = traced.new()
    body = {404: {"model": "nope"}, 400: {"max_tokens": -1}}.get(status, {})
    credential = {401: "nonsense", 403: token("stranger")}.get(status, token("alpha"))
    answer = await traced.site.http.post(
        "/v1/completions",
        json={"model": MODEL, "prompt": [5], **body},
        headers={**headers, "authorization": f"Bearer {credential}"},
    )
    assert answer.status_code == status
    tree, spans = await traced.tree(trace)
    assert decided(tree) == ("error", status, False)
    assert stations(tree) == names
    assert tree.root.attributes["error.type"] == answer.json()["error"]["code"]
    assert tree.named("auth").error is (status == 401)
    assert ("forebay.tenant" in tree.root.attributes) is (status not in (401, 403))
    assert "stranger" not in repr(spans)


async def test_what_is_sampled_and_what_is_kept_all_the_same(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing by ratio but beta's; of the rest what failed or took long, whole, with the worker's spans."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")

    def told() -> list[list[ReceivedSpan]]:
        """Of the requests: a slow step of the engine has a trace of its own."""
        return [spans for spans in collector.traces().values() if any(span.name == ROOT for span in spans)]

    with OtlpReceiver() as collector:
        changes = {
            "telemetry": {"otlp_endpoint": collector.endpoint, "sample_ratio": 0.0, "slow_s": 1.5},
            "tenants": [{"id": "alpha"}, {"id": "beta", "sample_ratio": 1.0}],
        }
        async with start(changes, echo=Echo(step_s=0.0125)) as site:
            for tenant, tokens in (("alpha", 4), ("beta", 4), ("alpha", 121)):
                assert (await site.complete(tenant, max_tokens=tokens)).status_code == 200
            assert (await site.complete("alpha", max_tokens=-1)).status_code == 400
            await until(lambda: sum(span.name == "decode" for spans in told() for span in spans) == 2, "both are here")
    trees = [check_tree(spans, clock_slack_ns=SLACK_NS) for spans in told()]
    found = sorted(
        (tree.root.attributes["forebay.tenant"], tree.named("decode").attributes["forebay.tokens"]) for tree in trees
    )
    assert found == [("alpha", 121), ("beta", 4)]


async def test_it_ran_out_of_time(start: Start) -> None:
    with OtlpReceiver() as collector:
        changes = {"telemetry": {"otlp_endpoint": collector.endpoint}, "timeouts": {"total_s": 0.5}}
        async with start(changes, echo=Echo(step_s=0.05)) as site:
            traced = Traced(site, collector)
            trace, headers = traced.new()
            assert (await traced.post("alpha", headers, max_tokens=500)).status_code == 504
            tree, _ = await traced.tree(trace, INFERENCE)
    assert decided(tree) == ("timeout", 504, True)
    assert tree.root.attributes["error.type"] == "total_timeout"
    assert tree.named("quota settle").attributes["forebay.usage.output"] > 0


async def test_preempted(start: Start) -> None:
    """Too few blocks for both: one loses its own, is computed again and ends well; its tree shows each stretch."""
    with OtlpReceiver() as collector:
        changes = {
            "telemetry": {"otlp_endpoint": collector.endpoint},
            "models": [pool(blocks=12, max_running=2, prefix_cache=False)],
        }
        async with start(changes, echo=Echo(step_s=0.01)) as site:
            traced = Traced(site, collector)
            asked = [traced.new() for _ in range(2)]
            prompt = list(range(5, 37))
            answers = await asyncio.gather(
                *(traced.post("alpha", headers, prompt=prompt, max_tokens=90) for _, headers in asked)
            )
            assert [answer.status_code for answer in answers] == [200, 200]
            trees = [(await traced.tree(trace, INFERENCE))[0] for trace, _ in asked]
    preempted = [tree for tree in trees if tree.root.attributes["forebay.preemptions"]]
    assert preempted
    tree = preempted[0]
    assert decided(tree) == ("ok", 200, False)
    names = [span.name for span in tree.of(tree.named(INFERENCE))]
    at = names.index("preempted")
    assert names[:2] == ["wait for slot", "prefill"]
    assert names[at - 1 : at + 3] == ["decode", "preempted", "prefill", "decode"]
    again = tree.of(tree.named(INFERENCE))[at + 1]
    assert again.attributes["forebay.recompute"] is True
    lost = tree.of(tree.named(INFERENCE))[at].attributes
    assert lost["forebay.preempt.reason"] == "kv_pressure"
    assert lost["forebay.preempt.blocks_freed"] > 0
    assert tree.named(INFERENCE).attributes["forebay.recomputed_tokens"] > 0


async def test_retried_on_another_worker(start: Start) -> None:
    """Its worker dies before the caller has a byte: a second chat beside the first, linked to it."""
    with OtlpReceiver() as collector:
        changes = {"telemetry": {"otlp_endpoint": collector.endpoint}, "models": [pool(count=2)]}
        async with start(changes, echo=Echo(die_after=8, step_s=0.005)) as site:
            traced = Traced(site, collector)
            trace, headers = traced.new()
            await until(lambda: site.dispatcher.ready == 2, "both are ready: one of them gets both requests")
            warm = await traced.post("beta", {}, max_tokens=5)  # the other worker will live just long enough
            assert warm.status_code == 200
            call = await traced.leave("alpha", headers, max_tokens=7)
            assert (await call).status_code == 200
            tree, _ = await traced.tree(trace, INFERENCE)
    assert decided(tree) == ("ok", 200, False)
    assert stations(tree) == [*BEFORE, "route", CHAT, "queue", "route", CHAT, "quota settle"]
    first, second = [span for span in tree.of(tree.root) if span.name == CHAT]
    assert (first.error, first.attributes["error.type"]) == (True, "worker_lost")
    assert second.links == [(trace, first.span_id, {"forebay.link": "retry_of"})]
    assert not first.links
    assert [span.name for span in tree.of(second)] == [INFERENCE]
    again = [span for span in tree.of(tree.root) if span.name == "queue"][1].attributes
    assert again["forebay.queue.requeued_because"] == "worker_lost"
    assert (again["forebay.queue.policy"], again["forebay.queue.position"]) == ("fcfs", 0)
    assert tree.root.attributes["forebay.worker"] == tree.named(INFERENCE).attributes["forebay.worker"]


async def test_its_worker_is_lost_in_the_middle_of_a_stream(start: Start) -> None:
    """The caller has a part already: an error event, an error in the trace, and nothing repeated."""
    with OtlpReceiver() as collector:
        changes = {"telemetry": {"otlp_endpoint": collector.endpoint}}
        async with start(changes, echo=Echo(die_after=8, step_s=0.03)) as site:
            traced = Traced(site, collector)
            trace, headers = traced.new()
            answer = await traced.post("alpha", headers, max_tokens=50, stream=True)
            tree, _ = await traced.tree(trace)
    assert answer.status_code == 200
    assert '"error"' in answer.text
    assert "[DONE]" not in answer.text
    assert decided(tree) == ("error", 200, True)
    assert stations(tree) == [*BEFORE, "route", CHAT, "quota settle"]
    assert tree.named(CHAT).error
    assert tree.named(CHAT).attributes["error.type"] == tree.root.attributes["error.type"]
    assert tree.named("quota settle").attributes["forebay.usage.output"] > 0


TYPES: dict[type, set[str]] = {
    int: {
        "http.response.status_code", "server.port", "forebay.preemptions", "forebay.policy.generation",
        "forebay.prompt.tokens", "forebay.tokens", "forebay.cached_tokens", "forebay.recomputed_tokens",
        "forebay.choices", "forebay.chunks", "forebay.chunk.index", "forebay.step.id", "forebay.kv.free_blocks",
        "forebay.quota.cost", "forebay.quota.remaining", "forebay.queue.depth", "forebay.queue.depth_tenant",
        "forebay.queue.position", "forebay.route.candidates", "forebay.route.prefix_hit_tokens",
        "forebay.preempt.blocks_freed", "forebay.usage.prompt", "forebay.usage.cached", "forebay.usage.output",
        "forebay.usage.refunded", "gen_ai.request.max_tokens", "gen_ai.usage.input_tokens",
        "gen_ai.usage.output_tokens", "gen_ai.usage.cache_read.input_tokens",
        "forebay.step.batch_size", "forebay.step.prefill_tokens", "forebay.step.decode_tokens",
    },
    float: {
        "forebay.queue.weight", "forebay.queue.wait_ms", "forebay.queue.virtual_start", "forebay.itl_p50_ms",
        "forebay.itl_p99_ms", "forebay.itl_max_ms", "forebay.gap_ms", "forebay.quota.retry_after_ms",
        "forebay.admission.predicted_wait_ms", "gen_ai.request.temperature", "gen_ai.request.top_p",
        "gen_ai.response.time_to_first_chunk", "forebay.step.kv_used_ratio", "forebay.step.run_ms",
    },
    bool: {"forebay.stream", "forebay.recompute", "forebay.step.slow", "gen_ai.request.stream"},
    list: {"forebay.queue.waited_behind", "forebay.finish", "gen_ai.response.finish_reasons"},
}  # fmt: skip


async def test_every_attribute_keeps_its_type(traced: Traced) -> None:
    """Runs last: over whatever the tests above exported. One type per name, or a search by range finds half."""
    expected = {name: kind for kind, names in TYPES.items() for name in names}
    seen: dict[str, set[type]] = {}
    for span in traced.collector.spans():
        for found in (span.attributes, *(event[2] for event in span.events), *(link[2] for link in span.links)):
            for name, value in found.items():
                seen.setdefault(name, set()).add(type(value))
    assert len(seen) > 40
    assert {name: kinds for name, kinds in seen.items() if kinds != {expected.get(name, str)}} == {}
