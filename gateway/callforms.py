"""The forms in which models call tools: one per kind of chat template, in a registry.

Rules
- A model's form follows from its own template alone (``form_of``): the first of ``FORMS`` that fits. What none of them
  knows has its tools described in words, and calls as between tags.
- A form is the whole of it: how messages go into the template, which grammar an answer must match, how it is read back,
  how calls are named. So what one part writes, the others read.
- An attempt at an upstream has the tagged form, whatever its model's own is: its worker writes calls so
  (``Ticket.call_form``).
"""

from __future__ import annotations

import hashlib
import re
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from gateway import toolprompt
from gateway.grammars import Schema, bare_text, call_rules, literal, marked_text, repeated, tool_text
from gateway.jsoncalls import ARGS, BARE, CALL_ID, LISTED, LISTED_ID, MARK, TAG, ArgsCalls, BareCalls, ListedCalls
from gateway.toolbox import OPEN, Tool, Toolbox
from gateway.toolcalls import CallReader, TaggedCalls
from gateway.toolprompt import Messages

if TYPE_CHECKING:
    from gateway.http.schemas import Message

Control = Callable[[str], int | None]
"""The id of a control token that has no text in an answer; None where the model has no such token."""
Documents = list[Mapping[str, Any]]

_ALPHANUMERIC = string.digits + string.ascii_letters
_SHORT = re.compile(r"[A-Za-z0-9]{9}")


class CallForm(ABC):
    """How one kind of model calls tools."""

    marks: tuple[str, ...] = ()
    """Texts that are control tokens of such a model. Answers show them, so that calls can be read."""

    @abstractmethod
    def fits(self, template: str) -> bool:
        """Whether a template is of this kind; ``template`` is empty for one that takes no tools."""

    def laid_out(self, messages: Sequence[Message], tools: Sequence[Tool], template: str) -> tuple[Messages, Documents]:
        """Messages as the template takes them, and the tools that it gets beside them."""
        return toolprompt.as_they_are(messages), [tool.document for tool in tools]

    def grammar(self, box: Toolbox, otherwise: Schema | None, control: Control) -> str:
        """What an answer must match: a call, or what the request leaves open (``grammars.tool_text``)."""
        return tool_text(box, otherwise)

    def reader(self, box: Toolbox) -> CallReader:
        """Reads one choice."""
        return TaggedCalls()

    def call_id(self, answer: str, choice: int, index: int) -> str:
        """Names a call; the same for the same answer, however often it is shown."""
        return "call_" + _digest(answer, choice, index).hex()[:24]


class Tagged(CallForm):
    """Hermes, Qwen: JSON between ``<tool_call>`` tags."""

    def fits(self, template: str) -> bool:
        """As its base."""
        return OPEN in template


class Described(CallForm):
    """Any other: told in words."""

    def fits(self, template: str) -> bool:
        """As its base."""
        return True

    def laid_out(self, messages: Sequence[Message], tools: Sequence[Tool], template: str) -> tuple[Messages, Documents]:
        """As its base."""
        return toolprompt.described(messages, tools), []


class Bare(CallForm):
    """Llama 3: the answer is one call, as JSON with ``parameters``."""

    marks = (TAG,)

    def fits(self, template: str) -> bool:
        """As its base."""
        parts = ("<|start_header_id|>", "tool_calls", BARE[1].removeprefix('", '))
        return all(part in template for part in parts)

    def laid_out(self, messages: Sequence[Message], tools: Sequence[Tool], template: str) -> tuple[Messages, Documents]:
        """As its base."""
        return toolprompt.one_by_one(messages), [tool.document for tool in tools]

    def grammar(self, box: Toolbox, otherwise: Schema | None, control: Control) -> str:
        """As its base. One call at most: such a template knows no more."""
        rules = call_rules(box, lambda name: literal(name.join(BARE)), literal("}"))
        return bare_text(box, otherwise, rules, begins=BARE, token=control(TAG))

    def reader(self, box: Toolbox) -> CallReader:
        """As its base."""
        return BareCalls(tool.name for tool in box.callable)


