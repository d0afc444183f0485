"""Beam search as vLLM's API names it: ``use_beam_search: true``, ``n`` answers, ``best_of`` beams (default ``n``),
``length_penalty``, ``early_stopping``.

A search looks at the model's own probabilities and knows its answers at the end only. So a stream, and every field that
would bend the probabilities, end a line early or look into it, is refused beside it, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.errors import bad_request
from gateway.http.jsonfields import Field, between, checked, read, read_any
from gateway.http.jsonfields import field as spec
from gateway.http.unsupported import Unsupported
from workers.protocol import Beams

MAX_WIDTH = 16

_ON = spec(bool)
_WIDTH: Field[int | None] = spec(int, between(1, MAX_WIDTH))
_PENALTY = spec(float, between(-10, 10))


def _early(value: bool | str) -> str | None:
    return None if isinstance(value, bool) or value == "never" else "must be true, false or 'never'"


_EARLY = spec(bool | str, checked(_early, {"anyOf": [{"type": "boolean"}, {"enum": ["never"]}]}))

FIELDS: Mapping[str, Field[Any]] = {
    "use_beam_search": _ON,
    "best_of": _WIDTH,
    "length_penalty": _PENALTY,
    "early_stopping": _EARLY,
}
"""Every field that is read; the OpenAPI document is made of them."""

_WITHOUT: Mapping[str, Unsupported] = {
    "length_penalty": Unsupported("it belongs to beam search (use_beam_search: true)", (1, 1.0)),
    "early_stopping": Unsupported("it belongs to beam search (use_beam_search: true)", (False,)),
}
_PROBABILITIES = "beam search follows the model's own probabilities"
_WHOLE = "beam search knows its answers only at the end"
_BESIDE: Mapping[str, Unsupported] = {
    "stream": Unsupported(_WHOLE, (False,)),
    "stop": Unsupported("beam search ends lines at the model's end tokens only; cut the answers yourself", ([], "")),
    "logprobs": Unsupported(_WHOLE, (False,)),
    "temperature": Unsupported(_PROBABILITIES, (0, 0.0, 1, 1.0)),
    "top_p": Unsupported(_PROBABILITIES, (1, 1.0)),
    "top_k": Unsupported(_PROBABILITIES, (0, -1)),
    "min_p": Unsupported(_PROBABILITIES, (0, 0.0)),
    "presence_penalty": Unsupported(_PROBABILITIES, (0, 0.0)),
    "frequency_penalty": Unsupported(_PROBABILITIES, (0, 0.0)),
    "repetition_penalty": Unsupported(_PROBABILITIES, (1, 1.0)),
    "typical_p": Unsupported(_PROBABILITIES, (1, 1.0)),
    "bad_words": Unsupported(_PROBABILITIES, ([],)),
    "stop_token_ids": Unsupported("beam search ends lines at the model's own end tokens only", ([],)),
    "logit_bias": Unsupported(_PROBABILITIES, ({},)),
    "min_tokens": Unsupported("beam search weighs lengths by 'length_penalty'", (0,)),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "regex", "grammar", "ebnf"),
        Unsupported("no grammar guides beam search", ("",)),
    ),
    "response_format": Unsupported("no grammar guides beam search", ({"type": "text"}, {})),
    "structured_outputs": Unsupported("no grammar guides beam search", ({},)),
    "tools": Unsupported("beam search calls no tools", ([],)),
}


def beams(fields: Mapping[str, msgspec.Raw], n: int) -> Beams | None:
    """The search that a request asks for with its ``n`` answers, or None. Raises ApiError 400 with ``param``."""
    on = read(fields, "use_beam_search", _ON, False)
    for name, known in (_BESIDE if on else _WITHOUT).items():
        if name in fields and not known.accepts(read_any(fields, name)):
            beside = f"{name} cannot be combined with use_beam_search" if on else f"{name} is not supported"
            raise bad_request(f"{beside}: {known.why}.", param=name, code="unsupported_parameter")
    if not on:
        return None
    width = read(fields, "best_of", _WIDTH, None)
    if width is not None and width < n:
        raise bad_request(f"best_of ({width}) is below n ({n}); search with at least n beams.", param="best_of")
    early: Any = read(fields, "early_stopping", _EARLY, False)
    return Beams(width or n, read(fields, "length_penalty", _PENALTY, 1.0), early)
