"""A trace as text: who called whom, from when to when, and the attributes that say why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.otlp import ReceivedSpan

WIDTH = 44
LEFT_OUT = {
    "forebay.kept", "http.request.method", "http.route", "url.path", "url.scheme", "server.address", "server.port",
    "network.protocol.name", "network.protocol.version", "forebay.request.id", "forebay.job.id", "forebay.stream",
    "forebay.policy.generation", "gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.response.model",
    "gen_ai.output.type", "gen_ai.request.stream", "gen_ai.request.top_p", "gen_ai.request.temperature",
    "forebay.auth.method", "forebay.key.id", "forebay.choices", "forebay.class", "forebay.transfer.source",
}  # fmt: skip
"""What every trace has and no example needs."""


def draw(spans: Sequence[ReceivedSpan]) -> str:
    """The tree of one trace, a line a span: name, start and duration in ms, attributes (``forebay.`` left out)."""
    ids = {span.span_id for span in spans}
    [root] = [span for span in spans if span.parent not in ids]
    lines: list[str] = []

    def below(span: ReceivedSpan, first: str, rest: str) -> None:
        children = sorted((each for each in spans if each.parent == span.span_id), key=lambda each: each.start_ns)
        start, took = (span.start_ns - root.start_ns) / 1e6, (span.end_ns - span.start_ns) / 1e6
        mark = "✗ " if span.error else ""
        lines.append(f"{first + mark + span.name:<{WIDTH}}{start:>9.1f} {took:>9.1f}  {_attributes(span)}".rstrip())
        bar = "│ " if children else "  "
        lines.extend(
            f"{rest + bar + '· ' + name:<{WIDTH}}{(at - root.start_ns) / 1e6:>9.1f}{'':>10}  {_pairs(found)}".rstrip()
            for name, at, found in span.events
        )
        lines.extend(f"{rest}{bar}→ {link[2].get('forebay.link', 'link')}" for link in span.links)
        for child in children:
            last = child is children[-1]
            below(child, rest + ("└ " if last else "├ "), rest + ("  " if last else "│ "))

    below(root, "", "")
    return "\n".join([f"{'':<{WIDTH}}{'start ms':>9} {'took ms':>9}", *lines])


def _attributes(span: ReceivedSpan) -> str:
    return _pairs({name: value for name, value in span.attributes.items() if name not in LEFT_OUT})


def _pairs(attributes: dict[str, Any]) -> str:
    return " ".join(f"{name.removeprefix('forebay.')}={_value(value)}" for name, value in attributes.items())


def _value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(str, value)) + "]"
    if isinstance(value, float):
        return f"{value:g}"
    return f'"{value}"' if isinstance(value, str) and " " in value else str(value)
