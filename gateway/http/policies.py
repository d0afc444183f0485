"""``/admin/policies``: what is in force, swaps, shadow runs, reloads.

- ``{"scheduling": {"use": "vtc", "with": {}}, …}`` swaps these kinds together.
- ``{"scheduling": {…}, "shadow_s": 60}`` has the candidate watch first (202); ``{"shadow_s": 0}`` ends that.
- ``{"reload": true}`` reads the configuration file again.

Rules
- A refusal has changed nothing. A policy's secrets are shown as a mask; a mask that comes back means the live value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.config_file import ConfigErrors
from gateway.errors import ApiError, bad_request
from gateway.http.bodies import json_object
from gateway.http.trail import actor, note
from gateway.policy_view import restored, without_secrets
from gateway.settings import PolicyUse
from policies.spi import KINDS, Kind, PolicyConfigError
from policies.wording import complaint

if TYPE_CHECKING:
    from gateway.service import Gateway

MAX_SHADOW_S = 86_400.0


class PoliciesApi:
    """The handlers."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._runtime = gateway.parts.runtime

    async def show(self, _: Request) -> Response:
        """What is in force, what fell back, and the last shadow run."""
        return JSONResponse(self._state())

    async def change(self, request: Request) -> Response:
        """Swap, begin or end a shadow run, or reload. Raises ApiError 400, 409."""
        body = await json_object(request, '{"scheduling": {"use": "fcfs"}}')
        try:
            if body == {"reload": True}:
                done = await self._gateway.reload(actor(request))
                return JSONResponse({**self._state(), "reload": done.as_json()})
            if "shadow_s" in body:
                answer = await self._shadow(body)
                await note(self._gateway, request, "policies.shadow", "policies", after=_masked(body))
                return answer
            before = {kind: use for kind, use in self._state()["policies"].items() if kind in body}
            await self._runtime.swap(self._uses(body))
            await note(self._gateway, request, "policies.swap", "policies", before=before, after=_masked(body))
        except (PolicyConfigError, ConfigErrors) as error:
            raise bad_request(f"Nothing was changed. {error}", code="invalid_policy") from error
        except ApiError:
            raise
        except Exception as error:
            # The operator's own plugin or file: the reason is for them. Its class and text are all there is.
            raise _conflict(f"Nothing was changed: {type(error).__name__}: {error}", "swap_failed") from error
        return JSONResponse(self._state())

    async def _shadow(self, body: Mapping[str, Any]) -> Response:
        seconds, rest = body["shadow_s"], {kind: use for kind, use in body.items() if kind != "shadow_s"}
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= MAX_SHADOW_S:
            raise bad_request(f"shadow_s must be seconds, 0 to {MAX_SHADOW_S:.0f}.", param="shadow_s")
        if not seconds and not rest:
            trial = self._runtime.trial
            if trial is None or not trial.running:
                raise _conflict("No shadow run is under way.", "no_shadow")
            await self._runtime.end_trial("the operator ended it")
            return JSONResponse(self._state())
        if not seconds or set(rest) != {"scheduling"}:
            raise bad_request(
                'shadow_s goes with the scheduling policy alone: {"scheduling": {…}, "shadow_s": 60}. '
                'Without one, {"shadow_s": 0} ends a shadow run.',
                param="shadow_s",
            )
        await self._runtime.try_in_shadow(self._uses(rest)["scheduling"], float(seconds))
        return JSONResponse(self._state(), 202)

    def _uses(self, body: Mapping[str, Any]) -> dict[Kind, PolicyUse]:
        """The policies block of a request. Raises ApiError 400, PolicyConfigError."""
        return {kind: restored(kind, use, self._runtime.current) for kind, use in _uses(body).items()}

    def _state(self) -> dict[str, Any]:
        current, trial = self._runtime.current, self._runtime.trial
        return {
            "generation": current.generation,
            "policies": {kind: _shown(use) for kind, use in current.uses.items()},
            "fallbacks": {model: asdict(fallback) for model, fallback in current.fallbacks.items()},
            "shadow": None if trial is None else {**_shown(trial.use), **trial.as_json()},
        }


def _shown(use: PolicyUse) -> dict[str, Any]:
    return {"use": use.use, "with": without_secrets(use.with_)}


def _masked(body: Mapping[str, Any]) -> dict[str, Any]:
    masked: dict[str, Any] = without_secrets(body)
    return masked


def _conflict(message: str, code: str) -> ApiError:
    return ApiError(409, message, type="invalid_request_error", code=code)


def _uses(body: Mapping[str, Any]) -> dict[Kind, PolicyUse]:
    if not body:
        raise bad_request(f"Name at least one kind: {', '.join(KINDS)}.")
    uses: dict[Kind, PolicyUse] = {}
    for kind, use in body.items():
        if kind not in KINDS:
            raise bad_request(f"{kind[:64]!r} is no kind of policy; kinds are {', '.join(KINDS)}.", param=kind[:64])
        try:
            uses[kind] = PolicyUse.model_validate(use)
        except ValidationError as error:
            detail = error.errors(include_url=False)[0]
            path = ".".join(map(str, (kind, *detail["loc"])))
            raise bad_request(f"{path}: {complaint(detail, PolicyUse)}.", param=path) from None
    return uses
