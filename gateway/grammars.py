"""Grammar texts: what a request's answer must match, in the Lark dialect of llguidance (``%json {…}`` embeds a schema).

Rules
- A caller brings schemas and names, never grammar text: each is embedded as JSON, so that none can add a rule.
- White space between JSON tokens is optional and bounded: a small model cannot spend its whole answer on it.
- Of overlapping ``oneOf`` branches any may match, as with ``anyOf``; other keywords that cannot be enforced are errors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec

from gateway.toolbox import ARGUMENTS, CLOSE, MAX_CALLS, NAME, OPEN, Toolbox

Schema = dict[str, Any] | bool
SPACE = r"(\n {0,32}| )?"
"""White space that may stand between two tokens of JSON: a line break with its indentation, one space, or none."""
_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": SPACE, "coerce_one_of": True}
ANY_OBJECT: Schema = {"type": "object"}
_ANY = r"/(.|\n)*/"


def embedded(schema: Schema) -> str:
    """A schema as a term of a rule. What it says of ``x-guidance`` (the compiler's options) is ours to say."""
    whole = schema if isinstance(schema, dict) else ({} if schema else {"not": {}})
    return "%json " + msgspec.json.encode({**whole, "x-guidance": _OPTIONS}).decode()


def json_text(schema: Schema) -> str:
    """The answer is one JSON value that matches ``schema``."""
    return f"start: {embedded(schema)}"


def tool_text(box: Toolbox, otherwise: Schema | None) -> str:
    """The answer is a call of a tool between tags (``toolbox.py``), or several, or else what the request leaves open.

    That is any text, which may also come before the calls, or JSON that matches ``otherwise``.
    """
    rules = call_rules(box, lambda name: literal(f"{NAME}{name}{ARGUMENTS}"), literal(CLOSE))
    return marked_text(box, otherwise, rules, mark=OPEN, body=f"call{repeated(box, literal(chr(10) + OPEN))}")


def literal(text: str) -> str:
    """``text`` as a term of a rule."""
    return json.dumps(text)


def call_rules(box: Toolbox, head: Callable[[str], str], tail: str = "") -> list[str]:
    """The rule ``call``: a term made of the name (``head``), the arguments, a term behind them (``tail``)."""
    rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(box.callable)))}"]
    for i, tool in enumerate(box.callable):
        rules.append(f"call_{i}: {head(tool.name)} {embedded(tool.parameters)} {tail}".rstrip())
    return rules


def repeated(box: Toolbox, between: str) -> str:
    """More calls behind the first one, where one answer may hold several."""
    return f" ({between} call){{0,{MAX_CALLS - 1}}}" if box.parallel else ""


def marked_text(
    box: Toolbox, otherwise: Schema | None, rules: list[str], *, mark: str, body: str, token: int | None = None
) -> str:
    """A grammar of calls that begin with ``mark``: a control token of the model, or else its text.

    Where it is a token, plain text cannot spell it: what reads as a call was one to the model.
    """
    opening = literal(mark) if token is None else f"<[{token}]>"
    if box.choice != "auto":
        start = [f"start: {opening} {body}"]
    elif otherwise is not None:
        start = [f"start: {embedded(otherwise)} | {opening} {body}"]
    elif token is None:
        start = [f"start: TEXT | opening {body}", f"opening[lazy]: TEXT {opening}", f"TEXT: {_ANY}"]
    else:
        spelled = re.sub(r"([\[\]|{}])", r"\\\1", mark)
        start = [f"start: TEXT | TEXT? {opening} {body}", f"TEXT: {_ANY} & ~/(.|\\n)*{spelled}(.|\\n)*/"]
    return "\n".join([*start, *rules])


def bare_text(
    box: Toolbox, otherwise: Schema | None, rules: list[str], *, begins: tuple[str, str], token: int | None
) -> str:
    """A grammar of answers that are one call and nothing else, maybe behind a control token (``token``).

    Any other text is free, but for what begins like a call: ``begins``, with a tool's name in between.
    """
    call = "call" if token is None else f"call | <[{token}]> call"
    if box.choice != "auto":
        start = [f"start: {call}"]
    elif otherwise is not None:
        start = [f"start: {embedded(otherwise)} | {call}"]
    else:
        before, behind = (re.sub(r"([\[\]|{}])", r"\\\1", part) for part in begins)
        names = "|".join(tool.name for tool in box.callable)
        start = [f"start: TEXT | {call}", f"TEXT: {_ANY} & ~/{before}({names}){behind}(.|\\n)*/"]
    return "\n".join([*start, *rules])
