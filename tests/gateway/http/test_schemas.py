"""Request bodies: what is read, what is refused with which ``param``, what is ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.http import jsonfields, schemas, unsupported
from gateway.http.schemas import ChatRequest, CompletionRequest, Message, parse_chat, parse_completion

HELLO = [{"role": "user", "content": "hello"}]
CHAT = {"model": "m", "messages": HELLO}
COMPLETION = {"model": "m", "prompt": "hello"}


def chat(**fields: Any) -> ChatRequest:
    return parse_chat(json.dumps(CHAT | fields).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse_completion(json.dumps(COMPLETION | fields).encode())


def refused(parse: Any, *args: Any, **fields: Any) -> dict[str, Any]:
    with pytest.raises(ApiError) as caught:
        parse(*args, **fields)
    assert caught.value.status == 400
    assert caught.value.type == "invalid_request_error"
    body = caught.value.body()
    assert json.loads(json.dumps(body, allow_nan=False)) == body
    assert len(body["error"]["message"]) < 400
    error: dict[str, Any] = body["error"]
    return error


# -- what is read ------------------------------------------------------------------------------------------------------


def test_a_bare_chat_has_the_apis_defaults() -> None:
    request = chat()
    assert request.messages == (Message("user", "hello"),)
    assert (request.model, request.n, request.stream, request.max_tokens) == ("m", 1, False, None)
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.seed) == (1.0, 1.0, 0, 0.0, None)
    assert (params.logprobs, params.logit_bias, params.ignore_eos, params.min_tokens) == (None, {}, False, 0)


def test_every_field_is_read() -> None:
    request = chat(
        max_completion_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=40,
        min_p=0.1,
        seed=-(2**63),
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias={"5": -100, "7": 1.5},
        ignore_eos=True,
        min_tokens=3,
        stop=["a", "b", "a"],
        n=16,
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
        logprobs=True,
        top_logprobs=20,
        user="someone",
        metadata={"k": "v"},
    )
    assert (request.max_tokens, request.max_tokens_param) == (7, "max_completion_tokens")
    assert (request.n, request.stream, request.include_usage) == (16, True, True)
    assert (request.stop, request.user, request.metadata) == (("a", "b"), "someone", {"k": "v"})
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 0.5, 40, 0.1)
    assert (params.seed, params.presence_penalty, params.frequency_penalty) == (-(2**63), -2.0, 2.0)
    assert params.logit_bias == {5: -100.0, 7: 1.5}
    assert (params.ignore_eos, params.min_tokens, params.logprobs) == (True, 3, 20)


def test_null_means_not_given_everywhere() -> None:
    names = [*(schemas.CHAT_FIELDS.keys() - {"model", "messages"}), *unsupported.CHAT]
    assert chat(**dict.fromkeys(names)) == chat()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        ("", ""),
        ([{"type": "text", "text": "one"}], "one"),
        ([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "one\ntwo"),
        ([], ""),
        ("\u0000 \U0001f600 <|im_end|>", "\u0000 \U0001f600 <|im_end|>"),
    ],
)
def test_content_is_a_string_or_text_parts(content: Any, text: str) -> None:
    assert chat(messages=[{"role": "user", "content": content}]).messages == (Message("user", text),)


@pytest.mark.parametrize("role", schemas.ROLES)
def test_roles(role: str) -> None:
    assert chat(messages=[{"role": role, "content": "x", "name": "n", "tool_call_id": "t"}]).messages[0].role == role


def test_an_assistant_may_have_said_nothing_or_refused() -> None:
    said = [
        {"role": "assistant"},
        {"role": "assistant", "content": None, "tool_calls": [], "refusal": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]
    assert [message.content for message in chat(messages=said).messages] == ["", "", "no"]


@pytest.mark.parametrize(
    ("prompt", "read"),
    [("text", "text"), (["text"], "text"), ([1, 2], (1, 2)), ([[1, 2]], (1, 2)), ("", ""), ([""], "")],
)
def test_a_prompt_is_text_or_token_ids(prompt: Any, read: Any) -> None:
    assert completion(prompt=prompt).prompt == read


def test_the_last_of_duplicate_fields_counts() -> None:
    raw = b'{"model": "m", "n": 2, "messages": [{"role": "user", "content": "x"}], "n": 3}'
    assert parse_chat(raw).n == 3


@pytest.mark.parametrize("top_k", [-1, 0])
def test_top_k_off(top_k: int) -> None:
    assert chat(top_k=top_k).params.top_k == 0


def test_logprobs_of_both_endpoints() -> None:
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=False, top_logprobs=0).params.logprobs is None
    assert completion(logprobs=0).params.logprobs == 0
    assert completion(logprobs=5).params.logprobs == 5


@pytest.mark.parametrize(
    "field",
    [
        {"cache_salt": "other"},
        {"tenant": "other", "tenant_id": "other", "organization": "x"},
        {"priority": 100, "class": "gold", "request_id": "x"},
        {"store": True, "service_tier": "flex", "safety_identifier": "x", "prompt_cache_key": "x"},
        {"parallel_tool_calls": True},
        {"never_heard_of": {"deep": [1, {"x": None}]}},
    ],
)
def test_harmless_and_forged_fields_change_nothing(field: dict[str, Any]) -> None:
    """security 7, gateway B13: what a body claims about tenant, class or cache is ignored."""
    assert chat(**field) == chat()


# -- what is refused ---------------------------------------------------------------------------------------------------

BAD_COMMON: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model"),
    ({"model": ""}, "model"),
    ({"model": 5}, "model"),
    ({"model": "m" * 257}, "model"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "10"}, "max_tokens"),
    ({"max_tokens": 2**31}, "max_tokens"),
    ({"max_tokens": 10**40}, "max_tokens"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "nan"}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**31}, "top_k"),
    ({"top_k": 1.0}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"seed": 2**63}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": 10**9}, "n"),
    ({"n": 1.0}, "n"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": "x" * 257}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"ignore_eos": "true"}, "ignore_eos"),
    ({"user": 5}, "user"),
    ({"user": "u" * 513}, "user"),
    ({"metadata": {"a": 1}}, "metadata[...]"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"metadata": {"k" * 65: ""}}, "metadata"),
    ({"metadata": {"k": "v" * 513}}, "metadata"),
    ({"metadata": [1]}, "metadata"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_COMMON, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("parse", [chat, completion])
def test_a_bad_value_is_a_400_that_names_the_field(parse: Any, fields: dict[str, Any], param: str) -> None:
    error = refused(parse, **fields)
    assert error["param"] == param
    assert param.split("[")[0].split(".")[0] in error["message"]


@pytest.mark.parametrize(
    "bias",
    [
        *({key: 1} for key in ("-1", "a", "", " 5", "٣", "1e3", "5.0", "1" * 11)),
        *({"5": value} for value in (101, -100.5, "x", None)),
        *({str(i): 0 for i in range(count)} for count in (1025, 10_000)),
        [5, 1],
        "5",
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_logit_bias(bias: Any) -> None:
    """security 43: ids out of range or no ids, too many entries, values that are no numbers."""
    assert refused(chat, logit_bias=bias)["param"].startswith("logit_bias")


@pytest.mark.parametrize(
    "field",
    [
        "temperature",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "n",
        "max_tokens",
        "top_k",
        "logit_bias",
    ],
)
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", '"nan"', '"inf"', "1" * 400])
def test_no_number_that_is_none(field: str, value: str) -> None:
    """security 45, 43: NaN, infinities and 1e400 in every number field get a 400 with a JSON body."""
    shown = f'{{"5": {value}}}' if field == "logit_bias" else value
    raw = f'{{"model": "m", "messages": [{{"role": "user", "content": "x"}}], "{field}": {shown}}}'
    refused(parse_chat, raw.encode())


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hello", "messages"),
        ({"role": "user"}, "messages"),
        ([5], "messages[0]"),
        ([{"content": "x"}], "messages[0]"),
        ([{"role": 5, "content": "x"}], "messages[0].role"),
        ([*HELLO, {"role": "function", "content": "x"}], "messages[1].role"),
        ([*HELLO, {"role": "root", "content": "x"}], "messages[1].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}], "messages[0].content[0].type"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
        ),
        ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "file", "file": {}}]}], "messages[0].content[0].type"),
        ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "function_call": {"name": "x"}}], "messages[0].function_call"),
        ([{"role": "assistant", "audio": {"id": "x"}}], "messages[0].audio"),
        ([{"role": "user", "content": "x"}] * 4097, "messages"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bad_messages(messages: Any, param: str) -> None:
    assert refused(chat, messages=messages)["param"] == param


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        ([], "prompt"),
        ([[]], "prompt"),
        (5, "prompt"),
        ({"a": 1}, "prompt"),
        (["a", "b"], "prompt"),
        ([[1], [2]], "prompt"),
        ([1, "a"], "prompt[1]"),
        (["a", 1], "prompt"),
        ([1, [2]], "prompt[1]"),
        ([1, 2.5], "prompt[1]"),
        ([True], "prompt[0]"),
        ([None], "prompt[0]"),
        ([[1, "a"]], "prompt[0][1]"),
    ],
    ids=str,
)
def test_bad_prompts(prompt: Any, param: str) -> None:
    assert refused(completion, prompt=prompt)["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
    ],
)
def test_bad_chat_logprobs(fields: dict[str, Any], param: str) -> None:
    assert refused(chat, **fields)["param"] == param


@pytest.mark.parametrize("value", [6, -1, True, "1"])
def test_bad_completion_logprobs(value: Any) -> None:
    assert refused(completion, logprobs=value)["param"] == "logprobs"


ACTIVE: dict[str, Any] = {
    "functions": [{}],
    "function_call": {"name": "f"},
    "best_of": 2,
    "echo": True,
    "suffix": "end",
    "modalities": ["text", "audio"],
    "add_generation_prompt": False,
    "include_reasoning": False,
    "skip_special_tokens": False,
}
_DEFAULT_ACTIVE: Any = {"something": True}


@pytest.mark.parametrize("name", sorted(unsupported.CHAT))
def test_a_chat_field_that_would_change_the_answer_is_refused(name: str) -> None:
    error = refused(chat, **{name: ACTIVE.get(name, _DEFAULT_ACTIVE)})
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert error["message"].startswith(f"{name} is not supported: ")


@pytest.mark.parametrize("name", sorted(unsupported.COMPLETION))
def test_a_completion_field_that_would_change_the_answer_is_refused(name: str) -> None:
    assert refused(completion, **{name: ACTIVE.get(name, _DEFAULT_ACTIVE)})["param"] == name


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, field in unsupported.CHAT.items() for value in field.neutral], ids=str
)
def test_a_value_that_asks_for_what_happens_anyway_passes(name: str, value: Any) -> None:
    assert chat(**{name: value}) == chat()


@pytest.mark.parametrize("value", [True, 1.5, "1", 0, 2])
def test_neutral_values_are_compared_with_their_type(value: Any) -> None:
    assert refused(chat, best_of=value)["param"] == "best_of"


@pytest.mark.parametrize(
    "value",
    [{"tokenize": True}, {"enable_thinking": False}, {"x": [0] * 1000}],
    ids=["tokenize", "thinking", "long"],
)
def test_template_arguments_are_refused(value: Any) -> None:
    """security 37: neither a template nor arguments for one come from a caller."""
    assert refused(chat, chat_template_kwargs=value)["param"] == "chat_template_kwargs"
    loop = "{% for i in range(10**9) %}x{% endfor %}"
    assert refused(chat, chat_template=loop)["param"] == "chat_template"


# -- what is no request at all -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b" ",
        b"null",
        b"[]",
        b'"x"',
        b"5",
        b"{",
        b'{"model"}',
        b'{"model": "m",}',
        b"{'model': 'm'}",
        b'{"model": undefined}',
        b'{"model": "m"} trailing',
        b'{"model": "m"}{"model": "m"}',
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b'{"model": "\\udc00\\ud800"}',
        b'{"model": "\xed\xa0\x80"}',
        b'{"model": "a\nb"}',
        b'{"model": 01}',
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"\\ud800": 1}',
    ],
)
def test_broken_json(raw: bytes) -> None:
    """security 45 and others: malformed text is a 400, never a 500."""
    refused(parse_chat, raw)
    refused(parse_completion, raw)


def test_half_a_character_in_a_message_is_refused() -> None:
    raw = b'{"model": "m", "messages": [{"role": "user", "content": "a\\ud83d"}]}'
    assert "surrogate" in refused(parse_chat, raw)["message"]


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":[', '["[",'])
@pytest.mark.parametrize("place", ["unknown", "messages", "metadata", "tools"])
def test_deep_json_is_refused_without_recursion(opening: str, place: str) -> None:
    """DESIGN: deep JSON gets 400. Sizes from just over the limit to far past the interpreter's own."""
    closing = "".join({"[": "]", "{": "}"}[c] for c in reversed(opening.replace('"["', "")) if c in "[{")
    for levels in (65, 300, 5_000, 100_000):
        times = -(-levels // len(closing))
        raw = f'{{"model": "m", "{place}": {opening * times}1{closing * times}}}'.encode()
        refused(parse_chat, raw)


def test_nesting_up_to_the_limit_passes_and_brackets_in_text_do_not_count() -> None:
    deep = json.loads("[" * 63 + "]" * 63)
    assert chat(unknown=deep) == chat()
    text = '[{"' * 500 + "\\" * 3
    assert chat(messages=[{"role": "user", "content": text}]).messages[0].content == text


def many(count: int, one: str, wrap: str = "[%s]") -> bytes:
    return f'{{"model": "m", "messages": [], "x": {wrap % ",".join([one] * count)}}}'.encode()


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (many(70_000, '"a"'), "65536 strings"),
        (many(70_000, '"\\\\"'), "65536 strings"),
        (("{" + ",".join(f'"k{i}":1' for i in range(70_000)) + "}").encode(), "65536 strings"),
        (many(70_000, "[]"), "65536 arrays and objects"),
        (many(70_000, "{}"), "65536 arrays and objects"),
        (many(1_050_000, "1"), "1048576 values"),
    ],
    ids=["strings", "backslashes", "keys", "arrays", "objects", "numbers"],
)
def test_what_would_keep_the_interpreter_busy_is_refused_before_it_is_decoded(raw: bytes, what: str) -> None:
    """security 53: decoding holds the interpreter lock, in a thread too; 300,000 keys are 80 ms for the event loop."""
    error = refused(parse_chat, raw)
    assert error["code"] == "too_many_values"
    assert what in error["message"]


