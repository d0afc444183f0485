"""Models of our own engine that call tools in the forms of Llama 3 and Mistral, through the official client.

The weights are random: what they say is what the grammar leaves them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from gateway.callforms import short_name
from tests.e2e.harness import Server, serving
from tests.gateway import tool_templates
from tests.workers import tiny_model

FORMS = ("llama", "mistral-listed", "mistral-ids")
STAY: dict[str, Any] = {
    "name": "stay",
    "parameters": {
        "type": "object",
        "properties": {"for": {"enum": ["ever", "now"]}, "sure": {"type": "boolean"}},
        "required": ["for", "sure"],
        "additionalProperties": False,
    },
}
TOOLS: Any = [
    {"type": "function", "function": STAY},
    {"type": "function", "function": {**STAY, "name": "go"}},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("forms")
    models = []
    for name in FORMS:
        template, special = tool_templates.ALL[name]
        source = tiny_model.write(folder / name, template, special, context=2048)
        engine = {"device": "cpu", "dtype": "float32", "blocks": 512, "threads": 1, "max_running": 4}
        models.append({"name": name, "source": str(source), "pools": [{"name": f"p-{name}", "engine": engine}]})
    with serving(folder, {"models": models}) as running:
        running.wait_ready()
        yield running


@pytest.mark.parametrize("name", FORMS)
def test_calls_are_made_streamed_and_told_back(server: Server, name: str) -> None:
    client = server.client()
    question: Any = [{"role": "user", "content": "Stay?"}]
    asked: dict[str, Any] = {"model": name, "messages": question, "tools": TOOLS, "seed": 3, "max_tokens": 200}
    named = {"type": "function", "function": {"name": "go"}}
    whole = client.chat.completions.create(**asked, tool_choice=named, logprobs=True)
    [choice] = whole.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "go"
    assert set(json.loads(call.function.arguments)) == {"for", "sure"}
    assert choice.logprobs is not None
    assert (len(call.id) == 9) == name.startswith("mistral")

    with client.chat.completions.stream(**asked, tool_choice=named) as stream:
        pieces = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion().choices[0]
    assert len(pieces) > 1
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls is not None
    assert final.message.tool_calls[0].function.arguments == call.function.arguments

    several = client.chat.completions.create(**asked, tool_choice="required", n=3)
    for one in several.choices:
        calls = one.message.tool_calls or []
        assert 1 <= len(calls) <= (1 if name == "llama" else 16)
        assert len({made.id for made in calls}) == len(calls)
        if one.finish_reason == "tool_calls":
            assert all(made.function.name in ("stay", "go") for made in calls)  # type: ignore[union-attr]

    talk = [*question, choice.message.model_dump(exclude_none=True)]
    talk.append({"role": "tool", "tool_call_id": call.id, "content": "done"})
    after = client.chat.completions.create(model=name, messages=talk, tools=TOOLS, max_tokens=4)
    assert after.usage is not None
    tokenized = httpx.post(
        f"{server.info['url']}/tokenize",
        json={"model": name, "messages": talk, "return_token_strs": True},
        headers=server.authorization("search"),
        timeout=60,
    )
    text = "".join(tokenized.json()["token_strs"])
    assert json.loads(call.function.arguments)["for"] in text
    assert (call.id in text) == name.startswith("mistral")

    response = client.responses.create(
        model=name,
        input="Stay?",
        tools=[{"type": "function", **STAY}],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=200,
    )
    [item] = response.output
    assert item.type == "function_call"
    assert (item.name, item.status) == ("stay", "completed")
    assert short_name(item.call_id) == item.call_id or name == "llama"


@pytest.mark.parametrize("name", FORMS)
def test_text_is_text_where_nothing_has_to_be_called(server: Server, name: str) -> None:
    """``auto``: random text is not mistaken for a call, and ends when it is cut."""
    answer = server.client().chat.completions.create(
        model=name, messages=[{"role": "user", "content": "Hm."}], tools=TOOLS, n=4, max_tokens=24, seed=5
    )
    for choice in answer.choices:
        if not choice.message.tool_calls:
            assert choice.message.content is not None
            assert "[TOOL_CALLS]" not in choice.message.content
