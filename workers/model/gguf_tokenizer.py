"""The tokenizer inside a GGUF file → ``tokenizer.json`` (Hugging Face tokenizers format) and its companions. No torch.

GGUF names the pre-tokenizer (``tokenizer.ggml.pre``) but does not carry its rules; the table below does. Output bytes
depend on the metadata alone, so their sha256 names the tokenizer.
"""

from __future__ import annotations

import json
from typing import Any

from workers.model.gguf_sentencepiece import document_of
from workers.model_store import ModelStoreError

Json = dict[str, Any]

_CONTROL, _USER_DEFINED = 3, 4
_LISTS = "tokenizer.ggml."
_BYTE_LEVEL: Json = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _sequence(*parts: Json) -> Json:
    return {"type": "Sequence", "pretokenizers": list(parts)}


PRE_TOKENIZERS: dict[str, Json] = {
    "gpt-2": _BYTE_LEVEL,
    "smollm": _sequence({"type": "Digits", "individual_digits": True}, _BYTE_LEVEL),
    "llama-bpe": _sequence(
        {"type": "Split", "pattern": {"Regex": _LLAMA3_SPLIT}, "behavior": "Isolated", "invert": False},
        {**_BYTE_LEVEL, "use_regex": False},
    ),
    "qwen2": _sequence(
        {"type": "Split", "pattern": {"Regex": _QWEN2_SPLIT}, "behavior": "Isolated", "invert": False},
        {**_BYTE_LEVEL, "use_regex": False},
    ),
}
_TURN_ENDS = ("<|endoftext|>", "<end_of_turn>")
_NORMALIZERS: dict[str, Json] = {"qwen2": {"type": "NFC"}}
_IGNORE_MERGES = {"llama-bpe"}


def check(metadata: Json) -> None:
    """Raises ModelStoreError where the lists of a tokenizer are missing, of another kind, or contradict each other."""
    tokens = metadata.get(_LISTS + "tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ModelStoreError(f"GGUF metadata: {_LISTS}tokens is no list of texts")
    spread = metadata.get("tokenizer.ggml.model") == "llama"
    wanted = (("token_type", int, spread), ("scores", int | float, spread), ("merges", str, not spread))
    for name, kind, needed in wanted:
        found = metadata.get(_LISTS + name)
        if not found and not needed:
            continue
        if not isinstance(found, list) or not all(isinstance(one, kind) for one in found):
            kinds = "texts" if kind is str else "numbers"
            raise ModelStoreError(f"GGUF metadata: {_LISTS}{name} is no list of {kinds}")
        if name != "merges" and len(found) != len(tokens):
            raise ModelStoreError(f"GGUF metadata: {_LISTS}{name} has {len(found)} entries for {len(tokens)} tokens")
    for name in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        token = metadata.get(f"{_LISTS}{name}_token_id")
        if token is not None and (not isinstance(token, int) or not 0 <= token < len(tokens)):
            raise ModelStoreError(f"GGUF metadata: {_LISTS}{name}_token_id={token!r} is no id of {len(tokens)} tokens")


def tokenizer_json_of(metadata: Json) -> str:
    """``tokenizer.json`` text. Raises ModelStoreError when the tokenizer is neither byte-level BPE of a known kind nor
    SentencePiece's BPE, and as ``check`` does."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "llama" and (kind != "gpt2" or not isinstance(pre, str) or pre not in PRE_TOKENIZERS):
        raise ModelStoreError(
            f"GGUF tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported (supported: llama, and gpt2 with "
            f"{', '.join(PRE_TOKENIZERS)}); use a directory with the model's own tokenizer.json"
        )
    check(metadata)
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": type_ == _CONTROL,
        }
        for index, (token, type_) in enumerate(zip(tokens, types, strict=True))
        if type_ in (_CONTROL, _USER_DEFINED)
    ]
    if kind == "llama":
        return document_of(metadata, added)
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": _NORMALIZERS.get(pre),
        "pre_tokenizer": PRE_TOKENIZERS[pre],
        "post_processor": None,
        "decoder": {**_BYTE_LEVEL, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in _IGNORE_MERGES,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in metadata["tokenizer.ggml.merges"]],
        },
    }
    return json.dumps(document, ensure_ascii=False)


def tokenizer_config_of(metadata: Json) -> str:
    """``tokenizer_config.json`` text: chat template and the names of the special tokens. ``metadata`` was checked."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    config: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": bool(metadata.get("tokenizer.ggml.add_space_prefix", False)),
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", _begins(metadata))),
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(metadata.get(f"{metadata.get('general.architecture')}.context_length", 0)) or None,
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if index is not None:
            config[f"{ours}_token"] = tokens[index]
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return json.dumps(config, ensure_ascii=False, indent=1)


def _begins(metadata: Json) -> bool:
    """Whether a raw prompt gets a begin token in front where the file does not say: as llama.cpp takes it."""
    return metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") == "llama-bpe"


def generation_config_of(metadata: Json) -> str:
    """``generation_config.json`` text. End tokens: those named, and control tokens that are known to end a turn.

    ``metadata`` was checked.
    """
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    places = [tokens.index(mark) for mark in _TURN_ENDS if mark in tokens]
    ends += [place for place in places if types[place] == _CONTROL]
    config = {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    return json.dumps(config, indent=1)
