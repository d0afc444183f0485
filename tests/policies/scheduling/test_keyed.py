"""Lines ordered by a key, against plain sorted lists."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.scheduling._keyed import KeyedHeads, KeyedLines
from policies.testing import make_job
from policies.types import JobId

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["push", "push", "front", "rekey", "pop", "discard"]), st.sampled_from("abc"), st.integers(0, 9)
    ),
    max_size=120,
)


@given(OPERATIONS)
def test_keyed_lines_equal_sorted_lists(operations: list[tuple[str, str, int]]) -> None:
    lines: KeyedLines[str] = KeyedLines()
    model: dict[str, list[tuple[Any, str]]] = {"a": [], "b": [], "c": []}
    keys: dict[str, int] = {}
    serial = 0
    for action, flow, number in operations:
        line = model[flow]
        head = line[0][1] if line else None
        changed = None
        if action in ("push", "front"):
            serial += 1
            job = make_job(f"j{serial}", flow)
            keys[job.id] = number
            place = (1, number, serial) if action == "push" else (0, -serial, 0)
            line.append((place, job.id))
            changed = (lines.push if action == "push" else lines.push_front)(flow, job, number) is not None
        elif action == "rekey" and line:
            place, job_id = line[number % len(line)]
            before = keys[job_id]
            keys[job_id] = number
            if place[0]:
                line[number % len(line)] = ((1, number, place[2]), job_id)
            changed = lines.rekey(JobId(job_id), number)
            line.sort()
            if before != number and job_id in (head, line[0][1]):
                assert changed
        elif action == "pop" and line:
            assert lines.pop(lines.open[flow]).id == line.pop(0)[1]
        elif action == "discard" and line:
            _, job_id = line.pop(number % len(line))
            found = lines.discard(JobId(job_id))
            assert found is not None
            assert found[0].key == flow
            assert lines.discard(JobId(job_id)) is None
        line.sort()
        if changed is False:
            assert line[0][1] == head
        assert len(lines) == sum(map(len, model.values()))
        for name, expected in model.items():
            assert (name in lines.open) == bool(expected)
            if expected:
                head_entry = lines.open[name].heap[0]
                assert head_entry[2].id == expected[0][1]
                assert head_entry[4] == keys[expected[0][1]]


def test_an_id_is_queued_once() -> None:
    lines: KeyedLines[str] = KeyedLines()
    lines.push("a", make_job("x"), 1)
    with pytest.raises(ValueError, match="'x' is already queued"):
        lines.push("b", make_job("x"), 2)
    assert len(lines) == 1


def test_stale_entries_are_swept() -> None:
    lines: KeyedLines[str] = KeyedLines()
    lines.push("a", make_job("first"), -1)
    lines.push("a", make_job("moving"), 0)
    for key in range(10_000):
        lines.rekey(JobId("moving"), key)
    for i in range(10_000):
        lines.push("a", make_job(f"j{i}"), i)
        lines.discard(JobId(f"j{i}"))
    line = lines.open["a"]
    assert len(line.heap) < 200
    assert [lines.pop(line).id, lines.pop(line).id] == ["first", "moving"]


def test_heads_are_ranked_by_their_keys_also_returned_ones() -> None:
    heads: KeyedHeads[str] = KeyedHeads()
    for name, flow, key in (("a1", "a", 3), ("a2", "a", 1), ("b1", "b", 2), ("c1", "c", 9)):
        heads.push(flow, make_job(name, flow), key)
    heads.push_front("c", make_job("c0", "c"), 8)
    order = []
    while (line := heads.first(lambda job: True)) is not None:
        order.append(heads.pop(line).id)
    assert order == ["a2", "b1", "a1", "c0", "c1"]
    heads.push("a", make_job("big", "a"), 1)
    heads.push("b", make_job("small", "b"), 2)
    assert heads.first(lambda job: job.id == "small") is heads.lines.open["b"]
    assert heads.discard(JobId("big")) is not None
    assert heads.discard(JobId("big")) is None
    assert [job.id for job in heads.drain()] == ["small"]
    assert heads.first(lambda job: True) is None
