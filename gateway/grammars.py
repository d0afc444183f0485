"""Grammar texts: what a request's answer must match, in the Lark dialect of llguidance (``%json {…}`` embeds a schema).

Rules
- A caller brings schemas and names, never grammar text: each is embedded as JSON, so that none can add a rule.
- White space between JSON tokens is optional and bounded: a small model cannot spend its whole answer on it.
- Of overlapping ``oneOf`` branches any may match, as with ``anyOf``; other keywords that cannot be enforced are errors.
"""

from __future__ import annotations

from typing import Any

import msgspec

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
