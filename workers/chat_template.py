"""A model's chat template, rendered so that message contents can never turn into control tokens. No torch.

The template runs over *stand-ins* instead of contents: strings whose characters are a marker with a random nonce, and
whose methods (``strip``, ``split``, ``startswith``, ``in``, ``length`` …) answer for the real text and yield new
stand-ins. The result is split at the markers into segments: what the template wrote, and what callers wrote. The
tokenizer encodes the first with control tokens allowed and the second without.

Rules
- What a caller wrote never enters the rendered string, so it cannot forge a marker either.
- Only what names a kind (``role``, ``type``) and plain keys is passed as it is; both are checked.
- A non-empty content that the template drops, repeats or cuts in an unknown way is an error (ChatTemplateError), never
  a silently different prompt.
- The environment is the one of Hugging Face ``apply_chat_template``: jinja2's immutable sandbox, ``trim_blocks``,
  ``lstrip_blocks``, loop controls, ``tojson``, ``raise_exception``, ``strftime_now``.
- Templates come with the model (the operator's choice), never from a caller.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn, SupportsIndex

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_OPEN, _CLOSE = "\U000f0110", "\U000f0111"
_DIGITS = str.maketrans("0123456789", "".join(chr(0xF0100 + digit) for digit in range(10)))
_VALUES = {after: before for before, after in _DIGITS.items()}
_OURS = re.compile("[\U000f0000-\U000f0111]")
"""Markers consist of these private-use characters alone, so that no part of one can pass for text."""
_KIND = re.compile(r"[A-Za-z_]{1,32}")
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_KINDS = frozenset({"role", "type"})


class ChatTemplateError(ValueError):
    """The messages cannot be put into the model's template. The text is fit for a caller; it quotes no content."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a prompt. ``markup`` is true for what the template wrote: there control tokens are meant."""

    text: str
    markup: bool


class _Ledger:
    """The stand-ins of one rendering."""

    def __init__(self) -> None:
        self._nonce = "".join(chr(0xF0000 + byte) for byte in secrets.token_bytes(16))
        self.texts: list[str] = []
        self.origins: list[int] = []
        self.marker = re.compile(f"{_OPEN}{self._nonce}([\U000f0100-\U000f0109]+){_CLOSE}")

    def stand_in(self, text: str, origin: int | None = None) -> StandIn:
        number = len(self.texts)
        self.texts.append(text)
        self.origins.append(number if origin is None else origin)
        return StandIn(f"{_OPEN}{self._nonce}{str(number).translate(_DIGITS)}{_CLOSE}", self, number)


