"""What ``engine.weight_dtype`` makes of a model's matrices.

int8: q8 everywhere. int4: q4k, but q8 for embedding and head, since rounding a token's own row hits whatever that token
does, and for the values of attention: few weights where query heads share them, and everything that a token hears
from others passes through them (of SmolLM2-135M a thirtieth of its layers' weights, a third of what 4 bits cost).
gguf: what the file has, nothing is rounded.
Norms, biases and the routers of experts stay as they are: few numbers, each with a say in everything behind it.
"""

from __future__ import annotations

from torch import Tensor

from workers.model.quant.gguf_blocks import KEPT
from workers.model.quant.matrix import Quantised
from workers.model.quant.rounding import int4, int8
from workers.model.weights import Rounding

BITS = {"int8": (8.5, 8.5), "int4": (4.625, 8.5)}
"""Per weight, scales included: of the layers' matrices, and of what ``stays_fine``."""
_FINE = ("model.embed_tokens.weight", "lm_head.weight", ".self_attn.v_proj.weight")


def rounding(weight_dtype: str) -> Rounding | None:
    """The rounding that ``engine.weight_dtype`` asks for; None where it asks for none."""
    return {"int8": _int8, "int4": _int4}.get(weight_dtype)


def _int8(name: str, weight: Tensor) -> Quantised:
    return int8(weight)


def _int4(name: str, weight: Tensor) -> Quantised:
    return int8(weight) if stays_fine(name) else int4(weight)


def stays_fine(name: str) -> bool:
    """Whether int4 puts a matrix in 8 bits."""
    return name.endswith(_FINE)


def none_quantised(weight_dtype: str, architecture: str) -> str:
    """What to say when a model was loaded and not one matrix came out quantised."""
    named = f"engine.weight_dtype={weight_dtype}"
    if weight_dtype == "gguf":
        return f"{named}: the file has no matrix of a type that is kept ({', '.join(KEPT)}); use int8, int4 or auto"
    return f"{named}: architecture {architecture} takes none of its matrices quantised; use auto"
