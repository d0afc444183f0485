"""Messages between gateway and worker: msgspec Structs, MessagePack on the wire, no pickle anywhere.

One session per worker (``rpc``). Down: ``Generate``, ``Cancel``, ``Keep``, ``Purge``, ``Drain``,
``Prefetch``, ``LoadAdapter``, ``DropAdapter``. Up: ``Hello`` first, then one ``StepOutputs`` per engine step (coalesced
when the reader is slower than the engine); ``Purged`` and ``AdapterAnswer`` as answers to a purge and to an adapter's
coming or going.

Rules
- Counters in ``SequenceOutput`` are cumulative per sequence; the gateway takes differences, so a lost or repeated
  message never bills twice.
- A sequence's last output carries ``finish``; nothing follows it. A worker sends it exactly once per sequence,
  also after a cancel.
- Unknown fields are ignored by the decoder, so a newer peer may add fields; ``PROTOCOL`` changes when a meaning does.
- What comes once per token or sequence refers to plain data only, so the garbage collector need not know of it
  (``gc=False``): a message of 256 outputs is decoded in 0.06 ms instead of 0.10.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from policies.types import kv_tokens
from workers.sampling import Beams as Beams
from workers.sampling import SamplingParams as SamplingParams
from workers.tier_stats import TierStats as TierStats

PROTOCOL = 7
"""2: a ``Cancel`` may name one choice. 3: a ``Generate`` may ask for beam search. 5: ``Generate.adapter`` is a digest,
and adapters come and go. 6: prompts are scored. 7: there is ``Prefetch``."""

FinishReason = Literal["stop", "length", "content_filter", "cancelled", "error"]
"""``content_filter``: of upstreams only, whose filter cut the answer or kept it back."""


class Ask(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request in the API's own words, for a worker that is an upstream: it has a tokenizer of its own.

    ``body`` holds what the caller asked for, read and checked by the gateway; neither a model's name nor ``stream``,
    and nothing of who the caller is.
    """

    endpoint: Literal["chat", "completions", "embeddings"]
    body: dict[str, Any]
    """JSON values under the API's names."""


class Source(msgspec.Struct, frozen=True):
    """Where the keys and values of a prompt are (``workers.transfer``)."""

    address: str
    """Of the worker that computes them, as the gateway knows it."""
    ticket: str
    """What it holds them under."""


class Generate(msgspec.Struct, frozen=True, omit_defaults=True, tag="generate"):
    """Run one request: ``n`` sequences over one prompt."""

    id: str
    tokens: list[int]
    max_tokens: int
    """Per sequence."""
    params: SamplingParams = SamplingParams()
    n: int = 1
    scope: bytes = b""
    """The prefix-cache namespace (DESIGN §7); an opaque keyed digest."""
    tenant_key: str = ""
    """Opaque name under which the worker counts service; not the tenant's id."""
    weight: float = 1.0
    adapter: str | None = None
    """The LoRA adapter's digest (``workers/adapters.py``), of those that Hello or an ``AdapterAnswer`` named."""
    trace: dict[str, str] = {}
    """W3C ``traceparent`` / ``tracestate`` of the gateway's chat span."""
    labels: list[bytes] = []
    """Whose it is and what it is about, as keyed digests: a purge may name one (a user, a group, a document)."""
    cache_until: float = 0.0
    """Unix time at which ``scope`` ends (a retention time): nothing of it stays on a disk longer. 0: open."""
    public_prefix_tokens: int = 0
    """How many leading tokens lie in an operator-registered public prefix."""
    grammar: str = ""
    """What every choice's text must match, in the Lark dialect of llguidance (``workers/grammar.py``); empty: no rule.
    The gateway has compiled it already, so that a worker is never the first to meet a wrong one."""
    beams: Beams | None = None
    """Beam search: the ``n`` best answers, best first. They come whole, with their last outputs."""

    lend: str = ""
    """A ticket: hold the prompt's blocks under it when they are computed."""
    source: Source | None = None
    """Another worker computes the prompt: fetch its blocks, then run this."""

    @property
    def lines(self) -> int:
        """Sequences that run at once when the prompt is computed."""
        return self.n if self.beams is None else self.beams.width

    ask: Ask | None = None
    """The same request as text; only for a worker whose ``Hello`` says ``upstream``."""


class Cancel(msgspec.Struct, frozen=True, omit_defaults=True, tag="cancel"):
    """Stop all sequences of a request, or one of its choices, whatever their state. Unknown ones are ignored.

    A first choice whose prompt the others wait for ends when the prompt is computed, the others at once. A beam
    search has no choices before its end: only all of it can be stopped.
    """

    id: str
    index: int | None = None
    """Which choice; None: all."""


class Keep(msgspec.Struct, frozen=True, tag="keep"):
    """The gateway's last word on a request's trace: build its spans or drop its timings."""

    id: str
    keep: bool