class StandIn(str):
    """A string that is a marker in the output and the caller's text for every question a template asks of it."""

    __slots__ = ("_ledger", "_number")
    _ledger: _Ledger
    _number: int

    def __new__(cls, marker: str, ledger: _Ledger, number: int) -> StandIn:
        """``marker`` is what ends up in the rendered string."""
        self = super().__new__(cls, marker)
        self._ledger = ledger
        self._number = number
        return self

    @property
    def _text(self) -> str:
        return self._ledger.texts[self._number]

    def _derive(self, text: str) -> StandIn:
        return self._ledger.stand_in(text, self._ledger.origins[self._number])

    def __str__(self) -> str:
        return self  # filters say ``str(value).replace(…)``: the answer must still be a stand-in

    def __len__(self) -> int:
        return len(self._text)

    def __bool__(self) -> bool:
        return bool(self._text)

    def __eq__(self, other: object) -> bool:
        return self._text == (other._text if isinstance(other, StandIn) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._text)

    def __contains__(self, part: object) -> bool:
        return _real(part) in self._text

    def __iter__(self) -> Iterator[str]:
        return (self._derive(character) for character in self._text)

    def __getitem__(self, index: SupportsIndex | slice) -> StandIn:
        return self._derive(self._text[index])

    def startswith(self, *args: Any) -> bool:
        """As of ``str``."""
        return self._text.startswith(*map(_real, args))

    def endswith(self, *args: Any) -> bool:
        """As of ``str``."""
        return self._text.endswith(*map(_real, args))

    def find(self, *args: Any) -> int:
        """As of ``str``."""
        return self._text.find(*map(_real, args))

    def rfind(self, *args: Any) -> int:
        """As of ``str``."""
        return self._text.rfind(*map(_real, args))

    def count(self, *args: Any) -> int:
        """As of ``str``."""
        return self._text.count(*map(_real, args))

    def strip(self, *args: Any) -> StandIn:
        """As of ``str``."""
        return self._derive(self._text.strip(*args))

    def lstrip(self, *args: Any) -> StandIn:
        """As of ``str``."""
        return self._derive(self._text.lstrip(*args))

    def rstrip(self, *args: Any) -> StandIn:
        """As of ``str``."""
        return self._derive(self._text.rstrip(*args))

    def lower(self) -> StandIn:
        """As of ``str``."""
        return self._derive(self._text.lower())

    def upper(self) -> StandIn:
        """As of ``str``."""
        return self._derive(self._text.upper())

    def title(self) -> StandIn:
        """As of ``str``."""
        return self._derive(self._text.title())

    def capitalize(self) -> StandIn:
        """As of ``str``."""
        return self._derive(self._text.capitalize())

    def replace(self, *args: Any, **options: Any) -> StandIn:
        """As of ``str``."""
        return self._derive(self._text.replace(*map(_real, args), **options))

    def removeprefix(self, prefix: str) -> StandIn:
        """As of ``str``."""
        return self._derive(self._text.removeprefix(prefix))

    def removesuffix(self, suffix: str) -> StandIn:
        """As of ``str``."""
        return self._derive(self._text.removesuffix(suffix))

    def split(self, *args: Any, **options: Any) -> list[str]:
        """As of ``str``."""
        return [self._derive(part) for part in self._text.split(*map(_real, args), **options)]

    def rsplit(self, *args: Any, **options: Any) -> list[str]:
        """As of ``str``."""
        return [self._derive(part) for part in self._text.rsplit(*map(_real, args), **options)]

    def splitlines(self, keepends: bool = False) -> list[str]:
        """As of ``str``."""
        return [self._derive(part) for part in self._text.splitlines(keepends)]

    def partition(self, sep: str) -> tuple[str, str, str]:
        """As of ``str``."""
        head, middle, tail = self._text.partition(sep)
        return self._derive(head), self._derive(middle), self._derive(tail)


def _real(value: Any) -> Any:
    return value._text if isinstance(value, StandIn) else value


