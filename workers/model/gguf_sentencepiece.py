"""SentencePiece's BPE as GGUF carries it (``tokenizer.ggml.model`` = llama) → ``tokenizer.json``. No torch.

The file has pieces and scores but no merges. SentencePiece joins the two neighbours whose joint piece scores best (Kudo
& Richardson 2018, arXiv:1808.06226), so every way to cut a piece into two pieces is a merge, ranked by the piece's
score; among cuts of equal score the order is that of transformers' converter. User-defined pieces are matched in the
text before anything is joined: added tokens do the same. llama.cpp's converter writes the spaces of those as spaces.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
_SPACE = "\u2581"


def merges_of(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges that lead to normal pieces, best first. O(characters of all pieces)."""
    ids = {token: index for index, token in enumerate(tokens) if types[index] == NORMAL}
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, index in ids.items():
        cuts = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        known = sorted((ids[left], ids[right], left, right) for left, right in cuts if left in ids and right in ids)
        ranked += [(scores[index], len(left), len(right), left, right) for _, _, left, right in known]
    ranked.sort(key=lambda cut: cut[:3], reverse=True)
    return [cut[3:] for cut in ranked]


def document_of(metadata: Json, added: list[Json]) -> str:
    """``tokenizer.json`` text. ``added``: the control and user-defined tokens."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    prefixed = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces: Json = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    decoders: list[Json] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefixed:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        spaces = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _SPACE}, spaces]}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": spaces,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None if unknown is None else tokens[unknown],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": merges_of(tokens, types, metadata["tokenizer.ggml.scores"]),
        },
    }
    return json.dumps(document, ensure_ascii=False)
