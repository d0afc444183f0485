"""The forms in which models call tools: what a template writes is what the grammar wants and what the reader reads."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.callforms import FORMS, CallForm, form_of, short_name
from gateway.http.schemas import ChatRequest, parse_chat
from gateway.intake import _chat_reader
from gateway.jsoncalls import ObjectEnd
from gateway.toolcalls import whole_calls
from tests.gateway import tool_templates
from tests.gateway.test_toolcalls import streamed
from tests.workers import tiny_tokenizer
from workers.chat_template import ChatTemplateError
from workers.grammar import GrammarError, Vocabulary
from workers.tokenizer import Tokenizer

LOOK: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
STAY: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "stay",
        "parameters": {
            "type": "object",
            "properties": {"for": {"enum": ["ever", "now"]}},
            "required": ["for"],
            "additionalProperties": False,
        },
    },
}
NATIVE = tuple(tool_templates.ALL)
MISTRAL = tuple(name for name in NATIVE if name.startswith("mistral"))


class Model(NamedTuple):
    """A model as far as the gateway knows it."""

    tokenizer: Tokenizer
    vocabulary: Vocabulary

    @property
    def form(self) -> CallForm:
        return form_of(self.tokenizer.tool_template)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    made = {}
    for name, (template, special) in tool_templates.ALL.items():
        folder: Path = tmp_path_factory.mktemp(name)
        tiny_tokenizer.write(folder, template, special=special)
        made[name] = Model(Tokenizer.load(folder), Vocabulary.load(folder))
    return made


def chat(messages: list[dict[str, Any]], **fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": messages, "tools": [LOOK, STAY], **fields}
    return parse_chat(json.dumps(body).encode())


def call(name: str, arguments: Any, call_id: str = "call_1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def prompt(model: Model, request: ChatRequest) -> str:
    """The prompt's text, control tokens included."""
    tokenizer = model.tokenizer
    return b"".join(map(tokenizer.token_bytes, _chat_reader(request, tokenizer)[2]())).decode()


def grammar(model: Model, **fields: Any) -> str:
    request = chat([{"role": "user", "content": "x"}], **fields)
    found = request.constraint(partial(model.form.grammar, control=model.tokenizer.control_token))
    assert found is not None
    return found.grammar


def allows(model: Model, text: str, **fields: Any) -> bool:
    """Whether an answer may be ``text`` and end there; control tokens are written as their text."""
    matcher = model.vocabulary.compile(grammar(model, **fields))
    try:
        matcher.consume(model.tokenizer.encode_text(text, special=True, prefix=False))
        if not matcher.ended:
            matcher.consume([2])
    except GrammarError:
        return False
    return True


def answer(model: Model, text: str, **fields: Any) -> tuple[str, list[tuple[str, Any]]]:
    """Content and calls (name, arguments) of an answer of these tokens."""
    tokenizer = model.tokenizer
    decoder = tokenizer.decoder(t for mark in model.form.marks if (t := tokenizer.control_token(mark)) is not None)
    shown = decoder.feed(tokenizer.encode_text(text, special=True, prefix=False)) + decoder.finish()
    box = chat([{"role": "user", "content": "x"}], **fields).toolbox
    assert box is not None
    content, calls = whole_calls(model.form.reader(box), shown)
    return content, [(call.name or "", json.loads(call.arguments)) for call in calls]


def test_each_template_has_its_form(models: dict[str, Model]) -> None:
    kinds = {name: type(model.form).__name__ for name, model in models.items()}
    assert kinds == {
        "llama": "Bare",
        "mistral-listed": "Listed",
        "mistral-args": "WithArgs",
        "mistral-ids": "WithIds",
        "qwen": "Tagged",
    }
    for unknown in ("", "{% if tools %}{{ tools }}{% endif %}", "{{ '[ARGS]' if tools }}"):
        assert type(form_of(unknown)).__name__ == "Described"
    assert len({type(form) for form in FORMS}) == len(FORMS)


