"""Timings are true and bounded, however long a sequence lives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.workers.engine.drive import Drive, request
from workers.engine.record import MAX_CHUNKS, MAX_PHASES, MAX_STALLS, GapDigest, SequenceRecord

MS = 1_000_000


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_quantiles_are_close(gaps: list[int], q: float) -> None:
    """Within a bucket's width (6.3 % of its middle) of the exact order statistic; the maximum is exact."""
    digest = GapDigest()
    for gap in gaps:
        digest.add(gap)
    exact = sorted(gaps)[max(1, -int(-q * len(gaps) // 1)) - 1]
    assert abs(digest.quantile(q) - exact) <= max(1, exact / 15)
    assert digest.maximum == max(gaps)
    assert digest.total == sum(gaps)
    assert digest.quantile(1.0) <= digest.maximum


def test_empty_digest() -> None:
    assert GapDigest().quantile(0.5) == 0


def test_chunks_are_bounded_and_totals_true() -> None:
    drive = Drive(max_step_tokens=4, blocks=100)
    drive.add(request("q", 200, 3))
    drive.run()
    (record,) = drive.planner.take_records()
    assert len(record.chunks) == MAX_CHUNKS
    assert sum(chunk.tokens for chunk in record.chunks) == 200
    assert record.phases[0].chunks == 50
    assert record.phases[0].tokens == 200
    assert record.chunks[-1].end_ns == record.phases[0].end_ns


def test_phases_of_a_preempted_sequence() -> None:
    """prefill → decode → preempted → prefill (recompute) → decode, without gap or overlap; tokens add up."""
    drive = Drive(blocks=12, block_size=4, prefix_cache=False, max_step_tokens=16)
    drive.add(*(request(f"q{i}", 10, 20) for i in range(3)))
    drive.run()
    records = {record.id: record for record in drive.planner.take_records()}
    record = max(records.values(), key=lambda r: r.preemptions)
    kinds = [phase.kind for phase in record.phases]
    assert kinds[:5] == ["prefill", "decode", "preempted", "prefill", "decode"]
    assert [phase.recompute for phase in record.phases[:4]] == [False, False, False, True]
    assert record.phases[2].reason == "kv_pressure"
    assert record.phases[2].blocks_freed > 0
    for before, after in zip(record.phases, record.phases[1:], strict=False):
        assert before.start_ns <= before.end_ns <= after.start_ns
    assert sum(phase.tokens for phase in record.phases if phase.kind == "decode") == 20
    assert record.recomputed > 0
    assert sum(r.recomputed for r in records.values()) == drive.planner.roster.recomputed
    assert (record.prompt_computed, record.output_tokens, record.finish) == (10, 20, "length")
    assert record.free_blocks > 0
    assert len(record.phases) <= MAX_PHASES


def test_choices_have_records_of_their_own() -> None:
    drive = Drive()
    drive.add(request("q", 6, 4, n=3))
    drive.run()
    records = drive.planner.take_records()
    assert {(record.index, record.n) for record in records} == {(0, 3), (1, 3), (2, 3)}
    assert all(record.scheduled_ns and record.first_token_ns and record.finished_ns for record in records)
    assert drive.planner.take_records() == []


def test_stalls() -> None:
    """A gap is a stall when it is long and out of proportion; the list is bounded."""
    record = SequenceRecord("q", 0, 1, "t", 4)
    now = 1000 * MS
    record.admitted(now, 0, 9)
    for _ in range(20):
        now += 10 * MS
        record.produced(now, 1)
    assert record.stalls == []
    now += 500 * MS
    record.produced(now, 1)
    assert record.stalls == [(now, 500 * MS)]
    for _ in range(100):
        for _ in range(200):
            now += MS
            record.produced(now, 1)
        now += 500 * MS
        record.produced(now, 1)
    assert len(record.stalls) == MAX_STALLS
    assert record.gaps.maximum == 500 * MS
    assert abs(record.gaps.quantile(0.5) - MS) < 0.07 * MS


def test_phases_are_bounded() -> None:
    record = SequenceRecord("q", 0, 1, "t", 4)
    for round_ in range(100):
        now = (round_ + 1) * 100
        record.admitted(now, 0, 1)
        record.produced(now + 10, 1)
        record.preempted(now + 20, "runner_error", 1)
    record.ended(20_000)
    assert len(record.phases) == MAX_PHASES
    assert record.phases[-1].end_ns == 20_000
