"""Every key of the YAML as a dotted path: ``tenants[].limits.concurrent``, ``classes.*.priority``, with its default."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

REQUIRED = "required"


@dataclass(frozen=True)
class Key:
    """One key."""

    path: str
    default: str
    """As YAML would write it; ``required`` where there is none."""


def keys(model: type[BaseModel], prefix: str = "", holder: BaseModel | None = None) -> Iterator[Key]:
    """The leaves below ``model``. ``holder`` is the section's default instance, where its parent names one."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        nested = list(_sections(field.annotation))
        default = getattr(holder, name) if holder is not None else _default(field)
        for suffix, section in nested:
            yield from keys(section, f"{path}{suffix}.", default if isinstance(default, section) else None)
        if not nested:
            yield Key(path, default if default == REQUIRED else written(default))


def _sections(annotation: Any) -> Iterator[tuple[str, type[BaseModel]]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield "", annotation
        return
    origin = get_origin(annotation)
    suffix = {tuple: "[]", list: "[]", dict: ".*"}.get(origin, "") if isinstance(origin, type) else ""
    for argument in get_args(annotation):
        for inner, section in _sections(argument):
            yield suffix + inner, section


def _default(field: FieldInfo) -> Any:
    return REQUIRED if field.is_required() else field.get_default(call_default_factory=True, validated_data={})


def written(value: Any) -> str:
    """A default as the table writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, tuple | list):
        return "[" + ", ".join(f'"{item}"' if item == "*" else written(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{}" if not value else str(value)
    return str(value)
