"""Which prefill worker computes a prompt for the decode worker that was chosen, and the request that makes it do so.

Rules
- A prefill worker never runs a request: the dispatcher chooses among the others as if it were not there. So a job
  that is dispatched has its slot, and is answered whatever becomes of the prefill worker.
- Only between equal layouts does anything move. Labels, classes and adapters hold for a prefill worker as for any.
- Its part of a request has the request's id, one token to produce that nobody gets, and no grammar: what it reports is
  prompt, which is charged as it is computed and never twice (``metering.py``).
- A prefill worker computes one prompt and has one in line, or several short ones. The others wait in the queue, where
  their order still holds; meanwhile what needs no prefill worker goes past them.
- Which of several: the routing policy says, so that a prefix is computed where it is cached; the least loaded where it
  fails.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

from msgspec.structs import replace as with_fields

from gateway import log
from gateway.desk import try_send
from gateway.flights import DEFAULT_STEP_TOKENS
from gateway.gate import MAX_WAITING, suits
from gateway.monitor import Monitor
from gateway.ticket import Ticket
from gateway.worker_handle import WorkerGoneError, WorkerHandle
from policies.spi import RoutingPolicy
from workers.protocol import Cancel, Generate, SamplingParams, Source

_log = log.get("dispatch")
_ONE_TOKEN = SamplingParams(temperature=0.0, ignore_eos=True)


class Prefill:
    """Of one model."""

    def __init__(
        self, workers: Mapping[str, WorkerHandle], routing: Callable[[], RoutingPolicy], monitor: Monitor
    ) -> None:
        """``workers``: those that are connected, of every role."""
        self._workers = workers
        self._routing = routing
        self._monitor = monitor

    @property
    def serving(self) -> list[WorkerHandle]:
        """The workers that run requests, by name."""
        return [self._workers[name] for name in sorted(self._workers) if serves(self._workers[name])]

    def may(self, ticket: Ticket, target: WorkerHandle, now: float) -> bool:
        """Whether the request can begin at ``target`` now: it needs no prefill worker, none lives, or one has room."""
        able = self._able(ticket, target, now)
        return not able or any(_has_room(worker) for worker in able.values())

    def busy_for(self, ticket: Ticket, now: float) -> bool:
        """Whether the request waits for a prefill worker, wherever it would run."""
        serving = self.serving
        return bool(serving) and not any(self.may(ticket, target, now) for target in serving)

    def send(self, ticket: Ticket, target: WorkerHandle, message: Generate, now: float) -> WorkerHandle | None:
        """Send the request to ``target``, and its prompt to a prefill worker where ``target`` wants that and one can.

        Returns who computes the prompt; None: ``target`` itself. Raises WorkerGoneError: ``target`` did not get it.
        """
        message, source = self._hand_over(ticket, target, message, now)
        try:
            target.send(message)
        except WorkerGoneError:
            if source is not None:
                try_send(source, Cancel(message.id))
            raise
        return source

    def _hand_over(
        self, ticket: Ticket, target: WorkerHandle, message: Generate, now: float
    ) -> tuple[Generate, WorkerHandle | None]:
        source = self._choose(ticket, target, now)
        if source is None or source.hello is None:
            return message, None
        key = secrets.token_hex(16)
        try:
            source.send(prompt_of(message, source, key))
            source.flush()  # who asks it for the prompt's blocks hears of the request next
        except WorkerGoneError as error:
            _log.warning("prefill_failed", worker=source.name, job=message.id, why=str(error))
            return message, None
        ticket.ran_on.append(source)
        return with_fields(message, source=Source(source.hello.address, key)), source

    def _able(self, ticket: Ticket, target: WorkerHandle, now: float) -> dict[str, WorkerHandle]:
        """Prefill workers that can compute the request's prompt for ``target``; none where it wants none."""
        hello, job = target.hello, ticket.job
        if hello is None or hello.role != "decode" or not hello.layout:
            return {}
        if ticket.prepared.generate.params.prompt_logprobs:  # a prompt that is fetched has no logits
            return {}
        if job.prompt_tokens < max(hello.transfer_min_tokens, hello.block_size + 1):
            return {}
        return {
            worker.name: worker
            for worker in self._workers.values()
            if _computes(worker, hello.layout, job.prompt_tokens)
            and worker.available(now)
            and suits(worker, job)
            and job.id not in worker.inflight_ids
        }

    def _choose(self, ticket: Ticket, target: WorkerHandle, now: float) -> WorkerHandle | None:
        able = self._able(ticket, target, now)
        if not able:
            return None
        able = {name: worker for name, worker in able.items() if _has_room(worker)} or able
        try:
            return able[self._routing().choose(ticket.job, [worker.view(now) for worker in able.values()], now).worker]
        except Exception as error:
            _log.error("routing_failed", model=target.model, failure=log.describe(error))
            self._monitor.fault("routing")
            return min(able.values(), key=lambda worker: worker.inflight_tokens)


def serves(worker: WorkerHandle) -> bool:
    """Whether it runs requests."""
    return worker.hello is None or worker.hello.role != "prefill"


def _computes(worker: WorkerHandle, layout: str, tokens: int) -> bool:
    hello = worker.hello
    return hello is not None and hello.role == "prefill" and hello.layout == layout and hello.longest > tokens


def _has_room(worker: WorkerHandle) -> bool:
    return worker.inflight <= MAX_WAITING or worker.inflight_tokens < DEFAULT_STEP_TOKENS


def prompt_of(message: Generate, source: WorkerHandle, key: str) -> Generate:
    """The part of a request that a prefill worker computes: all full blocks before the prompt's last token.

    And one token more, or the last of them could never be a hit: some token has to be computed.
    """
    assert source.hello is not None
    size = source.hello.block_size
    full = (len(message.tokens) - 1) // size * size
    return with_fields(
        message,
        tokens=message.tokens[: full + 1],
        max_tokens=1,
        n=1,
        params=_ONE_TOKEN,
        grammar="",
        beams=None,
        public_prefix_tokens=min(message.public_prefix_tokens, full),
        lend=key,
    )