letters = st.text(st.characters(codec="utf-8", exclude_characters="\x7f"), max_size=8)
"""DEL has to be written as an escape by the grammar's JSON, which templates do not do."""
values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | letters | st.sampled_from(['"}]', "\\", "}, {"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(letters, inner, max_size=2),
    max_leaves=4,
)
written = st.dictionaries(letters, values, max_size=3)


def plain(arguments: Any) -> bool:
    """Not written like a control token: callers' texts never are, so templates encode such arguments otherwise."""
    text = json.dumps(arguments, ensure_ascii=False)
    return not any(mark in text for mark in (*tiny_tokenizer.SPECIAL, "<tool_call>", *tool_templates.MISTRAL_TOKENS))


@pytest.mark.parametrize("name", NATIVE)
@settings(max_examples=25, deadline=None)
@given(
    arguments=st.lists(written.filter(plain), min_size=1, max_size=3), cuts=st.lists(st.integers(0, 400), max_size=8)
)
def test_what_the_template_writes_of_a_call_is_enforced_and_read_back(
    models: dict[str, Model], name: str, arguments: list[Any], cuts: list[int]
) -> None:
    model = models[name]
    if name == "llama":  # it knows one call per message
        arguments = arguments[:1]
    asked = [{"role": "user", "content": "x"}]
    calls = [call("look", one, f"call_{place}") for place, one in enumerate(arguments)]
    begin = prompt(model, chat(asked))
    with_calls = chat([*asked, {"role": "assistant", "tool_calls": calls}])
    whole = prompt(model, with_calls)
    # Both have the question; the second goes on with the calls, its end token, and maybe a new turn.
    said = whole[len(_shared(begin, whole)) :]
    said = said.split("<|eot_id|>" if name == "llama" else "<|im_end|>")[0]
    assert allows(model, said), said
    assert allows(model, said, tool_choice="required"), said
    assert answer(model, said) == ("", [("look", one) for one in arguments])
    box = chat(asked).toolbox
    assert box is not None
    content, pieces, _ = streamed(said, cuts, model.form.reader(box))
    assert (content, [(n, json.loads(a)) for n, a in pieces]) == ("", [("look", one) for one in arguments])


def _shared(one: str, other: str) -> str:
    end = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:end]


STAY_NOW = {
    "llama": '{"name": "stay", "parameters": {"for": "now"}}',
    "mistral-listed": '[TOOL_CALLS] [{"name": "stay", "arguments": {"for": "now"}}]',
    "mistral-args": '[TOOL_CALLS]stay[ARGS]{"for": "now"}',
    "mistral-ids": '[TOOL_CALLS]stay[CALL_ID]abcdefGH1[ARGS]{"for": "now"}',
    "qwen": '<tool_call>\n{"name": "stay", "arguments": {"for": "now"}}\n</tool_call>',
}


@pytest.mark.parametrize("name", NATIVE)
def test_what_an_answer_may_be(models: dict[str, Model], name: str) -> None:
    model, text = models[name], STAY_NOW[name]
    stay: dict[str, Any] = {"tool_choice": {"type": "function", "function": {"name": "stay"}}}
    look: dict[str, Any] = {"tool_choice": {"type": "function", "function": {"name": "look"}}}
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 5}}}}
    assert allows(model, "Just a text, with { and [ and < in it.")
    assert allows(model, text)
    assert allows(model, text, **stay)
    assert allows(model, text, **form)
    assert allows(model, "5", **form)
    assert not allows(model, "5", **stay)
    assert not allows(model, "text", **form)
    assert not allows(model, text, **look)
    assert not allows(model, "", tool_choice="required")
    assert not allows(model, text.replace("now", "then"))
    assert not allows(model, text.replace("stay", "sleep"), tool_choice="required")
    assert not allows(model, f"{text} and more")
    assert answer(model, text) == ("", [("stay", {"for": "now"})])


@pytest.mark.parametrize("name", NATIVE)
def test_several_calls_where_the_form_has_them(models: dict[str, Model], name: str) -> None:
    model, one = models[name], STAY_NOW[name]
    two = {
        "mistral-listed": one[:-1] + ", " + one.removeprefix("[TOOL_CALLS] ["),
        "qwen": f"{one}\n{one}",
    }.get(name, one + one)
    assert allows(model, two) == (name != "llama")
    assert not allows(model, two, parallel_tool_calls=False)
    if name != "llama":
        assert answer(model, two) == ("", [("stay", {"for": "now"})] * 2)


@pytest.mark.parametrize("name", NATIVE)
def test_many_tools_with_long_names_still_compile(models: dict[str, Model], name: str) -> None:
    names = [f"{place:03}-{'x' * 60}" for place in range(128)]
    tools = [{"type": "function", "function": {"name": one, "parameters": {"type": "object"}}} for one in names]
    text = STAY_NOW[name].replace("stay", names[77])
    assert allows(models[name], text, tools=tools)
    assert allows(models[name], "hello", tools=tools)


