"""How long a request may be: prompt and output against the model's context, the tenant's limits and the quota's.

An explicit ``max_tokens`` is kept or refused; an omitted one is what all limits allow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.errors import ApiError, bad_request
from gateway.tenants import EffectiveTenant

if TYPE_CHECKING:
    from gateway.intake import AnyRequest
    from gateway.served import ServedModel

MAX_CHARS_PER_TOKEN = 16
"""A text longer than this many characters per token of context is refused unread; real text has 1 to 6."""


@dataclass(frozen=True, slots=True)
class Context:
    """How long prompt + output may be, and who says so."""

    tokens: int
    whose: str

    @classmethod
    def of(cls, model: ServedModel, tenant: EffectiveTenant) -> Context:
        """The tighter of the model's and the tenant's."""
        limit = tenant.limits.max_context_tokens
        if limit is not None and limit < model.max_context:
            return cls(limit, "your tenant's limit")
        return cls(model.max_context, "the model's context")

    def refuse_text(self, chars: int, param: str) -> None:
        """Raises ApiError 400 for a text that cannot fit, whatever its tokens are."""
        most = self.tokens * MAX_CHARS_PER_TOKEN
        if chars > most:
            raise _too_long(
                f"{self.whose.capitalize()} is {self.tokens} tokens; a prompt of {chars} characters cannot fit "
                f"(at most {most} are read). Shorten it.",
                param,
            )

    def refuse(self, prompt: int, output: int, param: str) -> ApiError:
        """What to say of so many tokens."""
        return _too_long(
            f"{self.whose.capitalize()} is {self.tokens} tokens, but {prompt} in the prompt and {output} of output "
            f"make {prompt + output}. Shorten the prompt or ask for less output.",
            param,
        )


def _too_long(message: str, param: str) -> ApiError:
    return bad_request(message, param=param, code="context_length_exceeded")


def output_budget(
    request: AnyRequest,
    prompt: int,
    context: Context,
    tenant: EffectiveTenant,
    model: ServedModel,
    room: tuple[int, str] | None,
) -> tuple[int, str | None]:
    """Output tokens per choice, and the limit that made an omitted ``max_tokens`` smaller than the default.

    ``room``: what the quota's limits let pass at most, over all choices, and which of them that is; for an omitted one.
    """
    if prompt >= context.tokens:
        raise context.refuse(prompt, request.max_tokens or 1, request.content_param)
    most = tenant.limits.max_output_tokens
    lines = request.lines
    wanted = 1 if request.max_tokens is None else request.max_tokens
    if most is not None and lines * wanted > most:
        asked = f"{lines} x {wanted}" if lines > 1 else str(request.max_tokens)
        many = "n" if lines == request.n else "best_of"
        raise bad_request(
            f"{asked} output tokens are more than your tenant's limit of {most} per request (all choices together). "
            f"Lower {request.max_tokens_param} or {many}.",
            param=request.max_tokens_param if request.max_tokens else many,
            code="max_output_tokens_exceeded",
        )
    if request.max_tokens is not None:
        if prompt + request.max_tokens > context.tokens:
            raise context.refuse(prompt, request.max_tokens, request.max_tokens_param)
        return request.max_tokens, None
    allowed = {"context": context.tokens - prompt}
    if most is not None:
        allowed["max_output_tokens"] = most // lines
    if room is not None:
        # A prompt that leaves nothing is the quota policy's to refuse: it knows whether the limit is in force.
        allowed[room[1]] = max(1, room[0] // lines)
    limit = min(allowed, key=lambda name: allowed[name])
    if allowed[limit] < model.default_max_tokens:
        return allowed[limit], limit
    return model.default_max_tokens, None