class Purge(msgspec.Struct, frozen=True, omit_defaults=True, tag="purge"):
    """Zero and free every cached block of these scopes, of requests with one of these labels, or under one of these
    keys; blocks in use follow when they are released."""

    id: str
    scopes: list[bytes] = []
    labels: list[bytes] = []
    keys: list[bytes] = []
    """Chain keys (of a public prefix, which has no scope)."""


class Prefetch(msgspec.Struct, frozen=True, tag="prefetch"):
    """A request that waits in the gateway's queue begins with these blocks: have ready what lies on a disk.

    A hint: not answered, and of no effect where the disk is busy or nothing of it lies there.
    """

    keys: list[bytes]
    """Chain keys, first block first."""


class LoadAdapter(msgspec.Struct, frozen=True, tag="load_adapter"):
    """Read a LoRA adapter and take it in, while everything runs on. Answered by an ``AdapterAnswer``."""

    id: str
    name: str
    source: str
    """A directory, from where the worker stands: relative to the configuration's folder."""


class DropAdapter(msgspec.Struct, frozen=True, tag="drop_adapter"):
    """Take no new request for an adapter, and free it after its last one; only then this is answered."""

    id: str
    digest: str


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Take no new work, finish what runs, then end the stream."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log probability of one sampled token and of the ``logprobs`` best alternatives (id, logprob), best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = []


class TextLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """``TokenLogprob`` of an upstream: tokens by their bytes."""

    token: bytes
    logprob: float
    top: list[tuple[bytes, float]] = []


