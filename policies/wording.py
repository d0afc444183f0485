"""What pydantic has against a configuration, in the words of the file that it is in. Used wherever one is refused.

Rules
- A message says what to write, not which Python type was wanted. The value itself is added by whoever knows whether it
  may be shown (``strict.quoted``).
- An unknown key is told with the keys that are there, at whatever depth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

_MAPPING = "write a mapping, e.g. {key: value}"
_LIST = "write a list, e.g. [a, b]"
_WORDS: Mapping[str, str] = {
    "missing": "is missing",
    "string_type": "write text",
    "int_type": "write a whole number",
    "int_from_float": "write a whole number",
    "float_type": "write a number",
    "finite_number": "write a finite number",
    "bool_type": "write true or false",
    "bool_parsing": "write true or false",
    "dict_type": _MAPPING,
    "model_type": _MAPPING,
    "tuple_type": _LIST,
    "list_type": _LIST,
    "too_short": "needs at least one entry",
    "decimal_type": "write a number",
    "decimal_parsing": "write a number",
}


def complaint(detail: Any, model: type[BaseModel]) -> str:
    """One of ``ValidationError.errors()`` of ``model``, in words."""
    if detail["type"] == "extra_forbidden":
        known = ", ".join(known_keys(detail["loc"][:-1], model))
        return f"there is no such key (known: {known})" if known else "there is no such key"
    return _WORDS.get(detail["type"]) or str(detail["msg"]).removeprefix("Value error, ")


def known_keys(path: Sequence[str | int], model: type[BaseModel]) -> list[str]:
    """The keys that the section at ``path`` of ``model`` takes."""
    schema = model.model_json_schema(by_alias=True)
    nodes = [schema]
    for step in path:
        inner = [_child(node, step) for node in nodes]
        nodes = [found for child in inner if child is not None for found in _resolved(child, schema)]
    return sorted({key for node in nodes for key in node.get("properties", {})})


def _child(node: dict[str, Any], step: str | int) -> dict[str, Any] | None:
    chosen = node.get("discriminator", {}).get("mapping", {}).get(step)
    if chosen is not None:
        return {"$ref": chosen}
    child = node.get("items") if isinstance(step, int) else node.get("properties", {}).get(step)
    child = node.get("additionalProperties") if child is None else child
    return child if isinstance(child, dict) else None


def _resolved(node: dict[str, Any], schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The schemas that ``node`` may stand for: references followed, alternatives side by side."""
    if "$ref" in node:
        return _resolved(schema["$defs"][node["$ref"].rsplit("/", 1)[1]], schema)
    alternatives = [found for option in node.get("anyOf", []) for found in _resolved(option, schema)]
    return alternatives or [node]
