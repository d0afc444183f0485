"""What a model directory says about its tokenizer: ``tokenizer.json`` and the configs beside it. No torch.

Supported are BPE tokenizers of two kinds: byte-level (GPT-2, Llama 3, Qwen, SmolLM …) and SentencePiece-like with byte
fallback (Llama 2, Mistral …). Others are refused at load with what is supported.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Json = dict[str, Any]

MOST_IDS = 2**24
"""Ids above make no vocabulary: tables of their bytes are kept."""
_MARKUP = re.compile(r"(<.*>|\[.*\])", re.DOTALL)
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def read_json(path: Path) -> Json:
    """The file's object; empty when there is no such file. Raises ValueError naming the file."""
    try:
        return parse_json(path.read_bytes(), path)
    except FileNotFoundError:
        return {}


def parse_json(data: bytes, path: Path) -> Json:
    """The object that ``path`` holds as ``data``. Raises ValueError naming the file."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def check_kind(document: Json, path: Path) -> None:
    """Raises ValueError when the tokenizer is of a kind that is not supported."""
    model = document["model"].get("type", "BPE")
    decoders = {part.get("type") for part in parts(document.get("decoder"), "decoders")}
    if model != "BPE" or not decoders & {"ByteLevel", "ByteFallback"}:
        raise ValueError(
            f"{path}: a {model} tokenizer with decoder {sorted(map(str, decoders))} is not supported; supported are "
            "BPE tokenizers that are byte-level or have byte fallback"
        )
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if value := document["model"].get(name):  # a wrong one has the library end the process
            raise ValueError(f"{path}: {name}={value!r} is not supported")


def parts(node: Json | None, key: str) -> Iterator[Json]:
    """The members of a (nested) ``Sequence`` node, or the node itself."""
    if node is None:
        return
    if node.get("type") == "Sequence":
        for member in node.get(key, ()):
            yield from parts(member, key)
    else:
        yield node


def control_tokens(document: Json) -> dict[str, int]:
    """Added tokens that steer the model: marked special, or written like markup (``<tool_call>``, ``[INST]``)."""
    return {
        token["content"]: token["id"]
        for token in document.get("added_tokens", ())
        if token.get("special") or _MARKUP.fullmatch(token["content"].strip())
    }


def special_ids(document: Json) -> frozenset[int]:
    """Added tokens that have no text in an answer."""
    return frozenset(token["id"] for token in document.get("added_tokens", ()) if token.get("special"))


def plain_document(document: Json) -> Json:
    """The same tokenizer without its control tokens and without what it adds around a text."""
    plain = copy.copy(document)
    control = control_tokens(document)
    model = dict(document["model"])
    vocab: dict[str, int] = dict(model["vocab"])
    made = {_merged(merge) for merge in model.get("merges", ())}
    for token in control:
        if token != model.get("unk_token") and token not in made:
            vocab.pop(token, None)
    kept = [token for token in document.get("added_tokens", ()) if token["content"] not in control]
    for token in kept:
        vocab.setdefault(token["content"], token["id"])
    model["vocab"] = vocab
    plain.update(model=model, added_tokens=kept, post_processor=None)
    return plain


def prefixless_document(document: Json) -> Json | None:
    """The same tokenizer without the space that it puts before a text; None when it puts none."""
    changed = copy.deepcopy({key: value for key, value in document.items() if key != "model"})
    changed["model"] = document["model"]
    before = copy.deepcopy({key: value for key, value in changed.items() if key != "model"})
    for part in parts(changed.get("pre_tokenizer"), "pretokenizers"):
        if part.get("type") == "ByteLevel":
            part["add_prefix_space"] = False
        elif part.get("type") == "Metaspace":
            part["prepend_scheme"] = "never"
            part.pop("add_prefix_space", None)
    normalizer = changed.get("normalizer")
    if normalizer is not None:
        kept = [part for part in parts(normalizer, "normalizers") if part.get("type") != "Prepend"]
        if len(kept) < len(list(parts(normalizer, "normalizers"))):
            changed["normalizer"] = {"type": "Sequence", "normalizers": kept}
    return changed if any(changed.get(key) != value for key, value in before.items()) else None


def end_ids(generation: Json, config: Json) -> frozenset[int]:
    """Ids that end an answer: ``generation_config.json`` decides, else ``config.json``. Raises ValueError."""
    for source in (generation, config):
        value = source.get("eos_token_id")
        if value is None:
            continue
        found = value if isinstance(value, list) else [value]
        if not all(isinstance(one, int) and one >= 0 for one in found):
            raise ValueError(f"eos_token_id={value!r} must be an id or a list of ids")
        return frozenset(found)
    return frozenset()


def size_of(config: Json, name: str) -> int | None:
    """A size that ``config.json`` names, or None. Raises ValueError for what is none."""
    value = config.get(name)
    if value is not None and (not isinstance(value, int) or value < 1):
        raise ValueError(f"config.json: {name}={value!r} must be a positive whole number")
    return value


def special_texts(config: Json) -> dict[str, str]:
    """``bos_token`` and its kin, as chat templates write them."""
    found: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            found[name] = text
    return found


def read_chat_template(directory: Path, config: Json) -> str | None:
    """The template's source: ``chat_template.jinja``, ``chat_template.json`` or ``tokenizer_config.json``."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    value = read_json(directory / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(value, list):
        named = [entry for entry in value if isinstance(entry, Mapping)]
        value = next((entry.get("template") for entry in reversed(named) if entry.get("name") == "default"), None)
    return value if isinstance(value, str) else None


def vocabulary_bytes(document: Json) -> list[bytes]:
    """Each token's bytes in an answer, by id; empty for ids that are no token. Raises ValueError."""
    try:
        tokens: dict[str, int] = {
            **document["model"]["vocab"],
            **{token["content"]: token["id"] for token in document.get("added_tokens", ())},
        }
    except (KeyError, TypeError) as error:
        raise ValueError(f"tokenizer.json lacks a vocabulary ({type(error).__name__}: {error})") from error
    if not all(isinstance(index, int) and 0 <= index < MOST_IDS for index in tokens.values()):
        raise ValueError(f"tokenizer.json: ids of tokens must be whole numbers from 0 to {MOST_IDS - 1}")
    table = [b""] * (max(tokens.values(), default=-1) + 1)
    byte_level = any(part.get("type") == "ByteLevel" for part in parts(document.get("decoder"), "decoders"))
    convert = _byte_level if byte_level else _sentence_piece
    for token, index in tokens.items():
        table[index] = convert(token)
    return table


def strips_first_space(document: Json) -> bool:
    """Does decoding drop the space before the first word?"""
    return any(
        (part.get("type") == "Strip" and part.get("start", 0) > 0)
        or (part.get("type") == "Metaspace" and part.get("prepend_scheme", "always") != "never")
        for part in parts(document.get("decoder"), "decoders")
    )


def _merged(merge: str | list[str]) -> str:
    return "".join(merge.split(" ", 1) if isinstance(merge, str) else merge)


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's printable stand-ins for bytes: character → byte, as a table for ``str.translate``."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: byte for byte in printable}
    others = (byte for byte in range(256) if byte not in table)
    return {**table, **{0x100 + place: byte for place, byte in enumerate(others)}}


_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    if all(ord(character) in _ALPHABET for character in token):
        return token.translate(_ALPHABET).encode("latin-1")
    return token.encode()  # an added token, written as it is


def _sentence_piece(token: str) -> bytes:
    match = _BYTE.fullmatch(token)
    return bytes.fromhex(match[1]) if match else token.replace("\u2581", " ").encode()