class Timings(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """When things happened to a sequence (wall clock, ns), for spans; sent with the last output only."""

    received_ns: int = 0
    scheduled_ns: int = 0
    first_token_ns: int = 0
    finished_ns: int = 0
    preemptions: int = 0


class SequenceOutput(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What one step (or several coalesced ones) produced for one sequence."""

    id: str
    index: int = 0
    """Which of the request's ``n`` choices."""
    tokens: list[int] = []
    """New since the last message."""
    text: str | None = None
    """Instead of tokens, where the worker is an upstream."""
    output_tokens: int = 0
    """Cumulative, including ``tokens``. An end token that stopped the sequence is counted, since it was produced."""
    prompt_computed: int = 0
    """Cumulative prompt tokens computed; a request's choices share their prompt, so only index 0 reports it."""
    prompt_cached: int = 0
    """Prompt tokens taken from the prefix cache, likewise."""
    finish: FinishReason | None = None
    error: str | None = None
    """With ``finish="error"``: a code of ``ERRORS``."""
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob] = []
    """Of the prompt's second token and those behind it, where ``SamplingParams.prompt_logprobs`` asked for them: new
    since the last message, at index 0."""
    prompt_scored: int = 0
    """How many of them so far (cumulative)."""
    timings: Timings | None = None
    device_ns: tuple[int, int, int] | None = None
    """With an end: nanoseconds of the device that the request took since the last time this was said: computing,
    computing again after preemptions, in steps that failed."""
    searched: int | None = None
    """Of a beam search, at index 0: output tokens of all beams so far (cumulative), which are what ran; 0 at the
    others. None: ``output_tokens`` ran."""
    text_logprobs: list[TextLogprob] = []
    """With ``text``: of its tokens."""
    prompt_tokens: int = 0
    """The prompt's length as an upstream counted it, once known: replaces the gateway's own count. 0: not said."""
    retry_after_s: float | None = None
    """With ``throttled`` and ``unavailable``: when the upstream wants to be asked again."""
    error_param: str = ""
    """With ``bad_request``: the field of ``Ask.body`` that the upstream complains of. Empty: not said."""


ERRORS = (
    "prompt_too_long",
    "overloaded",
    "internal",
    "draining",
    "bad_request",
    "grammar",
    "adapter",
    # of upstreams only:
    "throttled",
    "unavailable",
    "upstream_failed",
    "upstream_timeout",
)
"""``grammar``: it does not compile here, became too complex on the way, or allows no token any more. ``adapter``: it is
not loaded here. ``throttled``, ``unavailable``: it answered 429, 503. ``upstream_failed``: it cannot be reached, broke
off, or answered what makes no sense."""


class WorkerStats(msgspec.Struct, frozen=True, omit_defaults=True):
    """The worker's live view, in every ``StepOutputs``; also sent once a second when idle."""

    free_blocks: int = 0
    cached_blocks: int = 0
    used_blocks: int = 0
    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    hit_tokens: int = 0
    query_tokens: int = 0
    hot_prefixes: list[bytes] = []
    """Chain keys of the most recently hit prefixes, bounded (64)."""
    step_ms: float = 0.0
    max_running: int = 0
    """Sequences that may run at once by now; 0: as Hello said."""
    device_ns: dict[str, int] = {}
    """Where the device's time went since the worker began, by kind; now and then, empty in between."""
    cached_by_tenant: dict[str, int] = {}
    """Cached blocks by ``Generate.tenant_key``, of the 32 that have most; some steps old."""
    drafts_accepted: int = 0
    """Guesses of speculative decoding that became tokens, since the worker began."""
    drafts_rejected: int = 0
    """Those that did not; nobody pays for them."""
    tiers: dict[str, TierStats] = {}
    """``host`` and ``disk``, where they are configured."""
    transfers: dict[str, tuple[int, float]] = {}
    """Of a decode worker: its waits for a prompt's blocks, by how they ended (``ok``, or why not all came): how many,
    and seconds in all."""
    windows: dict[str, tuple[int, int]] = {}
    """Of a model with windows, by window (``all``: layers without one): blocks that running sequences hold, and blocks
    that lie outside the window and were given back, which one table for all layers would hold too."""


class StepOutputs(msgspec.Struct, frozen=True, tag="step"):
    """One engine step's news. ``step`` rises by at least one; 0 for idle reports."""

    step: int
    outputs: list[SequenceOutput]
    stats: WorkerStats


class AdapterInfo(msgspec.Struct, frozen=True):
    """A LoRA adapter that a worker holds."""

    name: str
    digest: str
    rank: int
    bytes: int


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The worker's first message on every new stream."""

    protocol: int
    worker: str
    model: str
    model_revision: str
    tokenizer_sha256: str
    block_size: int
    blocks: int
    max_running: int
    """At the start; ``WorkerStats`` has the current one."""
    max_context: int
    pid: int = 0
    metrics_port: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    keeps: list[int] = []
    """Of a model with windows: how many latest tokens each of a sequence's block tables keeps, 0 = all. ``blocks`` are
    those of all tables together."""
    versions: dict[str, str] = {}
    upstream: bool = False
    """It takes ``Generate.ask`` and answers with text. It has no engine of ours: no steps, blocks or prefix keys."""
    ranks: int = 1
    """Processes that the model is divided among, each with a device of its own."""
    role: str = "both"
    """``prefill``: it only computes prompts for others. ``decode``: prompts may be computed elsewhere for it."""
    layout: str = ""
    """What its blocks' bytes depend on, as a digest: between equal ones they can be handed over. Empty: never."""
    address: str = ""
    """Where other workers reach it. Empty: where the gateway does, which fills it in."""
    transfer_min_tokens: int = 0
    """Of a decode worker: shorter prompts it computes itself."""
    endpoints: list[str] = []
    """Of an upstream: which of ``Ask.endpoint`` it takes. An engine of ours generates, and makes no embeddings."""
    adapters: list[AdapterInfo] = []

    @property
    def longest(self) -> int:
        """Most tokens of prompt + output that one sequence can have here: what its context and its cache hold."""
        return kv_tokens(self.blocks, self.block_size, self.keeps, self.max_context)


class Purged(msgspec.Struct, frozen=True, omit_defaults=True, tag="purged"):
    """Answer to ``Purge``: blocks zeroed now, and blocks still in use that will be zeroed on release."""

    id: str
    blocks: int
    """Of the device's memory."""
    pending: int = 0
    """Blocks in use, and files that are not unlinked yet."""
    unreachable: bool = False
    """An upstream's cache: nothing there can be zeroed from here."""
    tiers: dict[str, int] = {}
    """Blocks below the device: ``host`` zeroed, ``disk`` unlinked."""


class AdapterAnswer(msgspec.Struct, frozen=True, omit_defaults=True, tag="adapter"):
    """Answer to ``LoadAdapter`` (the adapter, or why not) or ``DropAdapter`` (neither: it is gone)."""

    id: str
    adapter: AdapterInfo | None = None
    error: str | None = None
    """For the operator: file, field, value, remedy."""


Down = Generate | Cancel | Keep | Purge | Drain | Prefetch | LoadAdapter | DropAdapter
Up = Hello | StepOutputs | Purged | AdapterAnswer

_encoder = msgspec.msgpack.Encoder()
_down = msgspec.msgpack.Decoder(list[Down])
_up = msgspec.msgpack.Decoder(Up)


def encode(message: Down | Up) -> bytes:
    """Serialise one message."""
    return _encoder.encode(message)


def joined(messages: Sequence[bytes]) -> bytes:
    """One frame of several encoded messages: a msgpack array of them. At most 65,535."""
    return b"\xdc" + len(messages).to_bytes(2, "big") + b"".join(messages)


def decode_down(data: bytes) -> list[Down]:
    """Parse a frame for the worker: what ``joined`` made. Raises msgspec.DecodeError on anything else."""
    return _down.decode(data)


def decode_up(data: bytes) -> Up:
    """Parse a message for the gateway. Raises msgspec.DecodeError on anything else."""
    return _up.decode(data)
