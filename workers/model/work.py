"""How a prompt's work is divided between attention and everything else, from the model's shape."""

from __future__ import annotations

from workers.model.config import ModelConfig

ATTENTION = (4, 3)
"""An operation of attention takes so much longer than one of a matrix product (as a fraction): kernels of both kinds
reach 0.70 to 0.75 and 0.92 of a device's rate (``native/``: 330 and 435 of 475 GFLOP/s)."""


def twice_at(model: ModelConfig, max_context: int) -> int:
    """Tokens of context at which attention takes a token's time once more; 0 where no layer attends to all of it.

    A token takes 2 operations per weight that it passes, and per token of context 4 per number of its queries: the
    products with a key and with a value. Not counted: the head, which one row of a prompt passes, and layers with a
    window, which take equally long from there on.
    """
    full = sum(not 0 < model.window(layer) < max_context for layer in range(model.layers))
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    weights = model.layers * (model.hidden * (query + 2 * key) + query * model.hidden) + _mlps(model)
    slower, faster = ATTENTION
    return max(1, weights * faster // (2 * query * full * slower)) if full else 0


def _mlps(model: ModelConfig) -> int:
    """Weights of all layers' MLPs that one token passes; of a mixture its own experts and the router."""
    hidden, moe = model.hidden, model.moe
    plain = 3 * hidden * model.intermediate
    if moe is None:
        return model.layers * plain
    mixed = hidden * moe.experts + 3 * hidden * (moe.per_token * moe.intermediate + moe.shared)
    return len(moe.dense) * plain + (model.layers - len(moe.dense)) * mixed
