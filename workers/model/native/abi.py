"""The kernel's structures (``abi.h``: Lora, FbLayer, FbModel, FbStep) for ctypes. Field order and types are the ABI."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, ClassVar

POINTER, INT, LONG, FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_float
Fields = list[tuple[str, Any]]


class Linear(ctypes.Structure):
    """Packed weights, an fp32 bias or null, columns (padded to 32), rows; how panels are stored and their bytes, how
    many are stored so, and how those behind them are; where panels of different sizes begin, or null."""

    _fields_: ClassVar[Fields] = [
        *(("w", POINTER), ("bias", POINTER)),
        *((name, LONG) for name in ("n", "k", "kind", "stride", "first", "later_kind", "later_stride")),
        ("starts", POINTER),
    ]


class Lora(ctypes.Structure):
    """What an adapter adds to one linear (``lora.h``): packed A and B, rank of a part, ranks in all; zeros: nothing."""

    _fields_: ClassVar[Fields] = [("a", POINTER), ("b", POINTER), ("rank", INT), ("total", INT)]


class Layer(ctypes.Structure):
    """One block of the decoder; norms the model does not have are null."""

    _fields_: ClassVar[Fields] = [
        *((name, POINTER) for name in ("attn_norm", "q_norm", "k_norm", "post_attn_norm", "ffn_norm", "post_ffn_norm")),
        *((name, Linear) for name in ("qkv", "o", "gate_up", "down")),
        *((name, POINTER) for name in ("cache", "cos", "sin")),
        ("window", INT),
        ("table", INT),
    ]


class Model(ctypes.Structure):
    """Sizes and constants of the decoder, its embedding and head."""

    _fields_: ClassVar[Fields] = [
        *(
            (name, INT)
            for name in (
                "bf16",
                "layers",
                "hidden",
                "heads",
                "kv_heads",
                "head_dim",
                "ffn",
                "rotary",
                "block_size",
                "gelu",
                "max_rows",
                "max_samples",
            )
        ),
        *((name, FLOAT) for name in ("eps", "scale", "softcap", "embed_scale", "logit_softcap")),
        ("kv", INT),
        ("low_width", INT),
        ("norm", POINTER),
        ("embed", Linear),
        ("head", Linear),
        ("layer", ctypes.POINTER(Layer)),
    ]


class Step(ctypes.Structure):
    """One step's rows, chunks and outputs; all integers are int32."""

    _fields_: ClassVar[Fields] = [
        *((name, INT) for name in ("rows", "chunks", "samples", "vocab")),
        *(
            (name, POINTER)
            for name in (
                "tokens",
                "positions",
                "slots",
                "first",
                "count",
                "table",
                "blocks",
                "sample_rows",
                "logits",
                "best",
                "choices",
                "lora",
                "adapters",
            )
        ),
        ("loras", INT),
        ("unused", INT),
    ]


def make(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """A structure with every field set. Raises TypeError when one is missing or unknown: the two sides would differ."""
    names = [name for name, _ in kind._fields_]
    if set(names) != set(values):
        raise TypeError(f"{kind.__name__}: {sorted(set(names) ^ set(values))}")
    return kind(**values)
