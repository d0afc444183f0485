"""JSON bodies of the admin API as checked models: every refusal is a 400 that names the field."""

from __future__ import annotations

import contextlib
import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from gateway.errors import bad_request
from policies.wording import complaint

M = TypeVar("M", bound=BaseModel)


async def json_object(request: Request, example: str) -> dict[str, Any]:
    """The body as an object; an empty body is an empty one. Raises ApiError 400 that shows ``example``."""
    raw = await request.body()
    if not raw:
        return {}
    with contextlib.suppress(ValueError, RecursionError):
        body = json.loads(raw, parse_constant=_no_constant)
        json.dumps(body, ensure_ascii=False).encode()  # half a character could not be stored, nor told
        if isinstance(body, dict):
            return body
    raise bad_request(f"Send a JSON object, e.g. {example}.")


def checked(model: type[M], body: dict[str, Any]) -> M:
    """``body`` as ``model``. Raises ApiError 400 with ``param``."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        detail = error.errors(include_url=False, include_input=False)[0]
        path = ".".join(map(str, detail["loc"]))
        text = complaint(detail, model)
        raise bad_request(f"{path}: {text}." if path else f"{text}.", param=path[:128] or None) from None


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")