def test_text_may_hold_as_many_of_these_as_it_likes() -> None:
    text = '{"a": [1, "b\\\\", {}]}, ' * 30_000
    assert chat(messages=[{"role": "user", "content": text}]).messages[0].content == text
    tokens = list(range(250)) * 2_000
    assert len(parse_completion(json.dumps({"model": "m", "prompt": tokens}).encode()).prompt) == 500_000
    turn = [
        {"role": "user", "content": [{"type": "text", "text": "weather?"}]},
        {"role": "assistant", "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}
        ]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
        {"role": "assistant", "content": "Sunny."},
    ]  # fmt: skip
    assert len(chat(messages=turn * 1024).messages) == schemas.MAX_MESSAGES, "the longest conversation"


def test_a_call_s_arguments_are_no_way_around_it() -> None:
    arguments = json.dumps({f"k{i}": 1 for i in range(70_000)})
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    error = refused(
        parse_chat, json.dumps({"model": "m", "messages": [{"role": "assistant", "tool_calls": [call]}]}).encode()
    )
    assert error["param"] == "messages[0].tool_calls[0].function.arguments"
    assert "65536 strings" in error["message"]


@given(
    st.recursive(
        st.none() | st.text('ab[]{}"\\', max_size=6),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("x]{", max_size=2), inner, max_size=3),
        max_leaves=30,
    ),
    st.integers(0, 6),
)
def test_depth_is_counted_exactly(value: Any, limit: int) -> None:
    def depth(node: Any) -> int:
        inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else None
        return 0 if inner is None else 1 + max(map(depth, inner), default=0)

    assert jsonfields.depth_exceeds(json.dumps(value).encode(), limit) is (depth(value) > limit)


