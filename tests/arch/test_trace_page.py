"""docs/reading-a-trace.md shows spans, events, attributes and tags that exist."""

from __future__ import annotations

import re

from tests.arch.source import ROOT

PAGE = (ROOT / "docs" / "reading-a-trace.md").read_text()
CONTRACT = (ROOT / "docs" / "telemetry.md").read_text()
LINE = re.compile(r"^[│├└ ]*(?P<mark>[·→✗]? ?)(?P<name>[^ ].*?) {2,}(?P<rest>.*)$")


def trees() -> list[list[str]]:
    """The lines of every tree on the page, without the heading."""
    blocks = re.findall(r"```text\n(.*?)```", PAGE, re.S)
    return [block.splitlines()[1:] for block in blocks]


def test_the_trees_consist_of_what_is_documented() -> None:
    assert len(trees()) == 6
    names: set[str] = set()
    attributes: set[str] = set()
    for line in [line for tree in trees() for line in tree]:
        if "→" in line:
            assert f"`{line.split('→ ')[1]}`" in CONTRACT, line
            continue
        found = LINE.match(line)
        assert found is not None, line
        names.add(found["name"].replace("smollm2", "{model}"))
        values_gone = re.sub(r'"[^"]*"|\[[^\]]*\]', "-", found["rest"])
        attributes |= set(re.findall(r"(?:^| )([a-z_.]+)=(?=[^ ])", values_gone))
    assert {"queue", "preempted", "chat {model}", "kv transfer", "first_token", "stall"} <= names
    assert [name for name in sorted(names) if f"`{name}`" not in CONTRACT] == []
    known = set(re.findall(r"`([a-z_.]+)`", CONTRACT))
    assert {name for name in attributes if not {name, f"forebay.{name}"} & known} == set()


def test_the_searches_name_tags_and_outcomes_that_exist() -> None:
    tags = re.findall(r"`?((?:forebay\.|error\.)[a-z_.]+)=([\w./-]+)", PAGE.split("## One that went well")[0])
    assert len(tags) >= 10
    assert [name for name, _ in tags if f"`{name}`" not in CONTRACT] == []
    outcomes = {value for name, value in tags if name == "forebay.outcome"}
    assert outcomes <= set(re.findall(r"`(ok|cancelled|throttled|shed|timeout|error)`", CONTRACT))


def test_every_station_of_the_contract_is_on_the_page() -> None:
    spans = set(re.findall(r"^\| `([^`]+)` \| (?:SERVER|CLIENT|INTERNAL)", CONTRACT, re.M))
    missing = {name for name in spans if name.replace("{model}", "smollm2") not in PAGE}
    assert missing == set()
