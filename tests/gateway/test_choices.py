"""From tokens to text: splits never matter, stop strings vanish, billing and log probabilities are exact."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.choices import ChoiceDelta, ChoiceStream
from gateway.stops import StopMatcher
from tests.gateway.tiny_tokenizer import EOS, tiny_tokenizer
from workers.protocol import SequenceOutput, TokenLogprob

TOKENIZER = tiny_tokenizer()
ALPHABET = "ab \né😀"


def tokens_of(text: str) -> list[int]:
    return TOKENIZER.encode_text(text)


def byte_tokens(text: str) -> list[int]:
    """One token per byte: characters beyond ASCII span several tokens."""
    single = {TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.vocab_size) if len(TOKENIZER.token_bytes(i)) == 1}
    return [single[bytes([byte])] for byte in text.encode()]


def stream(*stops: str, min_tokens: int = 0, logprobs: bool = False) -> ChoiceStream:
    return ChoiceStream(
        TOKENIZER.decoder(),
        stops=stops,
        min_tokens=min_tokens,
        token_bytes=TOKENIZER.token_bytes if logprobs else None,
    )


def cut(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string: the one complete first, of those the longest."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return text[: min(found)[1]] if found else text


def groups(tokens: list[int], sizes: list[int]) -> list[list[int]]:
    out, at = [], 0
    for size in [*sizes, len(tokens)]:
        out.append(tokens[at : at + size])
        at += size
    return out


def run(choice: ChoiceStream, parts: list[list[int]], finish: str = "length") -> list[ChoiceDelta]:
    deltas = []
    for i, part in enumerate(parts):
        deltas.append(choice.feed(part, finish=finish if i == len(parts) - 1 else None))  # type: ignore[arg-type]
    return deltas


STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=4).map(tuple)
SIZES = st.lists(st.integers(0, 5), max_size=40)


@given(st.text(ALPHABET, max_size=40), STOPS, SIZES, st.booleans())
def test_any_split_gives_the_text_cut_at_the_first_stop(
    text: str, stops: tuple[str, ...], sizes: list[int], by_byte: bool
) -> None:
    tokens = byte_tokens(text) if by_byte else tokens_of(text)
    choice = stream(*stops)
    deltas = run(choice, groups(tokens, sizes))
    assert "".join(delta.text for delta in deltas) == cut(text, stops)
    assert choice.finish == ("stop" if cut(text, stops) != text or any(s in text for s in stops) else "length")
    assert sum(delta.billed for delta in deltas) == choice.billed <= len(tokens)
    assert sum(delta.finish is not None for delta in deltas) == 1


@given(st.text(ALPHABET, max_size=30), STOPS, SIZES)
def test_billing_does_not_depend_on_the_split(text: str, stops: tuple[str, ...], sizes: list[int]) -> None:
    tokens = byte_tokens(text)
    one_by_one = stream(*stops)
    run(one_by_one, [[token] for token in tokens] + [[]])
    grouped = stream(*stops)
    run(grouped, groups(tokens, sizes))
    assert grouped.billed == one_by_one.billed
    if not any(stop in text for stop in stops):
        assert grouped.billed == len(tokens)


@given(st.lists(st.integers(0, 255), max_size=30), SIZES)
def test_never_half_a_character(data: list[int], sizes: list[int]) -> None:
    """Any bytes at all: what is shown is the text with U+FFFD for what is no character, wherever they were split."""
    single = {TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.vocab_size) if len(TOKENIZER.token_bytes(i)) == 1}
    tokens = [single[bytes([byte])] for byte in data]
    shown = "".join(delta.text for delta in run(stream(), groups(tokens, sizes)))
    assert shown == bytes(data).decode("utf-8", "replace")


def test_a_character_waits_for_its_last_byte() -> None:
    choice = stream()
    assert [choice.feed([token]).text for token in byte_tokens("a😀b")] == ["a", "", "", "", "😀", "b"]


def test_a_stop_string_across_messages_is_removed_and_its_last_token_billed() -> None:
    choice = stream("END")
    deltas = [choice.feed([token]) for token in byte_tokens("abENDcd")]
    assert [delta.text for delta in deltas] == ["a", "b", "", "", "", "", ""]
    assert [delta.finish for delta in deltas] == [None, None, None, None, "stop", None, None]
    assert [delta.stopped for delta in deltas] == [False] * 4 + [True] + [False] * 2
    assert choice.billed == 5


def test_tokens_past_a_stop_in_the_same_message_are_not_billed() -> None:
    choice = stream("END")
    delta = choice.feed(byte_tokens("abENDcdefg"))
    assert (delta.text, delta.billed, delta.finish, delta.stopped) == ("ab", 5, "stop", True)
    assert choice.feed(byte_tokens("more"), finish="length") == ChoiceDelta(0)
    assert choice.billed == 5


def test_a_stop_that_the_engine_ended_with_too_needs_no_cancel() -> None:
    delta = stream("END").feed(byte_tokens("abENDcd"), finish="length")
    assert (delta.text, delta.finish, delta.stopped, delta.billed) == ("ab", "stop", False, 5)


def test_what_looked_like_a_stop_is_shown_when_it_is_none() -> None:
    choice = stream("END", "ENDE")
    assert choice.feed(byte_tokens("aEN")).text == "a"
    assert choice.feed(byte_tokens("x")).text == "ENx"
    assert choice.feed(byte_tokens("E")).text == ""
    assert choice.feed([], finish="length").text == "E"


@pytest.mark.parametrize("finish", ["length", "stop", "cancelled", "error"])
def test_held_text_comes_out_with_any_end(finish: str) -> None:
    choice = stream("END")
    assert choice.feed(byte_tokens("EN")).text == ""
    delta = choice.feed([], finish=finish, error="internal" if finish == "error" else None)  # type: ignore[arg-type]
    assert (delta.text, delta.finish) == ("EN", finish)
    assert delta.error == ("internal" if finish == "error" else None)


def test_an_error_without_a_code_is_an_internal_one() -> None:
    delta = stream().feed(byte_tokens("a"), finish="error")
    assert (delta.finish, delta.error) == ("error", "internal")


def test_an_incomplete_character_at_the_end_becomes_one_replacement() -> None:
    choice = stream()
    assert choice.feed(byte_tokens("é")[:1]).text == ""
    assert choice.feed([], finish="length").text == "\ufffd"


def test_the_end_token_is_billed_and_has_no_text() -> None:
    choice = stream()
    delta = choice.feed([*tokens_of("ab"), EOS], finish="stop")
    assert (delta.text, delta.finish) == ("ab", "stop")
    assert delta.billed == len(tokens_of("ab")) + 1


def test_stop_strings_count_only_after_min_tokens() -> None:
    choice = stream("b", min_tokens=3)
    deltas = [choice.feed([token]) for token in byte_tokens("abcdb!")]
    assert "".join(delta.text for delta in deltas) == "abcd"
    assert choice.billed == 5


def test_of_two_stops_the_one_that_is_complete_first_wins_whatever_the_split() -> None:
    assert stream("abcd", "bc").feed(byte_tokens("xabcd")).text == "xa"
    assert "".join(d.text for d in run(stream("abcd", "bc"), [[t] for t in byte_tokens("xabcd")])) == "xa"
    assert stream("bc", "abc").feed(byte_tokens("xabc")).text == "x"


@given(st.lists(st.text("abc", max_size=4), max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=4))
def test_the_matcher_holds_back_only_what_may_become_a_stop(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(tuple(stops))
    seen = shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        seen += piece
        if matcher.stopped:
            break
        held = seen[len(shown) :]
        assert seen.startswith(shown)
        assert not held or any(stop.startswith(held) for stop in stops)
    assert shown + matcher.flush() == cut(seen, stops)


# -- messages of a worker ----------------------------------------------------------------------------------------------


def output(tokens: list[int], total: int, **fields: object) -> SequenceOutput:
    return SequenceOutput(id="r", tokens=tokens, output_tokens=total, **fields)  # type: ignore[arg-type]


def test_a_repeated_message_is_neither_shown_nor_billed_twice() -> None:
    a, b, c = byte_tokens("abc")
    choice = stream()
    assert choice.take(output([a, b], 2)).text == "ab"
    again = choice.take(output([a, b], 2))
    assert (again.text, again.billed) == ("", 0)
    overlap = choice.take(output([b, c], 3, finish="length"))
    assert (overlap.text, overlap.billed, choice.billed) == ("c", 1, 3)


def test_a_lost_message_ends_the_choice_with_an_error_instead_of_a_hole_in_the_text() -> None:
    a, _, c = byte_tokens("abc")
    choice = stream()
    choice.take(output([a], 1))
    delta = choice.take(output([c], 3))
    assert (delta.text, delta.finish, delta.error) == ("", "error", "lost_output")
    assert choice.billed == 1
    assert choice.take(output([c], 4)) == ChoiceDelta(0)


def test_text_of_an_upstream_is_cut_and_billed_by_its_counter() -> None:
    choice = stream("END")
    first = choice.take(SequenceOutput(id="r", text="hello E", output_tokens=3))
    assert (first.text, first.billed) == ("hello ", 3)
    second = choice.take(SequenceOutput(id="r", text="ND more", output_tokens=5))
    assert (second.text, second.billed, second.finish, second.stopped) == ("", 2, "stop", True)
    assert choice.billed == 5


def test_an_upstreams_end_flushes_what_was_held() -> None:
    choice = stream("END")
    delta = choice.take(SequenceOutput(id="r", text="xE", output_tokens=1, finish="length"))
    assert (delta.text, delta.finish, delta.billed) == ("xE", "length", 1)


# -- log probabilities -------------------------------------------------------------------------------------------------


def scores(tokens: list[int]) -> list[TokenLogprob]:
    return [TokenLogprob(token, -0.5, [(token, -0.5), (token + 1, -1.5)]) for token in tokens]


@given(st.text(ALPHABET, max_size=30), STOPS, SIZES)
def test_scores_line_up_with_the_text_in_every_split(text: str, stops: tuple[str, ...], sizes: list[int]) -> None:
    tokens = byte_tokens(text)
    choice = stream(*stops, logprobs=True)
    parts = groups(tokens, sizes)
    scored = []
    shown = ""
    for i, part in enumerate(parts):
        delta = choice.feed(part, scores(part), "length" if i == len(parts) - 1 else None)
        shown += delta.text
        scored.extend(delta.scored)
        # While it runs, what is scored is never ahead of what is shown.
        if delta.finish is None and choice.finish is None:
            assert shown.encode().startswith(b"".join(entry.data for entry in scored))
    data = b"".join(entry.data for entry in scored)
    assert data == shown.encode()
    assert [entry.offset for entry in scored] == sorted(entry.offset for entry in scored)
    for position, entry in enumerate(scored):
        assert entry.offset == len(b"".join(e.data for e in scored[:position]).decode("utf-8", "ignore"))


def test_the_end_token_has_no_score() -> None:
    tokens = [*byte_tokens("ab"), EOS]
    delta = stream(logprobs=True).feed(tokens, scores(tokens), "stop")
    assert [entry.text for entry in delta.scored] == ["a", "b"]
    assert delta.scored[0].top[0].text == "a"
    assert delta.scored[0].logprob == -0.5


def test_a_token_that_a_stop_cuts_in_the_middle_keeps_its_score() -> None:
    token = next(i for i in range(TOKENIZER.vocab_size) if TOKENIZER.token_bytes(i) == b"the")
    delta = stream("e", logprobs=True).feed([token, token], scores([token, token]))
    assert (delta.text, [entry.text for entry in delta.scored]) == ("th", ["the"])


def test_part_of_a_character_is_shown_as_bytes() -> None:
    tokens = byte_tokens("é")
    delta = stream(logprobs=True).feed(tokens, scores(tokens))
    assert [entry.text for entry in delta.scored] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert b"".join(entry.data for entry in delta.scored) == "é".encode()


def test_without_log_probabilities_nothing_is_scored() -> None:
    tokens = byte_tokens("ab")
    assert stream().feed(tokens, scores(tokens)).scored == ()
