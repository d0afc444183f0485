"""What an operator may do from the console: purge, drain, end a request, check, try and swap policies, reload.

Each action takes the form's fields and returns what came of it; refusals are ApiError. Every action is logged, and what
it changed is entered into the audit log under the names that the admin API uses, so that one search finds both ways.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gateway import log, policy_view, yaml_source
from gateway.config_file import ConfigErrors
from gateway.console_data import ConsoleData
from gateway.errors import ApiError, bad_request
from gateway.settings import PolicyUse
from gateway.state.audit import Actor, Event
from gateway.worker_handle import WorkerGoneError
from policies.spi import KINDS, Kind, PolicyConfigError
from policies.types import TenantId

if TYPE_CHECKING:
    from gateway.service import Gateway

_log = log.get("console")

MAX_SHADOW_S = 86_400.0

Fields = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Deed:
    """What was changed, for the audit log: as ``Event`` has it."""

    action: str
    subject: str
    after: Mapping[str, Any]
    before: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What came of an action."""

    title: str
    ok: bool = True
    text: str = ""
    facts: tuple[tuple[str, str], ...] = ()
    receipt: Mapping[str, Any] | None = None
    """Shown as JSON, to be kept."""
    mistakes: tuple[tuple[str, str], ...] = ()
    """(path, what is wrong)."""
    status: int = 200
    deed: Deed | None = None
    """None: nothing was changed, or whoever changed it enters it."""


