"""Guesses by lookup: what followed the same tokens before, and never from the tokens' own place."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.engine.ngram import STRIDE, NgramIndex


def proposals(tokens: list[int], begin: int, count: int = 3, shortest: int = 2, longest: int = 4) -> list[list[int]]:
    """What is guessed after each of ``begin`` … all tokens, by one index that goes along."""
    index = NgramIndex(shortest, longest)
    return [index.propose(tokens[:end], count)[0] for end in range(begin, len(tokens) + 1)]


def test_a_copy_is_foretold() -> None:
    """As many tokens as are asked for, from where the last two stood before."""
    assert NgramIndex(2, 4).propose([1, 2, 3, 4, 5, 6, 9, 1, 2], 3) == ([3, 4, 5], 2)
    assert NgramIndex(2, 4).propose([1, 2, 3, 4, 5, 6, 9, 1, 2], 5) == ([3, 4, 5, 6, 9], 2)


def test_nothing_is_foretold_of_what_is_new() -> None:
    """One token in common is too little; and rows are not found at their own place."""
    assert proposals([1, 2, 3, 4, 5, 6, 7, 2], 1) == [[]] * 8


def test_the_longer_row_wins_over_the_later_one() -> None:
    """After 3, 4, 5, 6 came 7; after 5, 6 alone came 8, later."""
    assert NgramIndex(2, 4).propose([3, 4, 5, 6, 7, 0, 5, 6, 8, 0, 3, 4, 5, 6], 1) == ([7], 4)


def test_a_place_is_kept_while_it_is_right() -> None:
    """Once it copies from the beginning, a later place with the same last tokens does not lead away."""
    text = [1, 2, 3, 4, 5, 6, 7, 0, 9, 4, 5, 8, 0]
    index = NgramIndex(2, 2)
    line = [*text, 1, 2]
    found = []
    for token in (3, 4, 5, 6, 7):
        found.append(index.propose(line, 1)[0])
        line.append(token)
    assert found == [[3], [4], [5], [6], [7]]


def test_a_repetition_goes_on() -> None:
    """What is copied from may reach into the guesses."""
    assert NgramIndex(2, 4).propose([7, 1, 2, 1, 2, 1, 2], 5)[0] == [1, 2, 1, 2, 1]
    assert NgramIndex(1, 1).propose([5, 5], 4)[0] == [5, 5, 5, 5]


def test_a_long_prompt_is_taken_in_by_and_by() -> None:
    """So much per call; no guess before all is in."""
    tokens = [*range(2 * STRIDE + 10), 5, 6]
    index = NgramIndex(2, 4)
    assert [index.propose(tokens, 2)[0] for _ in range(3)] == [[], [], [7, 8]]


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 6),
    st.integers(1, 20),
)
def test_every_guess_followed_the_same_tokens(
    tokens: list[int], shortest: int, more: int, count: int, begin: int
) -> None:
    """Whatever was asked before: the last ``shortest`` tokens stand earlier, and the guesses stand behind them; and
    where they stand earlier, there is a guess."""
    index = NgramIndex(shortest, shortest + more)
    for end in range(min(begin, len(tokens)), len(tokens) + 1):
        line = tokens[:end]
        guesses, match = index.propose(line, count)
        last = line[-shortest:]
        places = [at for at in range(shortest, end) if line[at - shortest : at] == last]
        if not guesses:
            assert end < shortest or not places
            continue
        assert len(guesses) == count
        extended = line + guesses
        assert match >= 1
        assert any(extended[at : at + count] == guesses and line[at - match : at] == line[-match:] for at in places)