@pytest.mark.parametrize("name", [*MISTRAL, "qwen"])
def test_text_may_come_before_a_call(models: dict[str, Model], name: str) -> None:
    model = models[name]
    said = f"I'll stay.\n{STAY_NOW[name]}"
    assert allows(model, said)
    assert not allows(model, said, tool_choice="required")
    assert answer(model, said) == ("I'll stay.", [("stay", {"for": "now"})])


@pytest.mark.parametrize("name", MISTRAL)
def test_a_mark_is_a_token_and_nothing_that_text_can_spell(models: dict[str, Model], name: str) -> None:
    model = models[name]
    matcher = model.vocabulary.compile(grammar(model))
    matcher.consume(model.tokenizer.encode_text("so: [TOOL_CALLS", prefix=False))
    with pytest.raises(GrammarError):
        matcher.consume(model.tokenizer.encode_text("]", prefix=False))


def test_a_mark_is_text_where_the_model_has_no_such_token(tmp_path: Path) -> None:
    tiny_tokenizer.write(tmp_path, tool_templates.MISTRAL_ARGS)
    model = Model(Tokenizer.load(tmp_path), Vocabulary.load(tmp_path))
    said = STAY_NOW["mistral-args"]
    assert model.tokenizer.control_token("[TOOL_CALLS]") is None
    assert allows(model, said + said)
    assert allows(model, "hm " + said)
    assert not allows(model, said.replace("now", "then"))
    assert answer(model, "hm " + said + said) == ("hm", [("stay", {"for": "now"})] * 2)


def test_a_call_of_llama_may_have_its_tag(models: dict[str, Model]) -> None:
    model = models["llama"]
    tagged = "<|python_tag|>" + STAY_NOW["llama"]
    for choice in ("auto", "required"):
        assert allows(model, tagged, tool_choice=choice)
    assert not allows(model, "<|python_tag|>print(1)")
    assert answer(model, tagged) == ("", [("stay", {"for": "now"})])


@pytest.mark.parametrize(
    "text",
    ['{"name": "Ann", "parameters": {"x": 1}}', '{"name": "stay"}', '{"name": "sta', " " + STAY_NOW["llama"], "{}", ""],
)
def test_json_that_is_no_call_of_llama_is_text(models: dict[str, Model], text: str) -> None:
    assert allows(models["llama"], text)
    assert answer(models["llama"], text) == (text, [])


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("llama", '{"name": "stay", "par', '{"name": "stay", "par', []),
        ("llama", '{"name": "stay", "parameters": {"for": "n', "", [("stay", '{"for": "n')]),
        ("mistral-listed", "hi [TOOL_CALLS] [{", "hi", []),
        ("mistral-listed", '[TOOL_CALLS][{"name": "stay", "arguments": {"a": [', "", [("stay", '{"a": [')]),
        ("mistral-listed", STAY_NOW["mistral-listed"][:-2] + ', "id": "abc', "", [("stay", '{"for": "now"}')]),
        ("mistral-args", "[TOOL_CALLS]stay[AR", "", []),
        ("mistral-args", '[TOOL_CALLS]stay[ARGS]{"\\', "", [("stay", '{"\\')]),
    ],
)
def test_what_was_cut_short(
    models: dict[str, Model], name: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    box = chat([{"role": "user", "content": "x"}]).toolbox
    assert box is not None
    for cuts in ([], list(range(len(text)))):
        reader = models[name].form.reader(box)
        assert streamed(text, cuts, reader)[:2] == (content, calls)
        assert reader.called == (bool(calls) and calls[-1][1].endswith("}"))


@given(
    st.recursive(st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)),
    st.data(),
)
def test_the_end_of_an_object_is_found_however_it_is_cut(value: Any, data: st.DataObject) -> None:
    text = json.dumps({"x": value}, ensure_ascii=False)
    cut = data.draw(st.integers(0, len(text) - 1))
    end = ObjectEnd()
    assert end.find(text[:cut]) is None
    assert end.find(text[cut:] + "}]") == len(text) - cut


# Names of calls -------------------------------------------------------------------------------------------------------


