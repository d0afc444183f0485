"""``/v1/embeddings``: its body and its answer. Workers that are upstreams make them, if they say that they do.

Rules
- One request may hold many inputs: texts, or lists of token ids. An empty one is a mistake.
- It is queued, charged and limited as a prompt of all its inputs together, without output. The vectors pass through as
  the upstream wrote them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import msgspec

from gateway.errors import bad_request
from gateway.http import common
from gateway.http.jsonfields import Field, between, checked, read, split
from gateway.http.jsonfields import field as spec
from gateway.http.openai import Answer, Format, Json
from gateway.http.schemas import CompletionRequest, EndpointName
from policies.types import Usage

MAX_INPUTS = 2048

_INPUT: Field[Any] = spec(
    str | list[int | str | list[int]],
    checked(
        lambda value: (
            None if 1 <= len(value) <= MAX_INPUTS or isinstance(value, str) else f"takes 1 to {MAX_INPUTS} inputs"
        ),
        {},
    ),
    "A text, several texts, or token ids.",
)
_FORMAT: Field[Any] = spec(Literal["float", "base64"])
_DIMENSIONS: Field[int | None] = spec(int, between(1, 2**20))

FIELDS: Mapping[str, Field[Any]] = {
    "model": common.MODEL,
    "input": _INPUT,
    "encoding_format": _FORMAT,
    "dimensions": _DIMENSIONS,
    "user": common.FIELDS["user"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingsRequest(CompletionRequest):
    """Body of ``/v1/embeddings``; its ``prompt`` is all inputs together, for whoever counts or keys them."""

    content_param: ClassVar[str] = "input"
    endpoint: ClassVar[EndpointName] = "embeddings"
    inputs: tuple[str | tuple[int, ...], ...]
    encoding_format: str = "float"
    dimensions: int | None = None


def parse_embeddings(raw: bytes) -> EmbeddingsRequest:
    """Parse and check a body. Raises ApiError 400 with ``param``."""
    fields = split(raw)
    model = common.read_model(fields)
    value = read(fields, "input", _INPUT, None)
    if value is None:
        raise bad_request("input is missing; send a string, a list of strings, or token ids.", param="input")
    read(fields, "user", FIELDS["user"], None)
    inputs = _inputs(value)
    return EmbeddingsRequest(
        model=model,
        inputs=inputs,
        prompt=_together(inputs),
        max_tokens=1,
        encoding_format=read(fields, "encoding_format", _FORMAT, "float"),
        dimensions=read(fields, "dimensions", _DIMENSIONS, None),
    )


class EmbeddingsFormat(Format):
    """The answer: the upstream's own vectors, under the name that the caller asked for."""

    prefix = "embd"
    object = "list"
    chunk_object = "list"

    def full(self, answers: Sequence[Answer], usage: Usage) -> Json:
        """The whole answer."""
        prompt = usage.prompt + usage.cached
        return {
            "object": self.object,
            "data": msgspec.Raw(answers[0].text.encode()),
            "model": self._base["model"],
            "usage": {"prompt_tokens": prompt, "total_tokens": prompt},
        }


def _together(inputs: tuple[str | tuple[int, ...], ...]) -> str | tuple[int, ...]:
    texts = [one for one in inputs if isinstance(one, str)]
    return "\n".join(texts) if texts else tuple(token for one in inputs if not isinstance(one, str) for token in one)


def _inputs(value: str | list[int | str | list[int]]) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, str):
        value = [value]
    elif isinstance(value[0], int):
        value = (
            [[token for token in value if isinstance(token, int)]] if all(isinstance(t, int) for t in value) else value
        )
    for i, one in enumerate(value):
        if isinstance(one, int):
            raise bad_request(f"input[{i}] is a token id among texts; send one kind.", param=f"input[{i}]")
        if not one:
            raise bad_request(f"input[{i}] is empty; leave it out.", param=f"input[{i}]")
    return tuple(one if isinstance(one, str) else tuple(one) for one in value if not isinstance(one, int))
