"""Grammar texts: what a request's answer must match, in the Lark dialect of llguidance (``%json {…}`` embeds a schema).

Rules
- A caller brings schemas and names, never grammar text: each is embedded as JSON, so that none can add a rule.
- White space between JSON tokens is optional and bounded: a small model cannot spend its whole answer on it.
- Of overlapping ``oneOf`` branches any may match, as with ``anyOf``; other keywords that cannot be enforced are errors.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from gateway.toolbox import ARGUMENTS, CLOSE, MAX_CALLS, NAME, OPEN, Toolbox

Schema = dict[str, Any] | bool
SPACE = r"(\n {0,32}| )?"
"""White space that may stand between two tokens of JSON: a line break with its indentation, one space, or none."""
_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": SPACE, "coerce_one_of": True}
ANY_OBJECT: Schema = {"type": "object"}


def embedded(schema: Schema) -> str:
    """A schema as a term of a rule. What it says of ``x-guidance`` (the compiler's options) is ours to say."""
    whole = schema if isinstance(schema, dict) else ({} if schema else {"not": {}})
    return "%json " + msgspec.json.encode({**whole, "x-guidance": _OPTIONS}).decode()


def json_text(schema: Schema) -> str:
    """The answer is one JSON value that matches ``schema``."""
    return f"start: {embedded(schema)}"


def tool_text(box: Toolbox, otherwise: Schema | None) -> str:
    """The answer is a call of a tool, or several, or else what the request leaves open.

    That is any text, which may also come before the calls, or JSON that matches ``otherwise``.
    """
    rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(box.callable)))}"]
    for i, tool in enumerate(box.callable):
        head = f"{NAME}{tool.name}{ARGUMENTS}"
        rules.append(f"call_{i}: {json.dumps(head)} {embedded(tool.parameters)} {json.dumps(CLOSE)}")
    more = f" ({json.dumps(chr(10) + OPEN)} call){{0,{MAX_CALLS - 1}}}" if box.parallel else ""
    if box.choice != "auto":
        return "\n".join([f"start: {json.dumps(OPEN)} call{more}", *rules])
    if otherwise is not None:
        return "\n".join([f"start: {embedded(otherwise)} | {json.dumps(OPEN)} call{more}", *rules])
    text = [f"start: TEXT | opening call{more}", f"opening[lazy]: TEXT {json.dumps(OPEN)}", "TEXT: /(.|\\n)*/"]
    return "\n".join([*text, *rules])