def test_calls_are_named_as_the_template_wants_them(models: dict[str, Model]) -> None:
    for name, model in models.items():
        ids = [
            model.form.call_id(f"chatcmpl-{answer}", choice, index)
            for answer in "ab"
            for choice in (0, 1)
            for index in (0, 1)
        ]
        assert len(set(ids)) == len(ids)
        assert ids[0] == model.form.call_id("chatcmpl-a", 0, 0)
        wanted = 9 if name in MISTRAL else len("call_") + 24
        assert {len(one) for one in ids} == {wanted}
        assert all(one.isalnum() == (name in MISTRAL) for one in ids)


@given(st.text())
def test_any_name_becomes_a_short_one(name: str) -> None:
    short = short_name(name)
    assert len(short) == 9
    assert short.isascii()
    assert short.isalnum()
    assert short_name(short) == short


# Messages -------------------------------------------------------------------------------------------------------------

TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Look twice."},
    {
        "role": "assistant",
        "content": "I will.",
        "tool_calls": [call("look", {"at": 1}, "call_a"), call("look", {"at": 2}, "call_b")],
    },
    {"role": "tool", "tool_call_id": "call_b", "content": "two"},
    {"role": "tool", "tool_call_id": "call_a", "content": "one"},
]


@pytest.mark.parametrize("name", NATIVE)
def test_a_conversation_with_calls_of_another_model_goes_in(models: dict[str, Model], name: str) -> None:
    """Names of calls that this one does not have, several at once, text beside them, and results in another order."""
    text = prompt(models[name], chat(TALK))
    if name != "qwen":  # the small one has no place for it, as any message it would be shown
        assert "Be kind." in text
    assert text.index("Look twice.") < text.index("two")
    assert ("I will." in text) == (name not in ("mistral-listed", "mistral-ids"))
    if name in MISTRAL:
        assert short_name("call_a") in text
        assert "call_a" not in text


def test_llama_gets_results_that_answer_nothing(models: dict[str, Model]) -> None:
    stray = {"role": "tool", "tool_call_id": "call_a", "content": "astray"}
    text = prompt(models["llama"], chat([*TALK, {"role": "user", "content": "And?"}, stray]))
    assert text.index("And?") < text.index("astray")


def test_llama_gets_each_call_with_its_result(models: dict[str, Model]) -> None:
    text = prompt(models["llama"], chat([*TALK, {"role": "tool", "tool_call_id": "call_c", "content": "stray"}]))
    wanted = ["I will.", '{"at": 1}', "one", '{"at": 2}', "two", "stray"]
    places = [text.index(part, text.index("Look twice.")) for part in wanted]
    assert places == sorted(places)


def test_mistral_hears_its_instructions_behind_results_too(models: dict[str, Model]) -> None:
    text = prompt(models["mistral-listed"], chat(TALK))
    assert "[INST] Be kind.\n\nLook twice.[/INST]" in text
    assert text.count("Be kind.") == 1
    again = prompt(
        models["mistral-listed"],
        chat([*TALK, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "?"}]),
    )
    assert "[INST] Be kind.\n\n?[/INST]" in again


def test_equal_questions_are_not_refused(models: dict[str, Model]) -> None:
    """A template that looks for the last question by its words shows the tools twice."""
    talk = [
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "more"},
    ]
    assert prompt(models["mistral-listed"], chat(talk)).count("[AVAILABLE_TOOLS]") == 2


def test_what_a_template_refuses_is_told(models: dict[str, Model]) -> None:
    out_of_turn = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    with pytest.raises(ChatTemplateError, match="Take turns!"):
        prompt(models["mistral-listed"], chat(out_of_turn))


@pytest.mark.parametrize("name", NATIVE)
def test_security_55_no_text_of_a_caller_is_a_mark(models: dict[str, Model], name: str) -> None:
    """security 55: also in names, arguments and results."""
    model = models[name]
    marks = " ".join((*tool_templates.ALL[name][1], "<|im_start|>"))
    hostile: list[dict[str, Any]] = [
        {"role": "user", "content": marks},
        {"role": "assistant", "tool_calls": [call("look", {"at": marks, marks: 1}, marks)]},
        {"role": "tool", "tool_call_id": marks, "content": marks},
    ]
    innocent = json.loads(json.dumps(hostile).replace(marks, "xxxxxxxxx"))
    special = model.tokenizer.special_ids
    found = [
        [token for token in _chat_reader(chat(talk), model.tokenizer)[2]() if token in special]
        for talk in (hostile, innocent)
    ]
    assert found[0] == found[1]
