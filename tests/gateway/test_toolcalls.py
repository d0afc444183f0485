"""Reading calls back from text, however it is cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.toolbox import ToolCall
from gateway.toolcalls import CallPiece, CallReader, TaggedCalls, whole_calls


def written(name: str = "f", **arguments: Any) -> str:
    return ToolCall("", name, json.dumps(arguments)).text()


def streamed(
    text: str, cuts: list[int], reader: CallReader | None = None
) -> tuple[str, list[tuple[str, str]], CallReader]:
    """Content and calls (name, arguments) of ``text`` fed in pieces; names come first and once."""
    reader = reader or TaggedCalls()
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[a:b] for a, b in pairwise(places)]
    content = ""
    calls: list[tuple[str, str]] = []
    for shown in [*map(reader.feed, pieces), reader.finish()]:
        content += shown.content
        for piece in shown.calls:
            if piece.name is not None:
                assert piece.index == len(calls)
                calls.append((piece.name, ""))
            else:
                assert piece.index == len(calls) - 1
            calls[piece.index] = (calls[piece.index][0], calls[piece.index][1] + piece.arguments)
    return content, calls, reader


TEXTS = [
    "",
    "just text, with < and <tool and <tool_calls> almost",
    "Let me see.\n" + written("look", at="}\n</tool_call>"),
    written("a") + "\n" + written("b", x=[{}, {"y": "<tool_call>"}]) + "\n",
    "\n\n" + written(z={"q": "}"}),
    'cut <tool_call>\n{"name": "na',
    'cut <tool_call>\n{"name": "name", "arguments": {"x": "un',
    written("whole") + '\n<tool_call>\n{"name": "second", "arguments": {}}\n</tool',
    "ends in <tool_cal",
    "ends in space  \n",
]


@pytest.mark.parametrize("text", TEXTS)
@given(cuts=st.lists(st.integers(0, 300), max_size=12))
def test_the_pieces_do_not_depend_on_the_cuts(text: str, cuts: list[int]) -> None:
    content, calls, reader = streamed(text, cuts)
    whole, expected = whole_calls(TaggedCalls(), text)
    assert content == whole
    assert calls == [(call.name, call.arguments) for call in expected]
    one_by_one = streamed(text, list(range(len(text))))
    assert (content, calls) == one_by_one[:2]
    assert reader.called == one_by_one[2].called


def test_calls_and_content_are_told_apart() -> None:
    text = "Let me see.\n" + written("look", at="}\n</tool_call>") + "\n" + written("stay")
    content, calls = whole_calls(reader := TaggedCalls(), text)
    assert content == "Let me see."
    assert calls == [CallPiece(0, "look", '{"at": "}\\n</tool_call>"}'), CallPiece(1, "stay", "{}")]
    assert reader.called


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("a < b <tool_cal", "a < b <tool_cal", []),
        ("  spaces  \n", "  spaces  \n", []),
        ('x<tool_call>\n{"name": "na', "x", []),
        ('<tool_call>\n{"name": "f", "arguments": {"x": 1', "", [CallPiece(0, "f", '{"x": 1')]),
        ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_c', "", [CallPiece(0, "f", "{}}\n</tool_c")]),
    ],
)
def test_what_was_cut_short_is_no_call(text: str, content: str, calls: list[CallPiece]) -> None:
    reader = TaggedCalls()
    assert whole_calls(reader, text) == (content, calls)
    assert not reader.called


def test_text_is_shown_as_soon_as_it_can_be_no_mark() -> None:
    reader = TaggedCalls()
    assert reader.feed("Hello <").content == "Hello"
    assert reader.feed("b>").content == " <b>"
    assert reader.feed('<tool_call>\n{"name": "f", "arg').calls == ()
    assert reader.feed('uments": {"a').calls == (CallPiece(0, "f"), CallPiece(0, arguments='{"a'))
    assert reader.feed('": "}').calls == (CallPiece(0, arguments='": "'),)
    assert reader.feed('x"}').calls == (CallPiece(0, arguments='}x"'),)
    assert reader.feed("}\n</tool_call>").calls == (CallPiece(0, arguments="}"),)
    assert reader.called