class _Marked(CallForm):
    """Mistral: calls behind ``[TOOL_CALLS]``, named by nine letters and digits."""

    marks = (MARK, ARGS, CALL_ID)
    remarks = False
    """Whether such templates show text beside calls."""

    def laid_out(self, messages: Sequence[Message], tools: Sequence[Tool], template: str) -> tuple[Messages, Documents]:
        """As its base."""
        system = "[SYSTEM_PROMPT]" in template
        laid = toolprompt.short_named(messages, short_name, system=system, remarks=self.remarks)
        return laid, [tool.document for tool in tools]

    def call_id(self, answer: str, choice: int, index: int) -> str:
        """As its base."""
        return _nine(_digest(answer, choice, index))


class Listed(_Marked):
    """Mistral 7B v0.3 to Small 3.1: a list of all calls."""

    def fits(self, template: str) -> bool:
        """As its base."""
        return MARK in template

    def grammar(self, box: Toolbox, otherwise: Schema | None, control: Control) -> str:
        """As its base."""
        named = f"({literal(LISTED_ID)} /{_SHORT.pattern}/ {literal(chr(34))})?"
        rules = call_rules(box, lambda name: literal(name.join(LISTED)), f"{named} {literal('}')}")
        body = f'" "? "[" call{repeated(box, literal(", "))} "]"'
        return marked_text(box, otherwise, rules, mark=MARK, token=control(MARK), body=body)

    def reader(self, box: Toolbox) -> CallReader:
        """As its base."""
        return ListedCalls()


class WithArgs(_Marked):
    """Mistral since then: a mark for each call, then its name, ``[ARGS]`` and its arguments."""

    remarks = True

    def fits(self, template: str) -> bool:
        """As its base."""
        return MARK in template and ARGS in template

    def grammar(self, box: Toolbox, otherwise: Schema | None, control: Control) -> str:
        """As its base."""
        return self._grammar(box, otherwise, control, "")

    def reader(self, box: Toolbox) -> CallReader:
        """As its base."""
        return ArgsCalls()

    def _grammar(self, box: Toolbox, otherwise: Schema | None, control: Control, named: str) -> str:
        mark, args = (_term(text, control) for text in (MARK, ARGS))
        rules = call_rules(box, lambda name: f"{literal(name)} {named} {args}")
        return marked_text(box, otherwise, rules, mark=MARK, token=control(MARK), body=f"call{repeated(box, mark)}")


class WithIds(WithArgs):
    """Of these, the models that name their calls themselves."""

    remarks = False

    def fits(self, template: str) -> bool:
        """As its base."""
        return super().fits(template) and CALL_ID in template

    def grammar(self, box: Toolbox, otherwise: Schema | None, control: Control) -> str:
        """As its base."""
        return self._grammar(box, otherwise, control, f"{_term(CALL_ID, control)} /{_SHORT.pattern}/")


TAGGED = Tagged()
FORMS: tuple[CallForm, ...] = (TAGGED, WithIds(), WithArgs(), Listed(), Bare(), Described())
"""In this order: the more special first."""


@lru_cache(256)
def form_of(template: str) -> CallForm:
    """The form of a model with this template; empty for none, or one that takes no tools."""
    return next(form for form in FORMS if form.fits(template))


@dataclass(frozen=True, slots=True)
class Calls:
    """What the texts of one request's answers are read with."""

    box: Toolbox
    form: Callable[[], CallForm]
    """Of the attempt that answers: known when there is text of it."""

    def reader(self) -> CallReader:
        """Reads one choice."""
        return self.form().reader(self.box)

    def call_id(self, answer: str, choice: int, index: int) -> str:
        """Names a call."""
        return self.form().call_id(answer, choice, index)


def short_name(call_id: str) -> str:
    """Nine letters and digits for any name of a call, always the same; such a name is kept."""
    return call_id if _SHORT.fullmatch(call_id) else _nine(hashlib.sha256(call_id.encode()).digest())


def _digest(answer: str, choice: int, index: int) -> bytes:
    return hashlib.sha256(f"{answer} {choice} {index}".encode()).digest()


def _nine(digest: bytes) -> str:
    number, letters = int.from_bytes(digest), ""
    for _ in range(9):
        number, place = divmod(number, len(_ALPHANUMERIC))
        letters += _ALPHANUMERIC[place]
    return letters


def _term(text: str, control: Control) -> str:
    token = control(text)
    return literal(text) if token is None else f"<[{token}]>"
