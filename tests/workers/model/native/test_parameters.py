"""What the kernel offers beyond the families that load: Gemma 2 and 3 use all of it, so they are the truth here.

Norms behind attention and MLP, GELU, scaled embeddings, soft caps on scores and logits, windows, tables per layer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.workers.model.native.by_hand import Kernel, ids, table
from tests.workers.model.native.test_kernel import truth
from workers.model import rope
from workers.model.config import ModelConfig, RopeConfig
from workers.model.native.decoder import NativeCache, NativeDecoder
from workers.model.weights import Weights

WINDOW = 40
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "query_pre_attn_scalar": 50,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_activation": "gelu_pytorch_tanh",
}
RENAMED = {"pre_feedforward_layernorm": "post_attention_layernorm"}
BEHIND = ("post_attention_layernorm", "post_feedforward_layernorm")


class Tensors:
    """A state dict as a source of weights."""

    def __init__(self, kept: dict[str, Tensor]) -> None:
        self._kept = kept

    def names(self) -> set[str]:
        return set(self._kept)

    def read(self, name: str) -> Tensor:
        return self._kept[name]


def gemma(family: str, **changes: Any) -> Any:
    torch.manual_seed(21)
    config = AutoConfig.for_model(family, **{**SIZES, **changes})
    made = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if "norm" in name else 0.15))
    return made


def kernel_of(made: Any, dtype: torch.dtype = torch.float32, threads: int = 2, kv_dtype: str = "auto") -> Kernel:
    """The kernel over a Gemma's weights, its structures changed by hand before the first step."""
    settings = made.config
    state = {name: 1 + part if "norm" in name else part for name, part in made.state_dict().items()}  # w counts from -1
    state.pop("lm_head.weight")
    behind = {name: state.pop(name) for name in list(state) if name.split(".")[-2] in BEHIND}
    for old, new in RENAMED.items():
        state = {name.replace(old, new): part for name, part in state.items()}
    config = ModelConfig(
        "Gemma",
        settings.vocab_size,
        settings.hidden_size,
        settings.intermediate_size,
        settings.num_hidden_layers,
        settings.num_attention_heads,
        settings.num_key_value_heads,
        settings.head_dim,
        settings.max_position_embeddings,
        settings.rms_norm_eps,
        RopeConfig(),
        tied=True,
        qk_norm=settings.model_type == "gemma3_text",
    )
    kernel = Kernel.__new__(Kernel)
    kernel.block = 16
    kernel.cache = NativeCache(config, 160, 16, dtype, kv_dtype)
    weights = Weights(Tensors(state), dtype, torch.device("cpu"))
    kernel.decoder = decoder = NativeDecoder(config, weights, 4096, kernel.cache, dtype, threads)
    model = decoder._model
    model.gelu, model.scale = 1, settings.query_pre_attn_scalar**-0.5
    model.embed_scale = settings.hidden_size**0.5
    model.softcap = getattr(settings, "attn_logit_softcapping", None) or 0.0
    model.logit_softcap = settings.final_logit_softcapping or 0.0
    for index, kind in enumerate(settings.layer_types):
        layer = decoder._layers[index]
        layer.post_attn_norm, layer.post_ffn_norm = (
            decoder._vector(behind[f"model.layers.{index}.{name}.weight"]) for name in BEHIND
        )
        layer.window = settings.sliding_window if kind == "sliding_attention" else 0
        by_kind = settings.rope_parameters.get(kind, settings.rope_parameters)
        tables = rope.table(RopeConfig(theta=by_kind["rope_theta"]), settings.head_dim, 4096)
        layer.cos, layer.sin = (decoder._keep(part.contiguous()) for part in tables)
    return kernel


CASES = {
    "gemma2": {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma2, no caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma3_text": {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }
    },
}


@pytest.fixture(scope="module", params=CASES)
def made(request: pytest.FixtureRequest) -> Any:
    return gemma(request.param.split(",")[0], **CASES[request.param])


def test_logits_equal_transformers(made: Any) -> None:
    kernel = kernel_of(made)
    for count in (1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 170):
        tokens = ids(count, count)
        found, expected = kernel.run((tokens, 0, table(count, count))), truth(made, tokens)
        torch.testing.assert_close(found, expected, rtol=3e-4, atol=3e-4)


def test_bf16_stays_close(made: Any) -> None:
    tokens = ids(170)
    found, expected = kernel_of(made, torch.bfloat16).run((tokens, 0, table(170, 1))), truth(made, tokens)
    assert (found - expected).norm() / expected.norm() <= 3e-2


@pytest.mark.parametrize(("kv_dtype", "most"), [("int8", 3e-2), ("fp8", 0.12)])
def test_keys_and_values_in_bytes_stay_close(made: Any, kv_dtype: str, most: float) -> None:
    tokens = ids(170)
    found, expected = kernel_of(made, kv_dtype=kv_dtype).run((tokens, 0, table(170, 1))), truth(made, tokens)
    assert 1e-4 < (found - expected).norm() / expected.norm() <= most


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_chunks_and_threads_change_no_bit(made: Any, kv_dtype: str) -> None:
    """A window leaves whole groups of keys out, as many as the chunk allows: the result must not show it."""
    tokens, blocks = ids(170), table(170, 3)
    whole = kernel_of(made, kv_dtype=kv_dtype).run((tokens, 0, blocks))
    kernel = kernel_of(made, threads=3, kv_dtype=kv_dtype)
    parts = [kernel.run((tokens[: min(start + 7, 170)], start, blocks)) for start in range(0, 170, 7)]
    assert torch.equal(torch.cat(parts), whole)


def test_a_window_within_a_context_of_several_splits() -> None:
    made = gemma("gemma2", attn_logit_softcapping=5.0, final_logit_softcapping=None, sliding_window=700)
    tokens = ids(2100)
    kernel, blocks = kernel_of(made), table(2100, 1)
    got = torch.cat([kernel.run((tokens[: start + 700], start, blocks)) for start in range(0, 2100, 700)])
    torch.testing.assert_close(got, truth(made, tokens), rtol=5e-4, atol=5e-4)
    assert torch.equal(kernel.run((tokens, 2099, blocks))[0], got[-1])


@pytest.mark.parametrize(
    "undo",
    [
        lambda model, layer: setattr(model, "gelu", 0),
        lambda model, layer: setattr(model, "embed_scale", 1.0),
        lambda model, layer: setattr(model, "softcap", 0.0),
        lambda model, layer: setattr(model, "logit_softcap", 0.0),
        lambda model, layer: setattr(layer, "window", 0),
        lambda model, layer: setattr(layer, "post_attn_norm", None),
        lambda model, layer: setattr(layer, "post_ffn_norm", None),
    ],
    ids=["gelu", "embed_scale", "softcap", "logit_softcap", "window", "post_attn_norm", "post_ffn_norm"],
)
def test_each_parameter_matters(undo: Callable[[ctypes.Structure, ctypes.Structure], None]) -> None:
    """The truth above would not notice a parameter that changes nothing on these weights."""
    made = gemma("gemma2", attn_logit_softcapping=5.0, final_logit_softcapping=3.0)
    tokens = ids(90)
    kernel = kernel_of(made)
    undo(kernel.decoder._model, kernel.decoder._layers[0])
    found, expected = kernel.run((tokens, 0, table(90, 1))), truth(made, tokens)
    assert (found - expected).norm() / expected.norm() > 5e-3
