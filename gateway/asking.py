"""The message that runs a request at one worker: token ids for an engine, the API's own words for an upstream.

Rules
- What an upstream is asked is built from what ``http/schemas.py`` read and checked: a field that is not listed here
  does not get out, and neither does any header, nor who the caller is.
- Limits are those the gateway settled on (``Generate.max_tokens``), not what the caller wrote.
- Values at the API's default are left out: not every server knows every field. The temperature always goes along,
  since servers disagree about its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace as with_fields

from gateway.errors import bad_request
from gateway.http.embeddings import EmbeddingsRequest
from gateway.http.schemas import ChatRequest, CompletionRequest, Message, Request
from workers.protocol import Ask, Generate, SamplingParams

if TYPE_CHECKING:
    from gateway.intake import Prepared
    from gateway.worker_handle import WorkerHandle

_DEFAULTS = SamplingParams()
_PLAIN = (
    *("top_p", "top_k", "min_p", "typical_p", "seed", "ignore_eos", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Parameters that have the API's name and value."""


def message_for(handle: WorkerHandle, prepared: Prepared, trace: Mapping[str, str]) -> Generate:
    """The request as ``handle``'s worker takes it, with the trace's context."""
    generate = with_fields(prepared.generate, trace=dict(trace))
    if handle.hello is None or not handle.hello.upstream:
        return generate
    return with_fields(generate, ask=asked(prepared))


def unaskable(request: Request) -> str | None:
    """The field of what no upstream can be asked: it has no name there, or would be counted in other tokens."""
    if request.params.prompt_logprobs:
        return "echo"
    return None if request.beams is None else "use_beam_search"


def refuse_unaskable(request: Request, model: str) -> None:
    """For a model that only upstreams run. Raises ApiError 400."""
    param = unaskable(request)
    if isinstance(request, CompletionRequest) and request.echo and not isinstance(request.prompt, str):
        raise bad_request(
            f"echo of token ids is not there for the model {model[:128]!r}: its tokenizer is not here, and ids have no "
            "text without it. Send the prompt as text.",
            param="echo",
            code="unsupported_parameter",
        )
    if param is not None:
        what = "echo with logprobs" if param == "echo" else param
        raise bad_request(
            f"{what} is not there for the model {model[:128]!r}: it runs on a server that cannot be asked for it. "
            "Leave it out.",
            param=param,
            code="unsupported_parameter",
        )


def asked(prepared: Prepared) -> Ask:
    """The request in the API's words."""
    request, generate = prepared.request, prepared.generate
    body: dict[str, Any] = {"max_tokens": generate.max_tokens, "temperature": generate.params.temperature}
    body |= {name: value for name in _PLAIN if (value := getattr(generate.params, name)) != getattr(_DEFAULTS, name)}
    if generate.n > 1:
        body["n"] = generate.n
    if request.stop:
        body["stop"] = list(request.stop)
    if request.bad_words:
        body["bad_words"] = list(request.bad_words)
    if generate.params.stop_token_ids:
        body["stop_token_ids"] = list(generate.params.stop_token_ids)
    if generate.params.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in generate.params.logit_bias.items()}
    if request.response_format is not None:
        body["response_format"] = dict(request.response_format.asked)
    chat = isinstance(request, ChatRequest)
    body |= _logprobs(generate.params.logprobs, chat=chat)
    if isinstance(request, ChatRequest):
        body["messages"] = [_message(message) for message in request.messages]
        if request.toolbox is not None:
            body |= request.toolbox.asked
        return Ask("chat", body)
    if isinstance(request, EmbeddingsRequest):
        return Ask("embeddings", _embeddings(request))
    prompt = request.prompt
    body["prompt"] = prompt if isinstance(prompt, str) else list(prompt)
    return Ask("completions", body)


def _message(message: Message) -> dict[str, Any]:
    asked: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        asked["tool_calls"] = [call.document for call in message.tool_calls]
    if message.tool_call_id is not None:
        asked["tool_call_id"] = message.tool_call_id
    return asked


def _embeddings(request: EmbeddingsRequest) -> dict[str, Any]:
    body: dict[str, Any] = {"input": [one if isinstance(one, str) else list(one) for one in request.inputs]}
    if request.encoding_format != "float":
        body["encoding_format"] = request.encoding_format
    if request.dimensions is not None:
        body["dimensions"] = request.dimensions
    return body


def _logprobs(wanted: int | None, *, chat: bool) -> dict[str, Any]:
    if wanted is None:
        return {}
    return {"logprobs": True, "top_logprobs": wanted} if chat else {"logprobs": wanted}