class _Generation(Extension):
    """``{% generation %} … {% endgeneration %}`` marks an assistant's part for training; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own type

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Replace the block by its body."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class ChatTemplate:
    """A compiled template. Immutable; may be used from several threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """``special_tokens``: ``bos_token`` and its kin, as the template may write them. Raises ValueError."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            autoescape=False,  # the output is a prompt, not HTML
        )
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
        environment.filters["tojson"] = _to_json
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = environment.from_string(source)
            named = meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template has a mistake in line {error.lineno}") from error
        self.tools_source = source if "tools" in named else ""
        """Its source, if it takes tools: it says in which form its model calls them."""

    def segments(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[Segment]:
        """The prompt in pieces. ``content`` is a string, None, or a list of ``{"type": "text", "text": …}`` parts.

        Raises ChatTemplateError.
        """
        ledger = _Ledger()
        shown = [_message(index, message, ledger) for index, message in enumerate(messages)]
        required = {
            message["content"]._number: index
            for index, message in enumerate(shown)
            if isinstance(message.get("content"), StandIn) and message["content"].strip()
        }
        try:
            rendered = self._template.render(
                messages=shown,
                tools=None if tools is None else [_cover(tool, ledger, f"tools.{i}") for i, tool in enumerate(tools)],
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except ChatTemplateError:
            raise
        except Exception as error:  # a template is a program; whatever it trips over is about these messages
            raise ChatTemplateError(
                "the model's chat template does not take these messages; check the order and kind of roles"
            ) from error
        return _split(rendered, ledger, required)


def _split(rendered: str, ledger: _Ledger, required: Mapping[int, int]) -> list[Segment]:
    segments: list[Segment] = []
    used: set[int] = set()
    position = 0
    for match in ledger.marker.finditer(rendered):
        number = _number(match)
        if number in used and ledger.origins[number] in required:
            raise ChatTemplateError("the model's chat template repeats a message's content, which is not supported")
        used.add(number)
        _add(segments, rendered[position : match.start()], markup=True)
        _add(segments, ledger.texts[number], markup=False)
        position = match.end()
    _add(segments, rendered[position:], markup=True)
    if any(segment.markup and _OURS.search(segment.text) for segment in segments):
        raise ChatTemplateError("the model's chat template changes a message's content in a way that is not supported")
    missing = required.keys() - {ledger.origins[number] for number in used}
    if missing:
        raise ChatTemplateError(
            f"the model's chat template drops messages[{required[min(missing)]}]; leave that message out"
        )
    return segments


def _number(match: re.Match[str]) -> int:
    return int(match[1].translate(_VALUES))


def _add(segments: list[Segment], text: str, *, markup: bool) -> None:
    if text:
        segments.append(Segment(text, markup))


def _message(index: int, message: Mapping[str, Any], ledger: _Ledger) -> dict[str, Any]:
    path = f"messages.{index}"
    role = message.get("role")
    if not isinstance(role, str) or not _KIND.fullmatch(role):
        raise ChatTemplateError(f"{path}.role must be a word such as system, user, assistant or tool")
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "".join(_part_text(part, f"{path}.content") for part in content)
    if content is not None and not isinstance(content, str):
        raise ChatTemplateError(f"{path}.content must be a string or a list of text parts")
    shown: dict[str, Any] = _cover({key: value for key, value in message.items() if key != "content"}, ledger, path)
    shown["content"] = None if content is None else ledger.stand_in(content)
    return shown


def _part_text(part: Any, path: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise ChatTemplateError(f'{path}: only parts of the form {{"type": "text", "text": …}} are supported')


def _cover(value: Any, ledger: _Ledger, path: str) -> Any:
    """``value`` with a stand-in for every string that a caller chose."""
    if isinstance(value, str):
        return ledger.stand_in(value)
    if isinstance(value, Mapping):
        covered: dict[str, Any] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise ChatTemplateError(f"{path}: keys must be strings")
            plain = _PLAIN_KEY.fullmatch(key) is not None
            keep = key in _KINDS and isinstance(item, str) and _KIND.fullmatch(item) is not None
            covered[key if plain else ledger.stand_in(key)] = item if keep else _cover(item, ledger, path)
        return covered
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_cover(item, ledger, path) for item in value]
    return value


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Hugging Face's ``tojson``: no HTML escapes. Stand-ins inside become stand-ins of their JSON-escaped text."""
    allowed = {key: options[key] for key in ("ensure_ascii", "separators", "sort_keys") if key in options}
    ledger = _find_ledger(value)
    if ledger is None:
        return json.dumps(value, indent=indent, **{"ensure_ascii": False, **allowed})
    text = json.dumps(value, indent=indent, **{**allowed, "ensure_ascii": False})

    def escape(match: re.Match[str]) -> str:
        number = _number(match)
        escaped = json.dumps(ledger.texts[number], ensure_ascii=bool(allowed.get("ensure_ascii", False)))[1:-1]
        return str(ledger.stand_in(escaped, ledger.origins[number]))

    return ledger.marker.sub(escape, text)


def _find_ledger(value: Any) -> _Ledger | None:
    if isinstance(value, StandIn):
        return value._ledger
    if isinstance(value, Mapping):
        parts: Sequence[Any] = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple):
        parts = value
    else:
        return None
    return next((ledger for part in parts if (ledger := _find_ledger(part)) is not None), None)


def _refuse(message: str) -> NoReturn:
    reason = re.sub(f"{_OURS.pattern}+", "…", "".join([message]))[:200]
    raise ChatTemplateError(f"the model's chat template refuses these messages: {reason}")
