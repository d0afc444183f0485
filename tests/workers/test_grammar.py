"""Grammars over a small real vocabulary: what they allow, how they end, and that bad ones only raise."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.grammars import json_text
from tests.workers import tiny_model
from workers import grammar_child
from workers.grammar import GrammarError, Mask, Matcher, Vocabulary
from workers.tokenizer import Tokenizer

ENDS = [0, 2]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write(tmp_path_factory.mktemp("vocabulary"))


@pytest.fixture(scope="module")
def vocabulary(directory: Path) -> Vocabulary:
    return Vocabulary.load(directory)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


def ids(mask: Mask) -> list[int]:
    """The tokens that a mask allows."""
    return [int(i) for i in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]


def walk(matcher: Matcher, seed: int, most: int = 400) -> list[int]:
    """A random text of the grammar, token by token, until it can only end; the shorter way is taken more and more."""
    chance = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < most:
        allowed = ids(matcher.mask())
        if allowed == ENDS or (ENDS[0] in allowed and chance.random() < 0.5):
            return tokens
        allowed = [token for token in allowed if token not in ENDS]
        quotes = [token for token in allowed if token in _CLOSING]
        token = chance.choice(quotes if quotes and chance.random() < 0.6 else allowed)
        matcher.consume([token])
        tokens.append(token)
    return tokens


_CLOSING: set[int] = set()


@pytest.fixture(autouse=True, scope="module")
def closing(tokenizer: Tokenizer) -> Iterator[None]:
    _CLOSING.update(token for sign in '"}],:' for token in tokenizer.encode_text(sign))
    yield
    _CLOSING.clear()


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "kind": {"enum": ["cat", "dog", None]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_allowed_is_a_value_of_the_schema(vocabulary: Vocabulary, tokenizer: Tokenizer, seed: int) -> None:
    value = json.loads(tokenizer.decode(walk(vocabulary.compile(json_text(SCHEMA)), seed)))
    assert list(value) == ["name", "age", "kind", "tags"]
    assert len(value["name"]) <= 8
    assert 0 <= value["age"] <= 130
    assert value["kind"] in ("cat", "dog", None)
    assert len(value["tags"]) <= 2


@pytest.mark.parametrize(
    "text",
    ['{"name": "Bo", "age": 3, "kind": "cat", "tags": []}', '{\n  "name":"","age":0,"kind":null,"tags":["a","b"]\n}'],
)
def test_every_way_to_cut_a_text_into_tokens_is_allowed(
    vocabulary: Vocabulary, tokenizer: Tokenizer, text: str
) -> None:
    """Byte by byte and as the tokenizer would: the mask holds the token that comes, each time."""
    for tokens in (tokenizer.encode_text(text), [tokenizer.encode_text(sign)[0] for sign in text]):
        matcher = vocabulary.compile(json_text(SCHEMA))
        for token in tokens:
            assert token in ids(matcher.mask())
            matcher.consume([token])
        assert ids(matcher.mask()) == ENDS
        assert matcher.ended


def test_a_token_that_does_not_fit_raises_and_says_nothing_of_the_text(vocabulary: Vocabulary) -> None:
    matcher = vocabulary.compile(json_text({"enum": ["secret"]}))
    with pytest.raises(GrammarError) as error:
        matcher.consume([5, 6, 7])
    assert "secret" not in str(error.value)


def test_forks_are_independent(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    first = vocabulary.compile(json_text({"enum": ["ab", "cd"]}))
    start = first.mask().copy()
    second = first.fork()
    first.consume(tokenizer.encode_text('"a'))
    assert second.mask().tolist() == start.tolist()
    second.consume(tokenizer.encode_text('"c'))
    assert set(ids(first.mask())).isdisjoint(ids(second.mask()))


def test_end_tokens_and_control_tokens_are_not_text(vocabulary: Vocabulary) -> None:
    """A free string may hold any text, but no control token; and the end comes only where the grammar ends."""
    matcher = vocabulary.compile('start: "x" /[^y]*/')
    assert set(ENDS).isdisjoint(ids(matcher.mask()))
    matcher.consume([ids(matcher.mask())[0]])
    allowed = ids(matcher.mask())
    assert set(ENDS) < set(allowed)
    assert 1 not in allowed
    assert len(allowed) > 300


def test_a_model_without_an_end_takes_no_grammar() -> None:
    with pytest.raises(GrammarError, match="end token"):
        Vocabulary([b"a", b"b"], [], [], 2)


BAD: list[Any] = [
    {"type": "nope"},
    {"type": 5},
    {"type": "object", "properties": {"a": {"type": "strnig"}}},
    {"$ref": "#/$defs/missing"},
    {"$ref": "https://example.com/schema.json"},
    {"type": "string", "pattern": "("},
    {"type": "string", "pattern": "(?=x)y"},
    {"type": "string", "pattern": "a{3,1}"},
    {"type": "string", "format": "no-such-format"},
    {"type": "object", "properties": {"a": False}, "required": ["a"]},
    {"type": "array", "uniqueItems": True},
    {"not": {"type": "string"}},
    {"enum": []},
    {"if": {"type": "string"}, "then": {"type": "string"}},
    {"type": "integer", "minimum": 5, "maximum": 3},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
]


@pytest.mark.parametrize("schema", BAD, ids=str)
def test_a_schema_that_cannot_be_enforced_says_why(vocabulary: Vocabulary, schema: dict[str, Any]) -> None:
    """engine F1, security 57: one short line, without addresses, paths or the compiler's own source."""
    with pytest.raises(GrammarError) as error:
        vocabulary.compile(json_text(schema))
    text = str(error.value)
    assert 5 < len(text) <= 300
    for leak in ("0x", ".rs", "\n", "x-guidance", "panicked", "%json"):
        assert leak not in text


def test_a_schema_without_any_text_says_so(vocabulary: Vocabulary) -> None:
    """It compiles, and allows no first token."""
    with pytest.raises(GrammarError, match="no finite text matches it"):
        vocabulary.compile(json_text({"$ref": "#"})).mask()


def test_a_caller_cannot_loosen_the_compiler(vocabulary: Vocabulary) -> None:
    loose = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    with pytest.raises(GrammarError, match="uniqueItems"):
        vocabulary.compile(json_text(loose))


def test_strings_in_a_schema_cannot_become_rules(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    matcher = vocabulary.compile(json_text({"enum": ['"\nstart: "x"\n%ignore /./', "*/ }"]}))
    assert tokenizer.encode_text("x")[0] not in ids(matcher.mask())


def ask(*questions: dict[str, Any]) -> list[Any]:
    """What the child says."""
    answers = io.BytesIO()
    grammar_child.serve(io.BytesIO(b"".join(json.dumps(one).encode() + b"\n" for one in questions)), answers)
    return [line if line == "loaded" else json.loads(line) for line in answers.getvalue().decode().splitlines()]


def test_the_child_answers_in_order(directory: Path) -> None:
    good, bad = json_text(SCHEMA), json_text({"type": "nope"})
    answers = ask(*({"directory": str(directory), "grammar": text} for text in (good, bad, good)))
    assert answers[0::2] == ["loaded"] * 3
    assert [answer["error"] for answer in answers[1::2]] == [None, "Invalid type: nope", None]


def test_the_child_survives_a_model_that_is_not_there(directory: Path, tmp_path: Path) -> None:
    grammar = json_text(SCHEMA)
    answers = ask(
        {"directory": str(tmp_path / "none"), "grammar": grammar}, {"directory": str(directory), "grammar": grammar}
    )
    assert answers[1]["error"] == "the model's vocabulary cannot be read"
    assert answers[3]["error"] is None
