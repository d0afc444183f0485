"""From a checked request to the job that policies see and the message that a worker gets.

Rules
- Identity, weight, class, limits and cache scope come from the verified tenant. A caller may lower its class
  (``x-forebay-class``) and loosen its deadline (``x-forebay-deadline-ms``); anything else it claims is ignored.
- The event loop never waits for a long text: template, tokenizer and prefix keys run in a thread (``lane.py``).
- A text that is too long to fit is refused before it is encoded.
- An explicit ``max_tokens`` is kept or refused, never cut silently. An omitted one is what all limits allow, and
  ``Prepared.headers`` says so where a limit made it smaller than the model's default.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar, cast

from msgspec.structs import replace as with_fields

from gateway.adapters import Adapter
from gateway.asking import refuse_unaskable
from gateway.callforms import CallForm, form_of
from gateway.choices import ChoiceStream
from gateway.echo import PromptScores, echoed
from gateway.errors import ApiError, bad_request
from gateway.grammar_check import GrammarCheck, GrammarRefusedError
from gateway.http.schemas import ChatRequest, CompletionRequest, EndpointName
from gateway.jobs import job_facts
from gateway.labels import Labels
from gateway.lane import Lane, spare_cores
from gateway.output_budget import Context, output_budget
from gateway.public_prefixes import PublicPrefixes
from gateway.served import ServedModel, TextTokenizer
from gateway.tenant_keys import TenantKeys
from gateway.tenants import EffectiveTenant
from policies.quota.limits import most_output
from policies.types import CacheScope, Job, JobId, PrefixKey, Principal
from workers.engine.block_hash import chain_keys
from workers.protocol import Generate, SamplingParams
from workers.tokenizer import ChatTemplateError, EncodeError

AnyRequest = ChatRequest | CompletionRequest
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is ready for admission, quota and queue."""

    job: Job
    generate: Generate = field(repr=False)
    """Without a trace: the dispatcher adds the chat span's context."""
    request: AnyRequest = field(repr=False)
    tokenizer: TextTokenizer = field(repr=False)
    limited_by: str | None = None
    """Which limit made an omitted ``max_tokens`` smaller than the model's default."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Headers that say what else was lessened (``entrance.py``)."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return self.request.stop

    @property
    def stream(self) -> bool:
        """Answer as a stream?"""
        return self.request.stream

    @property
    def include_usage(self) -> bool:
        """End the stream with a usage chunk?"""
        return self.request.include_usage

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return self.job.prompt_tokens

    @property
    def echo(self) -> str:
        """What each answer begins with: the prompt, where that was asked for."""
        request = self.request
        if not isinstance(request, CompletionRequest) or not request.echo:
            return ""
        return echoed(request.prompt, self.tokenizer.decoder())

    @property
    def call_form(self) -> CallForm:
        """In which form its model calls tools."""
        return form_of(self.tokenizer.tool_template)

    def choices(self) -> list[ChoiceStream]:
        """Fresh text streams for its choices: one set per attempt."""
        params = self.generate.params
        shown = self._call_marks()
        return [
            ChoiceStream(
                self.tokenizer.decoder(shown),
                index=index,
                stops=self.request.stop,
                min_tokens=params.min_tokens,
                token_bytes=None if params.logprobs is None else self.tokenizer.token_bytes,
                prompt=self._prompt_scores() if params.prompt_logprobs and not index else None,
                silent=self.request.max_tokens == 0,
            )
            for index in range(self.generate.n)
        ]

    def _call_marks(self) -> list[int]:
        """Control tokens that mark calls, where there may be some."""
        request = self.request
        if not isinstance(request, ChatRequest) or request.toolbox is None or not request.toolbox.shown:
            return []
        marks = map(self.tokenizer.control_token, self.call_form.marks)
        return [token for token in marks if token is not None]

    def _prompt_scores(self) -> PromptScores:
        return PromptScores(self.generate.tokens, self.tokenizer.decoder(), self.tokenizer.token_bytes)

    def headers(self) -> dict[str, str]:
        """``x-forebay-max-tokens: 180; limit=tokens_per_minute`` where a limit cut an omitted ``max_tokens``; notes."""
        if self.limited_by is None:
            return dict(self.notes)
        return {"x-forebay-max-tokens": f"{self.generate.max_tokens}; limit={self.limited_by}", **self.notes}


class Intake:
    """Makes jobs. One per gateway; ``close`` ends its threads."""

    def __init__(
        self,
        secret: bytes,
        *,
        threads: int | None = None,
        grammars: GrammarCheck | None = None,
        public: PublicPrefixes | None = None,
    ) -> None:
        """``secret`` keys the opaque names and labels that workers see. ``public``: prefixes that tenants may share.

        ``threads``: for long prompts; as many as there are cores to spare, unless given.
        """
        self.tenant_keys = TenantKeys(secret)
        self._labels = Labels(secret)
        self._public = public or PublicPrefixes()
        self._grammars = grammars or GrammarCheck()
        self._prompts = Lane("tokenize", threads or spare_cores())
        self._errands = Lane("errand")

    async def close(self) -> None:
        """End the threads and the grammar compilers; encodings that run are finished first."""
        await self._grammars.close()
        for lane in (self._prompts, self._errands):
            await lane.close()

    async def prepare(
        self,
        request: AnyRequest,
        *,
        principal: Principal,
        tenant: EffectiveTenant,
        model: ServedModel,
        adapter: Adapter | None = None,
        scope: CacheScope,
        job_id: JobId,
        now: float,
        headers: Mapping[str, str] | None = None,
    ) -> Prepared:
        """Tokenise, apply the limits, build job and message. ``headers``: the request's, names in lower case.

        Raises ApiError: 400 for what does not fit the model or the tenant's limits, 503 while the model is loading.
        """
        if not model.offers(request.endpoint):
            raise _not_offered(request.endpoint, model.name)
        tokenizer = model.tokenizer
        if model.directory is None:
            refuse_unaskable(request, model.name)
        context = Context.of(model, tenant)
        digest = adapter.digest if adapter is not None else None
        tokens, keys, public = await self._encoded(request, tenant, tokenizer, model, digest, scope, context)
        _check_ids(request, tokenizer.vocab_size)
        facts = job_facts(principal, tenant, model.name, job_id, now, headers, adapter)
        room = None
        if request.max_tokens is None:
            room = most_output(facts["accounts"], len(tokens), facts["price"])
        max_tokens, limited_by = output_budget(request, len(tokens), context, tenant, model, room)
        _check_min_tokens(request, max_tokens)
        most = request.lines * max_tokens
        job = Job(prompt_tokens=len(tokens), max_tokens=most, cache_scope=scope, prefix_keys=keys, **facts)
        generate = Generate(
            id=job_id,
            tokens=tokens,
            max_tokens=max(1, max_tokens),  # a worker makes one; ``choices`` says nothing of it where none is wanted
            params=_params(request, tokenizer, model),
            n=request.n if request.drawn is None else request.drawn,
            beams=request.beams,
            scope=scope.key,
            cache_until=tenant.cache_until,
            labels=self._labels.of_request(principal, request.metadata),
            public_prefix_tokens=public,
            adapter=digest,
            tenant_key=self.tenant_keys.key(tenant.id),
            weight=tenant.weight,
            grammar=await self._grammar(request, tokenizer, model, tenant),
        )
        return Prepared(job, generate, request, tokenizer, limited_by)

    async def _encoded(
        self,
        request: AnyRequest,
        tenant: EffectiveTenant,
        tokenizer: TextTokenizer,
        model: ServedModel,
        adapter: str | None,
        scope: CacheScope,
        context: Context,
    ) -> tuple[list[int], tuple[PrefixKey, ...], int]:
        chars, cost, encode = _reader(request, tokenizer)
        context.refuse_text(chars, request.content_param)
        block_size, revision = model.block_size, model.revision

        def work() -> tuple[list[int], tuple[PrefixKey, ...], int]:
            tokens = encode()
            _check_tokens(tokens, tokenizer.vocab_size, request.content_param)
            if len(tokens) >= context.tokens:  # refused below: no keys are needed
                return tokens, (), 0
            public = self._public.match(model.name, tokens) if scope.public else 0
            keys = chain_keys(scope.key, revision, adapter, tokens, block_size, public_tokens=public)
            return tokens, cast("tuple[PrefixKey, ...]", tuple(keys)), public

        try:
            return await self._prompts.run(tenant.id, cost, work, weight=tenant.weight)
        except (ChatTemplateError, EncodeError) as error:
            text = str(error)
            raise bad_request(f"{text[:1].upper()}{text[1:]}.", param=request.content_param) from None

    async def _grammar(
        self, request: AnyRequest, tokenizer: TextTokenizer, model: ServedModel, tenant: EffectiveTenant
    ) -> str:
        """The grammar of the answer, which is known to compile; empty for none. Raises ApiError 400, 503."""
        form = form_of(tokenizer.tool_template)
        constraint = request.constraint(partial(form.grammar, control=tokenizer.control_token))
        if constraint is None:
            return ""
        if model.directory is None:  # upstreams alone run it; they are asked in the caller's words
            return ""
        try:
            await self._grammars.check(constraint.grammar, model.directory, tenant.id)
        except GrammarRefusedError as error:
            raise bad_request(
                f"{constraint.param} cannot be enforced: {error}.", param=constraint.param, code="invalid_grammar"
            ) from None
        return constraint.grammar

    async def errand(self, tenant: EffectiveTenant, chars: int, work: Callable[[], T]) -> T:
        """Run one, in a thread where it is long: one of their own, so that no prompt waits behind them."""
        return await self._errands.run(tenant.id, chars, work, weight=tenant.weight)


def _reader(request: AnyRequest, tokenizer: TextTokenizer) -> tuple[int, int, Callable[[], list[int]]]:
    """How many characters there are at least, what encoding them costs (in characters), and how it is done."""
    if isinstance(request, ChatRequest):
        return _chat_reader(request, tokenizer)
    prompt = request.prompt
    if isinstance(prompt, str):
        return len(prompt), len(prompt), lambda: tokenizer.encode_text(prompt)
    return len(prompt), len(prompt), lambda: list(prompt)


def _chat_reader(request: ChatRequest, tokenizer: TextTokenizer) -> tuple[int, int, Callable[[], list[int]]]:
    tools = request.toolbox.shown if request.toolbox is not None else ()
    template = tokenizer.tool_template

    def encode() -> list[int]:
        messages, documents = form_of(template).laid_out(request.messages, tools, template)
        return tokenizer.encode_chat(messages, tools=documents or None)

    told = sum(len(json.dumps(tool.document)) for tool in tools)
    chars = sum(message.chars for message in request.messages) + told
    return chars, sum(message.cost for message in request.messages) + told, encode


def _not_offered(endpoint: EndpointName, model: str) -> ApiError:
    what = {"chat": "answers no chats", "completions": "completes no texts", "embeddings": "makes no embeddings"}
    return bad_request(
        f"The model {model[:128]!r} {what[endpoint]}: its servers do not offer that. Ask another model.",
        param="model",
        code="embeddings_not_supported" if endpoint == "embeddings" else "endpoint_not_supported",
    )


def _check_tokens(tokens: list[int], vocab: int, param: str) -> None:
    if not tokens:
        raise bad_request(f"{param} is empty: the model needs at least one token.", param=param)
    if min(tokens) >= 0 and max(tokens) < vocab:
        return
    i = next(i for i, token in enumerate(tokens) if not 0 <= token < vocab)
    raise bad_request(
        f"{param}[{i}]: {tokens[i]} is no token id of this model; its ids are 0 to {vocab - 1}.", param=f"{param}[{i}]"
    )


def _check_ids(request: AnyRequest, vocab: int) -> None:
    for name, ids in (("logit_bias", request.params.logit_bias), ("stop_token_ids", request.params.stop_token_ids)):
        wrong = max(ids, default=0)
        if wrong >= vocab:
            raise bad_request(
                f"{name}: {wrong} is no token id of this model; its ids are 0 to {vocab - 1}.", param=name
            )


def _params(request: AnyRequest, tokenizer: TextTokenizer, model: ServedModel) -> SamplingParams:
    """As the worker takes them: log probabilities where answers are ranked; banned words as tokens, as they begin a
    text and as they follow a space."""
    params = request.params
    if request.drawn is not None and params.logprobs is None:
        params = with_fields(params, logprobs=0)
    if not request.bad_words or model.directory is None:
        return params
    rows: dict[tuple[int, ...], None] = {}
    try:
        for word in request.bad_words:
            for text in (word, f" {word.lstrip()}"):
                if tokens := tokenizer.encode_text(text, prefix=False):
                    rows[tuple(tokens)] = None
    except EncodeError as error:
        raise bad_request(f"bad_words: {error}.", param="bad_words") from None
    return with_fields(params, bad_words=tuple(rows))


def _check_min_tokens(request: AnyRequest, max_tokens: int) -> None:
    if request.params.min_tokens > max_tokens:
        raise bad_request(
            f"min_tokens ({request.params.min_tokens}) is above the most tokens a choice may have ({max_tokens}); "
            f"lower it or raise {request.max_tokens_param}.",
            param="min_tokens",
        )
