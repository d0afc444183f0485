"""Every span attribute of the gateway, made in one place from the objects the stations hold (docs/telemetry.md).

Pure functions of typed values, which are kept until a trace is dropped or exported (``trace.py``): no prompts among
them. None means "leave out". No content, no credential ever enters here. ``gen_ai.*`` names
are those of the pinned opentelemetry-semantic-conventions (checked by a test).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gateway.http.schemas import EndpointName
from policies.types import AdmissionDecision, Pick, Principal, QuotaDecision, RouteDecision, TenantId, Usage
from workers.protocol import SamplingParams
from workers.spans import Attributes

PROVIDER = "forebay"
WAITED_BEHIND = 5
"""Most entries of ``forebay.queue.waited_behind``."""
OPERATIONS: Mapping[EndpointName, str] = {
    "chat": "chat",
    "completions": "text_completion",
    "embeddings": "embeddings",
}
"""``gen_ai.operation.name`` by what a request asks for; ``/v1/responses`` asks for a chat."""


def root(
    *,
    request_id: str | None = None,
    job_id: str | None = None,
    model: str | None = None,
    adapter: str | None = None,
    policy_generation: int | None = None,
    worker: str | None = None,
    preemptions: int | None = None,
    stream: bool | None = None,
) -> Attributes:
    """The root's decisive tags, as they become known. ``model`` only once it is known to exist."""
    return {
        "forebay.request.id": request_id,
        "forebay.job.id": job_id,
        "forebay.model": model,
        "forebay.adapter": adapter,
        "forebay.policy.generation": policy_generation,
        "forebay.worker": worker,
        "forebay.preemptions": preemptions,
        "forebay.stream": stream,
    }


def auth(principal: Principal) -> Attributes:
    """``auth``: how the caller was verified and the credential's hash."""
    return {"forebay.auth.method": principal.method, "forebay.key.id": principal.key_id}


def tokenized(prompt_tokens: int) -> Attributes:
    """``tokenize``."""
    return {"forebay.prompt.tokens": prompt_tokens}


def admission(decision: AdmissionDecision, verdict: str | None = None) -> Attributes:
    """``admission``. ``verdict``: what became of it, ``clamp`` or ``fallback``; None: the refusal's reason."""
    return {
        "forebay.admission.decision": verdict or ("admit" if decision.admitted else decision.reason or "refuse"),
        "forebay.admission.predicted_wait_ms": _ms(decision.predicted_wait_s),
    }


def quota_verdict(decision: QuotaDecision) -> str:
    """``admit``, ``throttle`` (passes later) or ``deny`` (never passes): also the label of the decisions metric."""
    if decision.admitted:
        return "admit"
    return "deny" if decision.never else "throttle"


def quota(decision: QuotaDecision) -> Attributes:
    """``quota reserve``. ``remaining`` is that of the refusing limit, else of the tokens."""
    unit = (decision.limit or "tokens").partition("_")[0]
    state = decision.remaining.get(unit)
    return {
        "forebay.quota.decision": quota_verdict(decision),
        "forebay.quota.limit": decision.limit,
        "forebay.quota.cost": decision.cost,
        "forebay.quota.remaining": None if state is None else state.remaining,
        "forebay.quota.retry_after_ms": _ms(decision.retry_after_s),
    }


def queued(
    policy: str,
    *,
    tenant: TenantId,
    service_class: str,
    weight: float,
    depth: int,
    depth_tenant: int,
    position: int,
    requeued: str | None = None,
) -> Attributes:
    """``queue``, at entry. ``position``: jobs ahead in the tenant's own line, 0 = next. Depths count before entry.

    ``requeued``: why it is here again.
    """
    return {
        "forebay.queue.policy": policy,
        "forebay.queue.depth": depth,
        "forebay.queue.depth_tenant": depth_tenant,
        "forebay.queue.position": position,
        "forebay.queue.weight": weight,
        "forebay.queue.requeued_because": requeued,
        "forebay.tenant": tenant,
        "forebay.class": service_class,
    }


def picked(
    pick: Pick, wait_s: float, waited_behind: Iterable[tuple[str, int]] = (), *, policy: str | None = None
) -> Attributes:
    """``queue``, when popped. ``waited_behind``: tokens served meanwhile by tenant; the most come first.

    ``policy``: who picked it; another one than at entry after a swap.
    """
    most = sorted(waited_behind, key=lambda entry: (-entry[1], entry[0]))[:WAITED_BEHIND]
    return {
        "forebay.queue.wait_ms": _ms(wait_s),
        "forebay.queue.picked_by": policy,
        "forebay.queue.picked_because": pick.picked_because,
        "forebay.queue.virtual_start": None if pick.virtual_start is None else float(pick.virtual_start),
        "forebay.queue.waited_behind": [f"{tenant}={tokens}" for tenant, tokens in most],
    }


def left_queue(wait_s: float) -> Attributes:
    """``queue``, when it ends otherwise (shed, expired, client gone); the caller adds ``fail(reason)``."""
    return {"forebay.queue.wait_ms": _ms(wait_s)}


def routed(decision: RouteDecision, candidates: int) -> Attributes:
    """``route``."""
    return {
        "forebay.worker": decision.worker,
        "forebay.route.reason": decision.reason,
        "forebay.route.candidates": candidates,
        "forebay.route.prefix_hit_tokens": decision.prefix_hit_tokens,
    }


def chat_request(
    params: SamplingParams,
    model: str,
    max_tokens: int,
    n: int = 1,
    endpoint: EndpointName = "chat",
    stream: bool = False,
) -> Attributes:
    """``chat {model}``, at its start. ``endpoint``: what the request asks for. Stop strings are content."""
    return {
        "gen_ai.operation.name": OPERATIONS[endpoint],
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k or None,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.choice.count": n if n != 1 else None,
        "gen_ai.request.stream": stream,
        "gen_ai.output.type": None if endpoint == "embeddings" else "text",
    }


def chat_response(
    usage: Usage,
    *,
    model: str | None = None,
    response_id: str | None = None,
    finish_reasons: Iterable[str] = (),
    first_chunk_s: float | None = None,
) -> Attributes:
    """``chat {model}``, at its end. ``input_tokens`` counts cached ones too, as the conventions ask."""
    return {
        "gen_ai.response.model": model,
        "gen_ai.response.id": response_id,
        "gen_ai.response.finish_reasons": list(finish_reasons) or None,
        "gen_ai.response.time_to_first_chunk": first_chunk_s,
        "gen_ai.usage.input_tokens": usage.prompt + usage.cached,
        "gen_ai.usage.output_tokens": usage.output,
        "gen_ai.usage.cache_read.input_tokens": usage.cached,
    }


def settled(usage: Usage, refunded: int | None) -> Attributes:
    """``quota settle``. ``refunded`` as ``QuotaPolicy.settle`` returned it."""
    return {
        "forebay.usage.prompt": usage.prompt,
        "forebay.usage.cached": usage.cached,
        "forebay.usage.output": usage.output,
        "forebay.usage.refunded": refunded,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