@given(
    st.dictionaries(
        st.sampled_from([*schemas.CHAT_FIELDS, "tools"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
            lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
            max_leaves=8,
        ),
        max_size=6,
    )
)
def test_any_body_is_read_or_refused_with_a_param(fields: dict[str, Any]) -> None:
    refusal = None
    try:
        parse_chat(json.dumps(CHAT | fields).encode())
    except ApiError as error:
        refusal = error
    if refusal is not None:
        assert refusal.status == 400
        assert refusal.param is not None or refusal.code == "invalid_json"


def test_messages_quote_at_most_a_scrap_of_the_request() -> None:
    """security 57: an error tells the field, not the prompt."""
    secret = "s3cr3t" * 200
    for error in (
        refused(chat, messages=[{"role": secret, "content": secret}]),
        refused(chat, logit_bias={secret: 1}),
        refused(chat, messages=[{"role": "user", "content": [{"type": secret}]}]),
    ):
        assert error["message"].count("s3cr3t") <= 6


async def test_a_large_body_is_parsed_in_a_thread() -> None:
    raw = json.dumps(CHAT | {"unknown": "x" * 100_000}).encode()
    assert await schemas.parse(parse_chat, raw) == chat()
    with pytest.raises(ApiError):
        await schemas.parse(parse_completion, raw)
    assert await schemas.parse(parse_completion, json.dumps(COMPLETION).encode()) == completion()


# -- bans and penalties ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("repetition_penalty", 10.5),
        ("repetition_penalty", "1"),
        ("typical_p", 0),
        ("typical_p", 1.01),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [2**31]),
        ("stop_token_ids", list(range(65))),
        ("stop_token_ids", 5),
        ("stop_token_ids", ["5"]),
        ("bad_words", [""]),
        ("bad_words", ["x" * 129]),
        ("bad_words", ["x"] * 65),
        ("bad_words", "word"),
        ("bad_words", [[5]]),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_bans_and_penalties(name: str, value: Any) -> None:
    param = refused(chat, **{name: value})["param"]
    assert param.split("[")[0] == name
    assert refused(chat, use_beam_search=True, **{name: value})["param"].split("[")[0] == name


def test_good_bans_and_penalties() -> None:
    request = chat(repetition_penalty=1.2, typical_p=0.9, stop_token_ids=[5, 7, 5], bad_words=["a", "b", "a"])
    assert (request.params.repetition_penalty, request.params.typical_p) == (1.2, 0.9)
    assert request.params.stop_token_ids == (5, 7)
    assert request.bad_words == ("a", "b")
