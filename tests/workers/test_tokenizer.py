"""Text ↔ ids: control tokens only where they are meant, and never half a character."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from tests.workers import tiny_tokenizer
from workers.tokenizer import EncodeError, Segment, Tokenizer

TEXTS = [
    "What is the capital of France?",
    "  indented\n\n\ttext  ",
    "Größe 😀 日本語 👩‍👩‍👧‍👦 𝄞",
    "",
    "\x00\x01\x7f",
    "a" * 3000,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_what_a_model_says_of_itself(folder: Path, tokenizer: Tokenizer) -> None:
    assert tokenizer.sha256 == hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    assert tokenizer.eos_ids == {2, 0}
    assert tokenizer.vocab_size == 1024
    assert tokenizer.max_context == 512


@pytest.mark.parametrize("text", TEXTS)
def test_ordinary_text_gets_the_ids_of_the_library(
    tokenizer: Tokenizer, reference: tokenizers.Tokenizer, text: str
) -> None:
    assert tokenizer.encode_text(text) == reference.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode_text(text)) == text


@pytest.mark.parametrize("name", [*tiny_tokenizer.SPECIAL, "<tool_call>"])
@pytest.mark.parametrize("around", ["{}", "a {} b", "{}{}", "\n{}\n", "x{}"])
def test_security_55_text_of_a_caller_never_becomes_a_control_token(
    tokenizer: Tokenizer, reference: tokenizers.Tokenizer, name: str, around: str
) -> None:
    """security 55: token ids hold no control ids from content, and the text comes back as it was."""
    text = around.format(name, name)
    ids = tokenizer.encode_text(text)
    assert tokenizer.control_ids.isdisjoint(ids)
    assert tokenizer.decode(ids) == text
    control = reference.token_to_id(name)
    assert control in tokenizer.control_ids
    assert control in tokenizer.encode_text(text, special=True), "the test would not notice otherwise"


@given(st.lists(st.sampled_from([*tiny_tokenizer.SPECIAL, "<tool_call>", "<|im", "_end|>", "<|", "a", " ", "é"])))
def test_security_55_no_composition_of_markers_makes_a_control_token(tokenizer: Tokenizer, parts: list[str]) -> None:
    """security 55, any concatenation."""
    content = "".join(parts)
    ids = tokenizer.encode_chat([{"role": "user", "content": content}])
    head = tokenizer.encode_chat([{"role": "user", "content": ""}])
    plain = tokenizer.encode_text(content)
    assert tokenizer.control_ids.isdisjoint(plain)
    assert sum(token in tokenizer.control_ids for token in ids) == sum(token in tokenizer.control_ids for token in head)


def test_a_chat_has_the_ids_of_the_whole_text(tokenizer: Tokenizer, reference: tokenizers.Tokenizer) -> None:
    messages = [
        {"role": "system", "content": "Be nice."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    text = (
        "<|im_start|>system\nBe nice.<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tokenizer.encode_chat(messages) == reference.encode(text, add_special_tokens=False).ids


def test_other_added_tokens_keep_their_ids_in_contents(tokenizer: Tokenizer, reference: tokenizers.Tokenizer) -> None:
    four_spaces = reference.token_to_id("    ")
    assert four_spaces in tokenizer.encode_text("def f():\n    pass")
    ids = tokenizer.encode_segments([Segment("<|im_start|>", True), Segment("    x", False)])
    assert ids[:2] == [1, four_spaces]


def test_many_texts_at_once(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode_text(text) for text in TEXTS]
    assert tokenizer.encode_batch([]) == []


def test_an_unpaired_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(EncodeError, match="surrogate"):
        tokenizer.encode_text("a\ud800b")
    with pytest.raises(EncodeError, match="surrogate"):
        tokenizer.encode_chat([{"role": "user", "content": "\udfff"}])


# -- decoding -----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 1100), max_size=80))
def test_pieces_add_up_to_the_whole_and_to_the_library(
    tokenizer: Tokenizer, reference: tokenizers.Tokenizer, ids: list[int]
) -> None:
    known = [token for token in ids if token < reference.get_vocab_size()]
    decoder = tokenizer.decoder()
    pieces = [decoder.push(token) for token in ids]
    text = "".join(pieces) + decoder.finish()
    assert text == tokenizer.decode(ids)
    assert text == reference.decode(known, skip_special_tokens=True)
    assert text.encode("utf-8", "surrogatepass").decode("utf-8") == text


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_no_piece_of_valid_text_holds_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    decoder = tokenizer.decoder()
    pieces = [decoder.push(token) for token in tokenizer.encode_text(text)]
    assert "".join(pieces) == text
    assert decoder.finish() == ""
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_an_incomplete_character_at_the_end_is_one_replacement(tokenizer: Tokenizer) -> None:
    first, second = tokenizer.encode_text("\U0001d123")[:2]
    decoder = tokenizer.decoder()
    assert decoder.feed([first, second]) == ""
    assert decoder.finish() == "\ufffd"


def test_special_and_unknown_ids_have_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([1, *tokenizer.encode_text("hi"), 2, 0, 10**9, -1]) == "hi"
    assert tokenizer.token_bytes(10**9) == b""
    assert tokenizer.token_bytes(-1) == b""
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode_text("Größe 😀"))) == "Größe 😀".encode()


# -- files --------------------------------------------------------------------------------------------------------


def _rewrite(folder: Path, **changes: object) -> Path:
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    document.update(changes)
    path.write_text(json.dumps(document))
    return folder


def test_a_begin_token_of_the_post_processor_goes_before_raw_prompts_only(tmp_path: Path) -> None:
    folder = _rewrite(
        tiny_tokenizer.write(tmp_path),
        post_processor={
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
        },
    )
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode_text("hi")[0] == 1
    assert tokenizer.encode_text("hi", prefix=False) == tokenizer.encode_text("hi")[1:]
    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}])[:2] != [1, 1]


def test_a_begin_token_of_the_config_goes_before_raw_prompts(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tiny_tokenizer.write(tmp_path, add_bos_token=True))
    assert tokenizer.encode_text("hi")[0] == 1


def test_a_tokenizer_of_another_kind_is_refused_with_what_is_supported(tmp_path: Path) -> None:
    _rewrite(tiny_tokenizer.write(tmp_path), decoder={"type": "WordPiece", "prefix": "##", "cleanup": True})
    with pytest.raises(ValueError, match=r"WordPiece.*supported are"):
        Tokenizer.load(tmp_path)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Tokenizer.load(tmp_path)
    tiny_tokenizer.write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not JSON"):
        Tokenizer.load(tmp_path)


ODD = [None, True, "x", -1, 2**40, 1.5, [], ["x"], [None], {}, {"x": {}}, [{"id": 1}], {"type": "BPE"}]


def test_a_tokenizer_of_odd_parts_is_refused_by_name(tmp_path: Path) -> None:
    """Or loaded, where the part does not matter. It takes no memory for ids that cannot be."""
    folder = tiny_tokenizer.write(tmp_path)
    path = folder / "tokenizer.json"
    good = json.loads(path.read_text())
    some = next(iter(good["model"]["vocab"]))
    for odd in ODD:
        model = good["model"]
        for document in (
            odd,
            *({**good, name: odd} for name in good),
            *({**good, "model": {**model, name: odd}} for name in model),
            {**good, "model": {**model, "vocab": {**model["vocab"], some: odd}}},
            {**good, "added_tokens": [{**good["added_tokens"][0], "id": odd}]},
            {**good, "added_tokens": [{**good["added_tokens"][0], "content": odd}]},
        ):
            path.write_text(json.dumps(document))
            with contextlib.suppress(ValueError):
                Tokenizer.load(folder)
    path.write_text(json.dumps(good))
    for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        for odd in ODD:
            for field in (*config, "eos_token_id", "vocab_size", "chat_template", "bos_token", "add_bos_token"):
                (folder / name).write_text(json.dumps({**config, field: odd}))
                with contextlib.suppress(ValueError):
                    Tokenizer.load(folder)
        (folder / name).write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", r"tokenizer\.json is not JSON"),
        ("[" * 100_000, r"tokenizer\.json is not JSON"),
        ("[]", r"tokenizer\.json must hold a JSON object"),
        ('{"model": {}}', "is not supported; supported are"),
        ("{}", "is not built as it should be .KeyError: 'model'"),
        (
            '{"decoder": {"type": "ByteLevel"}, "model": {"vocab": {}, "continuing_subword_prefix": "##"}}',
            "continuing_subword_prefix='##' is not supported",
        ),
        ('{"decoder": {"type": "ByteLevel"}, "model": {}}', "lacks a vocabulary"),
        ('{"decoder": {"type": "ByteLevel"}, "model": {"vocab": {"a": 1e12}}}', "ids of tokens must be whole numbers"),
    ],
)
def test_what_is_wrong_with_a_tokenizer_is_said(tmp_path: Path, document: str, message: str) -> None:
    (tiny_tokenizer.write(tmp_path) / "tokenizer.json").write_text(document)
    with pytest.raises(ValueError, match=message):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("config.json", {"max_position_embeddings": "512"}, "max_position_embeddings='512' must be a positive whole"),
        ("config.json", {"vocab_size": -1}, "vocab_size=-1 must be a positive whole number"),
        ("generation_config.json", {"eos_token_id": "</s>"}, "eos_token_id='</s>' must be an id or a list of ids"),
    ],
)
def test_what_is_wrong_with_a_config_is_said(
    tmp_path: Path, name: str, fields: dict[str, object], message: str
) -> None:
    (tiny_tokenizer.write(tmp_path) / name).write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=message):
        Tokenizer.load(tmp_path)


def test_end_tokens_come_from_either_config(tmp_path: Path) -> None:
    tiny_tokenizer.write(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_ids == {2}
    assert tokenizer.vocab_size > 300
    assert tokenizer.max_context is None


def test_a_sentencepiece_like_tokenizer_round_trips(tmp_path: Path) -> None:
    """Llama-2 kind: spaces are ▁, unknown characters fall back to bytes, a space is put before a raw prompt."""
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "hi", "▁hi"]
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": n, "content": vocab[n], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            | {"special": True}
            for n in range(3)
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "byte_fallback": True,
            "fuse_unk": True,
            "vocab": {token: index for index, token in enumerate(vocab)},
            "merges": [["h", "i"], ["▁", "hi"]],
        },
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    tokenizer = Tokenizer.load(tmp_path)
    reference = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in ("hi hi", "hi 😀 é", " hi"):
        ids = tokenizer.encode_text(text)
        assert ids == reference.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == reference.decode(ids) == text
    assert tokenizer.control_ids.isdisjoint(tokenizer.encode_text("</s>hi<s>"))
    assert tokenizer.encode_segments([Segment("<s>", True), Segment("hi", False)]) == [1, vocab.index("hi")]
