"""``/v1/embeddings``: its body. Whether a model makes embeddings is its pools' business.

Rules
- One request may hold many inputs: texts, or lists of token ids. An empty one is a mistake.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from gateway.errors import bad_request
from gateway.http import common
from gateway.http.jsonfields import Field, between, checked, read, split
from gateway.http.jsonfields import field as spec

if TYPE_CHECKING:
    from gateway.models import ModelHandle

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


@dataclass(frozen=True, slots=True)
class EmbeddingsRequest:
    """Body of ``/v1/embeddings``."""

    model: str
    inputs: tuple[str | tuple[int, ...], ...]
    encoding_format: str = "float"
    dimensions: int | None = None

    @property
    def chars(self) -> int:
        """What it costs, in characters."""
        return sum(map(len, self.inputs))


def parse_embeddings(raw: bytes) -> EmbeddingsRequest:
    """Parse and check a body. Raises ApiError 400 with ``param``."""
    fields = split(raw)
    model = common.read_model(fields)
    value = read(fields, "input", _INPUT, None)
    if value is None:
        raise bad_request("input is missing; send a string, a list of strings, or token ids.", param="input")
    read(fields, "user", FIELDS["user"], None)
    return EmbeddingsRequest(
        model,
        _inputs(value),
        read(fields, "encoding_format", _FORMAT, "float"),
        read(fields, "dimensions", _DIMENSIONS, None),
    )


def embed(request: EmbeddingsRequest, model: ModelHandle) -> bytes:
    """Raises ApiError 400: the models that run here generate text only."""
    raise bad_request(
        f"The model {model.name[:128]!r} makes no embeddings.", param="model", code="embeddings_not_supported"
    )


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
