"""The fields that chats, completions and responses have in common: one table, for the parser and the OpenAPI document.

Rules
- null means "not given". Every refusal is a 400 with ``param``.
- What is read here is documented by ``Field.schema()``; a test holds the tables against what the parsers read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.errors import bad_request
from gateway.http import unsupported
from gateway.http.jsonfields import Field, between, checked, read, read_any, scrap
from gateway.http.jsonfields import field as spec
from workers.protocol import SamplingParams

MAX_N = 16
MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_LOGIT_BIAS = 1024
MAX_STOP_IDS = 64
MAX_BAD_WORDS = 64
MAX_WORD_CHARS = 128
MAX_TOKENS = 2**31 - 1


def _stops(value: str | list[str]) -> str | None:
    stops = [value] if isinstance(value, str) else value
    if len(stops) > MAX_STOPS:
        return f"takes at most {MAX_STOPS} strings, got {len(stops)}"
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            return (
                f"strings must have 1 to {MAX_STOP_CHARS} characters, got one of {len(stop)}; leave 'stop' out for none"
            )
    return None


def _logit_bias(value: dict[str, float]) -> str | None:
    if len(value) > MAX_LOGIT_BIAS:
        return f"takes at most {MAX_LOGIT_BIAS} entries, got {len(value)}"
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit() and len(token) <= 10):
            return f"keys must be token ids (whole numbers from 0), got {scrap(token)}"
        if not -100 <= bias <= 100:
            return f"values must be between -100 and 100, got {bias} for token {int(token)}"
    return None


def _metadata(value: dict[str, str]) -> str | None:
    if len(value) > 16:
        return f"takes at most 16 entries, got {len(value)}"
    if any(len(key) > 64 or len(entry) > 512 for key, entry in value.items()):
        return "keys may have at most 64 and values at most 512 characters"
    return None


def _model(value: str) -> str | None:
    return None if 1 <= len(value) <= 256 else f"must have 1 to 256 characters, got {len(value)}"


def _stop_ids(value: list[int]) -> str | None:
    if len(value) > MAX_STOP_IDS:
        return f"takes at most {MAX_STOP_IDS} token ids, got {len(value)}"
    wrong = next((token for token in value if not 0 <= token < 2**31), None)
    return None if wrong is None else f"holds {str(wrong)[:24]}, which is no token id"


def _bad_words(value: list[str]) -> str | None:
    if len(value) > MAX_BAD_WORDS:
        return f"takes at most {MAX_BAD_WORDS} words, got {len(value)}"
    for word in value:
        if not 1 <= len(word) <= MAX_WORD_CHARS:
            return f"words must have 1 to {MAX_WORD_CHARS} characters, got one of {len(word)}"
    return None


class StreamOptions(msgspec.Struct):
    """``stream_options``."""

    include_usage: bool | None = None


_STOP_SCHEMA = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}

MODEL = spec(str, checked(_model, {"minLength": 1, "maxLength": 256}), "A name that GET /v1/models lists.")
COUNT = spec(int, between(1, MAX_TOKENS), "Most output tokens per choice.")
COUNT_OR_NONE = spec(
    int, between(0, MAX_TOKENS), "Most output tokens per choice; 0 with echo: the prompt alone is told."
)
STREAM_OPTIONS = spec(StreamOptions)

SAMPLING: Mapping[str, Field[Any]] = {
    "temperature": spec(float, between(0, 2)),
    "top_p": spec(
        float,
        checked(
            lambda value: None if 0 < value <= 1 else f"must be above 0 and at most 1, got {value}",
            {"exclusiveMinimum": 0, "maximum": 1},
        ),
    ),
    "top_k": spec(int, between(-1, 2**31 - 1, "0 or -1 = off")),
    "min_p": spec(float, between(0, 1)),
    "seed": spec(int, between(-(2**63), 2**63 - 1)),
    "presence_penalty": spec(float, between(-2, 2)),
    "frequency_penalty": spec(float, between(-2, 2)),
    "repetition_penalty": spec(
        float,
        checked(
            lambda value: None if 0 < value <= 10 else f"must be above 0 and at most 10 (1 = off), got {value}",
            {"exclusiveMinimum": 0, "maximum": 10},
        ),
    ),
    "typical_p": spec(
        float,
        checked(
            lambda value: None if 0 < value <= 1 else f"must be above 0 and at most 1, got {value}",
            {"exclusiveMinimum": 0, "maximum": 1},
        ),
    ),
    "ignore_eos": spec(bool),
    "min_tokens": spec(int, between(0, MAX_TOKENS)),
}
"""Fields whose values go to the sampler under their own names."""

LABELS: Mapping[str, tuple[Field[Any], Any]] = {
    "stream": (spec(bool), False),
    "user": (
        spec(
            str,
            checked(lambda value: None if len(value) <= 512 else "may have at most 512 characters", {"maxLength": 512}),
            "A label of the caller's; no identity.",
        ),
        None,
    ),
    "metadata": (
        spec(
            dict[str, str],
            checked(
                _metadata,
                {
                    "maxProperties": 16,
                    "propertyNames": {"maxLength": 64},
                    "additionalProperties": {"type": "string", "maxLength": 512},
                },
            ),
        ),
        {},
    ),
}
N = spec(int, between(1, MAX_N, "send several requests for more"))
STOP = spec(
    str | list[str],
    checked(_stops, {"anyOf": [_STOP_SCHEMA, {"type": "array", "maxItems": MAX_STOPS, "items": _STOP_SCHEMA}]}),
)
LOGIT_BIAS = spec(
    dict[str, float],
    checked(
        _logit_bias,
        {
            "maxProperties": MAX_LOGIT_BIAS,
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        },
    ),
    "Token id → what is added to its logit.",
)

STOP_IDS = spec(
    list[int],
    checked(_stop_ids, {"maxItems": MAX_STOP_IDS, "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}}),
    "Tokens that end the output besides the model's own.",
)
BAD_WORDS = spec(
    list[str],
    checked(
        _bad_words,
        {
            "maxItems": MAX_BAD_WORDS,
            "items": {"type": "string", "minLength": 1, "maxLength": MAX_WORD_CHARS},
        },
    ),
    "Words that the output never completes, at its beginning or behind a space.",
)

FIELDS: Mapping[str, Field[Any]] = {
    "model": MODEL,
    **SAMPLING,
    **{name: how for name, (how, _) in LABELS.items()},
    "stop": STOP,
    "logit_bias": LOGIT_BIAS,
    "stop_token_ids": STOP_IDS,
    "bad_words": BAD_WORDS,
}
"""Everything that ``read_common`` reads."""


def refuse_unsupported(fields: Mapping[str, msgspec.Raw], table: Mapping[str, unsupported.Unsupported]) -> None:
    """Raise ApiError 400 for a field of ``table`` that asks for something."""
    for name in fields:
        if name in table and not table[name].accepts(read_any(fields, name)):
            raise bad_request(f"{name} is not supported: {table[name].why}.", param=name, code="unsupported_parameter")


def read_model(fields: Mapping[str, msgspec.Raw]) -> str:
    """The model's name. Raises ApiError 400."""
    model: str = read(fields, "model", MODEL, "")
    if not model:
        raise bad_request("model is missing. GET /v1/models lists the names.", param="model")
    return model


def read_common(fields: Mapping[str, msgspec.Raw], extra_params: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of ``schemas.Request`` that all bodies share. Raises ApiError 400.

    ``extra_params``: attributes of ``SamplingParams`` that the endpoint reads itself.
    """
    model = read_model(fields)
    params = {name: value for name, how in SAMPLING.items() if (value := read(fields, name, how, None)) is not None}
    params["top_k"] = max(0, params.get("top_k", 0))
    bias = read(fields, "logit_bias", LOGIT_BIAS, {})
    params["logit_bias"] = {int(token): value for token, value in bias.items()}
    params["stop_token_ids"] = tuple(dict.fromkeys(read(fields, "stop_token_ids", STOP_IDS, [])))
    stop = read(fields, "stop", STOP, [])
    return {name: read(fields, name, how, default) for name, (how, default) in LABELS.items()} | {
        "model": model,
        "params": SamplingParams(**params, **extra_params),
        "stop": (stop,) if isinstance(stop, str) else tuple(dict.fromkeys(stop)),
        "bad_words": tuple(dict.fromkeys(read(fields, "bad_words", BAD_WORDS, []))),
    }
