"""What a step may still compute of prompts: rows, work, the end of one prompt, and progress however deep."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.engine.allowance import Allowance

OPEN = 10**9
"""The end of a prompt that never ends here."""

sizes = st.integers(0, 5000)
places = st.tuples(sizes, st.integers(1, 3000), st.booleans())


def work(rows: int, start: int, twice_at: int) -> int:
    """Token by token, from what a token takes by definition: 1 at the start, 2 at ``twice_at``, and between them even.

    Times 2 ``twice_at``, in the middle of each token's place, so that it is whole.
    """
    return sum(2 * twice_at + 2 * position + 1 for position in range(start, start + rows))


def most(budget: int, twice_at: int) -> int:
    """The work of a budget: of prompts of 512 tokens, and one shorter than that if there is no whole one."""
    return budget * work(512, 0, twice_at) // 512 if budget > 512 else work(budget, 0, twice_at)


@given(budget=st.integers(1, 2048), twice_at=st.integers(1, 20_000), prompts=st.lists(places, min_size=1, max_size=6))
def test_rows_and_work_are_bounded(budget: int, twice_at: int, prompts: list[tuple[int, int, bool]]) -> None:
    """The first prompt's quarter aside, a step is no longer than its budget at a prompt's start, but for one end."""
    over = budget // 8
    room = Allowance(budget, over, twice_at)
    rows = done = 0
    for number, (start, wanted, ends) in enumerate(prompts):
        if not room.open:
            break
        count = room.fit(start, wanted, start + wanted if ends else OPEN)
        assert 0 <= count <= wanted
        room.book(start, count, wanted)
        rows, done = rows + count, done + work(count, start, twice_at)
        finished = ends and count == wanted
        assert rows <= budget + finished * over
        if number or count > -(-budget // 4):
            assert done <= most(budget + finished * over, twice_at)
        if count < wanted or rows > budget or done > most(budget, twice_at):
            assert not room.open, "whoever got less, or ran over, is the last"


@given(budget=st.integers(4, 2048), twice_at=st.integers(1, 20_000), start=sizes)
def test_a_chunk_is_as_long_as_it_may_be(budget: int, twice_at: int, start: int) -> None:
    rows = Allowance(budget, 0, twice_at).fit(start, OPEN, OPEN)
    least = -(-budget // 4)
    assert rows == budget or work(rows + 1, start, twice_at) > most(budget, twice_at)
    assert rows == least or work(rows, start, twice_at) <= most(budget, twice_at)
    assert rows >= least


@given(budget=st.integers(1, 512), twice_at=st.integers(0, 20_000))
def test_at_the_start_a_chunk_is_the_budget(budget: int, twice_at: int) -> None:
    assert Allowance(budget, 0, twice_at).fit(0, OPEN, OPEN) == budget


def test_four_times_the_budget_is_four_times_the_work() -> None:
    """Four prompts of 512 tokens fit, of one of 2,048 four fifths: the gap beside both is four times that of one."""
    room = Allowance(2048, twice_at=2304)
    assert room.fit(0, 2048, 2048) == 1670
    for _ in range(4):
        assert room.fit(0, 512, 512) == 512
        room.book(0, 512, 512)
    assert not room.open


def test_what_is_left_goes_to_the_next_in_line() -> None:
    """Not counted, rows add up to the budget; counted, an end deep in a prompt leaves fewer for who is behind."""
    plain, counted = Allowance(512), Allowance(512, twice_at=3072)
    for room in (plain, counted):
        room.book(1800, room.fit(1800, 200, 2000), 200)
    assert plain.fit(0, OPEN, OPEN) == 312
    assert counted.fit(0, OPEN, OPEN) == 222


def test_a_prompt_as_long_as_the_budget_ends_beside_an_eighth_of_it_in_decodes() -> None:
    for decodes in range(65):
        assert Allowance(512 - decodes, decodes, 3072).fit(0, 512, 512) == 512
    assert Allowance(512 - 65, 64, 3072).fit(0, 512, 512) == 447, "one more, and nobody ends: no row beyond the budget"


def test_only_an_end_runs_over() -> None:
    room = Allowance(100, 12)
    assert room.fit(0, 112, 112) == 112
    assert room.fit(0, 113, 113) == 100
    assert room.fit(0, 112, 200) == 100, "a cap on chunks cuts it here, it goes on"


def test_who_gets_less_than_it_wants_is_the_last() -> None:
    """What is left is enough for the start of a prompt, and not for a place deep in one."""
    room = Allowance(40, 0, 10)
    room.book(0, 39, 39)
    assert room.open
    assert room.fit(300, 50, OPEN) == 0
    room.book(300, 0, 50)
    assert not room.open
    room = Allowance(40, 0, 10)
    room.book(300, room.fit(300, 50, OPEN), 50)
    assert not room.open
