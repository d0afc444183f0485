"""The plugin's own parts: its settings, its reader of streams, its count of what ran; and that it is a plugin."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config_file import ConfigErrors, load
from policies.manager import make_manager, register
from policies.registry import Registry
from tests.arch.source import ROOT
from tests.plugins.openai_upstream.conftest import plugin

from forebay_openai_upstream.answer import Answer, ServerError  # isort: skip
from forebay_openai_upstream.refusals import retry_after_s  # isort: skip
from forebay_openai_upstream.sse import MAX_EVENT, EventReader  # isort: skip


def registry() -> Registry:
    manager = make_manager()
    register(manager, plugin, "openai_upstream")
    return Registry.from_manager(manager)


CONFIG = """
policies: {auth: {use: none, with: {tenant: dev}}}
tenants: [{id: dev, privacy: {allow_external: true}}]
models:
  - name: far
    pools:
      - name: up
        launch: {use: openai_upstream, with: %s}
"""


@pytest.mark.parametrize(
    ("settings", "path", "says"),
    [
        ({}, "launch.with.url", "is missing"),
        ({"url": "ftp://x/v1"}, "launch.with.url", "http:// or https://"),
        ({"url": "http:///v1"}, "launch.with.url", "http:// or https://"),
        ({"url": "http://x:99999/v1"}, "launch.with.url", "no URL"),
        ({"url": "http://me:pw@x/v1"}, "launch.with.url", "api_key_env"),
        ({"url": "http://x/v1?key=1"}, "launch.with.url", "leave out"),
        ({"url": "http://x/v1", "api_key": "sk"}, "launch.with.api_key", "unknown key"),
        ({"url": "http://x/v1", "headers": {"Authorization": "Bearer x"}}, "launch.with.headers", "cannot be set"),
        ({"url": "http://x/v1", "headers": {"Connection": "close"}}, "launch.with.headers", "hop-by-hop"),
        ({"url": "http://x/v1", "headers": {"a b": "c"}}, "launch.with.headers", "no header"),
        ({"url": "http://x/v1", "headers": {"a": "b\r\nc: d"}}, "launch.with.headers", "no header"),
        ({"url": "http://x/v1", "extra_body": {"stream": False}}, "launch.with.extra_body", "the request's own"),
        ({"url": "http://x/v1", "first_token_s": 0}, "launch.with.first_token_s", "greater than 0"),
        ({"url": "http://x/v1", "max_running": "8"}, "launch.with.max_running", "write a number"),
        ({"url": "http://x/v1", "endpoints": []}, "launch.with.endpoints", "at least one entry"),
        ({"url": "http://x/v1", "endpoints": ["images"]}, "launch.with.endpoints", "'chat'"),
    ],
)
def test_every_mistake_of_its_block_is_named_with_its_path(
    tmp_path: Path, settings: dict[str, Any], path: str, says: str
) -> None:
    """``forebay config check`` and the start report it, with the line."""
    file = tmp_path / "forebay.yaml"
    file.write_text(CONFIG % json.dumps(settings))
    with pytest.raises(ConfigErrors) as caught:
        load(file).verify(registry())
    message = str(caught.value)
    assert f"models[0].pools[0].{path}" in message
    assert says in message
    assert "pw@" not in message


def test_a_model_without_a_source_needs_upstreams_only(tmp_path: Path) -> None:
    good = CONFIG % json.dumps({"url": "http://x/v1"})
    file = tmp_path / "forebay.yaml"
    file.write_text(good)
    load(file).verify(registry())
    file.write_text(good + "      - {name: near}\n")
    with pytest.raises(ConfigErrors, match=r"models\[0\].source .*is missing: the workers of pool 'near' load a model"):
        load(file).verify(registry())


def test_a_launcher_without_settings_takes_none(tmp_path: Path) -> None:
    file = tmp_path / "forebay.yaml"
    text = (CONFIG % "{url: x}").replace("openai_upstream", "local").replace("name: far", "name: far\n    source: x")
    file.write_text(text)
    with pytest.raises(ConfigErrors, match=r"launch.with.url \(line \d+\): unknown key 'url'; it takes no settings"):
        load(file).verify(registry())


EVENTS = st.lists(st.text(st.characters(blacklist_characters="\r\n", blacklist_categories=("Cs",)), min_size=1))


@given(EVENTS, st.sampled_from(["\n", "\r\n", "\r"]), st.data())
def test_events_are_the_same_however_their_bytes_are_cut(texts: list[str], newline: str, data: st.DataObject) -> None:
    raw = "".join(f": comment{newline}id: 7{newline}data: {text}{newline}{newline}" for text in texts).encode()
    reader, found, at = EventReader(), [], 0
    while at < len(raw):
        size = data.draw(st.integers(1, 9))
        found += reader.feed(raw[at : at + size])
        at += size
    assert [event.decode() for event in found] == texts


def test_lines_of_one_event_are_joined_and_empty_ones_are_none() -> None:
    assert EventReader().feed(b"data: a\ndata:b\n\n\n\nevent: x\n\ndata\n\n") == [b"a\nb", b""]


def test_an_event_has_a_largest_size() -> None:
    reader = EventReader()
    reader.feed(b"data: " + b"x" * (MAX_EVENT - 10) + b"\n")
    with pytest.raises(ValueError, match="an event of more than"):
        reader.feed(b"data: " + b"x" * 20 + b"\n")


def said(**chunk: Any) -> bytes:
    return json.dumps(chunk).encode()


def test_pieces_count_as_tokens_until_the_server_says_its_own_count() -> None:
    answer = Answer(1, max_tokens=10, max_prompt=100)
    for _ in range(3):
        answer.take(said(choices=[{"index": 0, "text": "ab"}]))
    assert answer.choices[0].tokens == 3
    answer.take(said(choices=[], usage={"prompt_tokens": 40, "completion_tokens": 7}))
    assert (answer.choices[0].tokens, answer.prompt_tokens, answer.cached_tokens) == (7, 40, 0)
    answer.take(said(choices=[], usage={"completion_tokens": 2}))
    assert answer.choices[0].tokens == 7


@given(st.lists(st.integers(-5, 10**18)), st.integers(1, 4))
def test_no_figure_exceeds_what_was_asked_for(figures: list[int], choices: int) -> None:
    answer = Answer(choices, max_tokens=10, max_prompt=100)
    for figure in figures:
        details = {"cached_tokens": figure}
        usage = {"prompt_tokens": figure, "completion_tokens": figure, "prompt_tokens_details": details}
        answer.take(said(choices=[], usage=usage))
    assert all(0 <= choice.tokens <= 10 for choice in answer.choices)
    assert 0 <= answer.cached_tokens <= answer.prompt_tokens <= 100


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thinking_counts_and_is_not_shown(name: str) -> None:
    answer = Answer(1, max_tokens=10, max_prompt=100)
    answer.take(said(choices=[{"index": 0, "delta": {"role": "assistant", "content": None}}]))
    assert answer.choices[0].tokens == 0
    answer.take(said(choices=[{"index": 0, "delta": {name: "hmm"}}]))
    assert (answer.choices[0].tokens, answer.choices[0].text) == (1, [])


def test_of_content_in_parts_the_text_is_shown() -> None:
    answer = Answer(1, max_tokens=10, max_prompt=100)
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "hmm"}]}
    answer.take(said(choices=[{"index": 0, "delta": {"content": [thought]}}]))
    assert (answer.choices[0].tokens, answer.choices[0].text) == (1, [])
    parts = [{"type": "text", "text": "a"}, 5, {"type": "text", "text": 7}, {"type": "text", "text": "b"}]
    answer.take(said(choices=[{"index": 0, "delta": {"content": parts}}]))
    assert (answer.choices[0].tokens, answer.choices[0].text) == (2, ["ab"])


def test_an_end_that_the_api_here_does_not_know_is_not_turned_into_another() -> None:
    answer = Answer(1, max_tokens=10, max_prompt=100)
    with pytest.raises(ServerError, match="abort"):
        answer.take(said(choices=[{"index": 0, "delta": {}, "finish_reason": "abort"}]))


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, None), ("7", 7.0), (" 7 ", 7.0), ("0", 0.0), ("9" * 30, 3600.0), ("-1", None), ("soon", None), ("", None),
     ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0), ("Wed, 21 Oct 2099 07:28:00 GMT", 3600.0), ("½", None)],
)  # fmt: skip
def test_retry_after_in_seconds_or_as_a_date(value: str | None, seconds: float | None) -> None:
    assert retry_after_s(value) == seconds


def test_the_distribution_installs_and_is_loaded_by_its_entry_point(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT / "plugins" / "openai_upstream", source)
    site = tmp_path / "site"
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(site)]
    done = subprocess.run([sys.executable, *pip, str(source)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from policies.manager import make_manager; from policies.registry import Registry;"
        "spec = Registry.from_manager(make_manager(['openai_upstream'])).launcher('openai_upstream');"
        "import importlib; module, _, name = spec.target.partition(':');"
        "print(getattr(importlib.import_module(module), name).__module__, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(site)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["forebay_openai_upstream.launcher", "False"], done.stderr


@pytest.mark.parametrize("finish", ["tool_calls", "length"])
def test_words_inside_a_call_go_behind_it(finish: str) -> None:
    """A server that speaks while a call is open spoils no arguments: its words follow the call."""

    def piece(index: int, arguments: str, name: str | None = None) -> list[dict[str, Any]]:
        return [{"index": index, "function": {"arguments": arguments, **({"name": name} if name else {})}}]

    answer = Answer(1, max_tokens=99, max_prompt=99)
    deltas: list[dict[str, Any]] = [
        {"tool_calls": piece(0, '{"a": ', "look")},
        {"content": "Wait"},
        {"content": ".", "tool_calls": piece(0, "1}")},
        {"tool_calls": piece(1, "{}", "stay")},
        {"content": "Done."},
    ]
    for delta in deltas:
        answer.take(json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode())
    answer.take(json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}).encode())
    text = "".join(answer.choices[0].text)
    calls = [json.loads(call) for call in re.findall("<tool_call>(.*?)</tool_call>", text, re.DOTALL)]
    assert calls == [{"name": "look", "arguments": {"a": 1}}, {"name": "stay", "arguments": {}}]
    words = [said.strip() for said in re.split("<tool_call>.*?</tool_call>", text, flags=re.DOTALL)]
    assert words == ["", "Wait.", "Done."]