class Actions:
    """The actions by name."""

    def __init__(self, gateway: Gateway, data: ConsoleData) -> None:
        self._gateway = gateway
        self._parts = gateway.parts
        self._data = data
        self._by_name: Mapping[str, Callable[[Fields, Actor], Awaitable[Result]]] = {
            "purge": self._purge,
            "drain": self._drain,
            "cancel": self._cancel,
            "check": self._check,
            "swap": self._swap,
            "shadow": self._shadow,
            "end_shadow": self._end_shadow,
            "reload": self._reload,
        }

    async def run(self, name: str, fields: Fields, who: Actor) -> Result:
        """Do it, and enter it into the audit log.

        Raises ApiError: 404 for an unknown action, or what the action has against its fields.
        """
        action = self._by_name.get(name)
        if action is None:
            raise _not_found("There is no such action.", "unknown_action")
        result = await action(fields, who)
        _log.info("console_action", action=name, ok=result.ok, title=result.title, operator=who.name)
        if (deed := result.deed) is not None:
            await self._parts.registrar.record(Event(who, deed.action, deed.subject, deed.before, deed.after))
        return result

    async def _purge(self, fields: Fields, _: Actor) -> Result:
        tenant = TenantId(fields.get("tenant", ""))
        if not self._parts.tenants.knows(tenant):
            raise _not_found("There is no such tenant.", "unknown_tenant")
        self._parts.pipeline.replays.forget(tenant)
        receipt = await self._parts.purger.purge(tenant)
        body = receipt.body()
        return Result(
            f"Cache of {tenant} purged" if receipt.complete else f"Cache of {tenant} is unreachable, blocks remain",
            ok=receipt.complete,
            text="Every block is zeroed."
            if receipt.complete
            else f"No request can reach the old blocks. Not all are zeroed: {'; '.join(receipt.reasons)}.",
            facts=(
                ("Zeroed", f"{body['zeroed_blocks']} blocks"),
                ("Still in use", f"{body['pending_blocks']} blocks"),
                ("New epoch", str(receipt.epoch)),
                ("Workers that did not answer", ", ".join(receipt.failed) or "none"),
            ),
            receipt=body,
            deed=Deed("cache.purge", f"tenant:{tenant}", body),
        )

    async def _drain(self, fields: Fields, _: Actor) -> Result:
        handle = self._data.worker(fields.get("worker", ""))
        if handle is None:
            raise _not_found("There is no such worker.", "unknown_worker")
        try:
            handle.drain()
        except WorkerGoneError as error:
            raise ApiError(409, f"{error}.", type="invalid_request_error", code="worker_gone") from None
        return Result(
            f"{handle.name} drains",
            text="It takes no new requests and ends when those it has are done. One launched here is then started "
            "afresh.",
            facts=(("In flight", str(handle.inflight)),),
            deed=Deed("worker.drain", f"worker:{handle.name}", {"inflight": handle.inflight}),
        )

    async def _cancel(self, fields: Fields, _: Actor) -> Result:
        job = fields.get("job", "")
        for dispatcher in self._parts.dispatchers.values():
            if dispatcher.revoke(job):
                return Result(
                    f"Request {job} ended",
                    text="Its caller was told that the operator ended it.",
                    deed=Deed("request.cancel", f"request:{job}", {"model": dispatcher.model.name}),
                )
        raise _not_found("That request is over already.", "unknown_request")

    async def _check(self, fields: Fields, _: Actor) -> Result:
        try:
            kind, use = self._wanted(fields)
            self._parts.registry.validate(kind, use.use, use.with_)
        except PolicyConfigError as error:
            return _mistaken(error.mistakes)
        return Result("No mistakes", text=f"{kind}: {use.use} can be swapped in. Nothing was changed.")

    async def _swap(self, fields: Fields, _: Actor) -> Result:
        try:
            kind, use = self._wanted(fields)
            before = _told(kind, self._parts.runtime.current.uses[kind])
            current = await self._parts.runtime.swap({kind: use})
        except PolicyConfigError as error:
            return _mistaken(error.mistakes)
        except ApiError:
            raise
        except Exception as error:
            raise _failed(error) from error
        return Result(
            f"{kind} is now {use.use}",
            text="Every queued request was kept. The next read of the configuration file puts back what it says.",
            facts=(("Generation", str(current.generation)),),
            deed=Deed("policies.swap", "policies", _told(kind, use), before),
        )

    async def _shadow(self, fields: Fields, _: Actor) -> Result:
        seconds = _seconds(fields.get("seconds", ""))
        try:
            kind, use = self._wanted(fields)
            if kind != "scheduling":
                raise bad_request("Only a scheduling policy can be tried in the shadow.", "kind")
            await self._parts.runtime.try_in_shadow(use, seconds)
        except PolicyConfigError as error:
            return _mistaken(error.mistakes)
        except ApiError:
            raise
        except Exception as error:
            raise _failed(error) from error
        return Result(
            f"{use.use} watches every queue",
            text=f"It decides nothing for {seconds:g} seconds, then takes over. See below what it would have done.",
            deed=Deed("policies.shadow", "policies", {**_told(kind, use), "shadow_s": seconds}),
        )

    async def _end_shadow(self, _: Fields, __: Actor) -> Result:
        trial = self._parts.runtime.trial
        if trial is None or not trial.running:
            raise ApiError(409, "No shadow run is under way.", type="invalid_request_error", code="no_shadow")
        await self._parts.runtime.end_trial("the operator ended it")
        return Result(
            f"{trial.use.use} watches no more",
            text="The policies in force stay as they are.",
            deed=Deed("policies.shadow", "policies", {"shadow_s": 0}),
        )

    async def _reload(self, _: Fields, who: Actor) -> Result:
        try:
            done = await self._gateway.reload(who)
        except ConfigErrors as error:
            return _mistaken([("", line) for line in str(error).splitlines()])
        except PolicyConfigError as error:
            return _mistaken(error.mistakes)
        except Exception as error:
            raise _failed(error) from error
        generation = self._parts.runtime.current.generation
        return Result(
            "The configuration file was read again",
            facts=(
                ("Generation", str(generation)),
                ("In force now", ", ".join(done.changed) or "as before"),
                ("After a restart", ", ".join(done.needs_restart) or "nothing more"),
            ),
        )

    def _wanted(self, fields: Fields) -> tuple[Kind, PolicyUse]:
        """The form's policy, with the live secrets where it has masks. Raises ApiError 400, PolicyConfigError."""
        kind = fields.get("kind", "")
        if kind not in KINDS:
            raise bad_request(f"Choose one of {', '.join(KINDS)}.", "kind")
        source = yaml_source.read(fields.get("with", ""))
        if source.mistakes:
            raise PolicyConfigError("not valid YAML", mistakes=[("with", str(mistake)) for mistake in source.mistakes])
        settings = {} if source.data is None else source.data
        if not isinstance(settings, dict):
            raise PolicyConfigError("settings must be a mapping", mistakes=[("with", "must be a mapping, e.g. {}")])
        use = PolicyUse.model_validate({"use": fields.get("use", ""), "with": settings})
        return kind, policy_view.restored(kind, use, self._parts.runtime.current)


def _told(kind: Kind, use: PolicyUse) -> dict[str, Any]:
    """A policy as the admin API has it, without its secrets."""
    return {kind: {"use": use.use, "with": policy_view.without_secrets(use.with_)}}


def _seconds(text: str) -> float:
    """How long a candidate watches. Raises ApiError 400."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= MAX_SHADOW_S:
        raise bad_request(f"Say for how many seconds it watches: 1 to {MAX_SHADOW_S:.0f}.", "seconds")
    return seconds


def _mistaken(mistakes: Any) -> Result:
    return Result("Nothing was changed", ok=False, mistakes=tuple(mistakes), status=422)


def _not_found(message: str, code: str) -> ApiError:
    return ApiError(404, message, type="invalid_request_error", code=code)


def _failed(error: Exception) -> ApiError:
    """The operator's own plugin or file failed: the reason is for them."""
    return ApiError(
        409, f"Nothing was changed: {type(error).__name__}: {error}", type="invalid_request_error", code="swap_failed"
    )
