"""The Llama family and its kin on small random weights against transformers, on every backend: logits and ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.model import oracle, tiny
from tests.workers.model.harness import GREEDY, Bench, logits_of
from tests.workers.model.places import places
from workers.config import EngineConfig
from workers.model.config import read_config
from workers.model.kv_tables import tables_of
from workers.model.loading import load
from workers.model_store import ModelStoreError
from workers.protocol import Generate

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # 4 x 32 is not 64: q, k, v and o are not square
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 5000.0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": False}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}),
    "qwen3-yarn": (
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 500.0,
            }
        },
    ),
    "llama-yarn-every-field": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 2.5,
                "original_max_position_embeddings": 40,
                "rope_theta": 900.0,
                "beta_fast": 9.0,
                "beta_slow": 0.5,
                "truncate": False,
                "mscale": 1.3,
                "mscale_all_dim": 0.6,
            }
        },
    ),
    "llama-all-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-attention-bias-padded": (
        "llama",
        {
            "attention_bias": True,
            "hidden_size": 160,
            "num_attention_heads": 5,
            "head_dim": 16,
            "num_key_value_heads": 5,
        },
    ),
    "mistral": ("mistral", {"sliding_window": None, "rms_norm_eps": 1e-5}),
    "mistral-window": ("mistral", {"sliding_window": 21}),
    "qwen2": ("qwen2", {"head_dim": 16, "rms_norm_eps": 1e-6}),
    "qwen2-untied-window-off": (
        "qwen2",
        {"head_dim": 16, "tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": 8},
    ),
    "qwen2-window": (
        "qwen2",
        {
            "head_dim": 16,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("qwen3", {"rms_norm_eps": 1e-6}),
    "qwen3-attention-bias": ("qwen3", {"attention_bias": True, "head_dim": 48, "num_key_value_heads": 1}),
    "gemma-3": (
        "gemma3_text",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 17,
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gemma-2": (
        "gemma2",
        {
            "sliding_window": 20,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
        },
    ),
}
PLACES = places("reference", "batched", "native")
TOKENS = [(7 * index * index + 3 * index) % 290 for index in range(70)]
TABLE = [5, 2, 9, 0, 12, 7]
ENGINE = EngineConfig(device="cpu", dtype="float32", blocks=90, block_size=16, threads=1)


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    family, changes = FAMILIES[request.param]
    model = tiny.model(9, family, **{**BASE, **changes})
    return model, tiny.write_directory(model, tmp_path_factory.mktemp("family") / "m")


def on(attention: str, **changes: Any) -> EngineConfig:
    return ENGINE.model_copy(update={"attention": attention, **changes})


@pytest.mark.parametrize(("attention", "device"), PLACES)
def test_logits_equal_transformers(made: tuple[Any, Path], attention: str, device: str) -> None:
    model, folder = made
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([TOKENS])).logits[0]
    assert expected.std() > 0.3  # logits that are all alike would prove nothing
    loaded = load(folder, on(attention, device=device))
    for splits in ([70], [1, 2, 16, 33, 70]):
        torch.testing.assert_close(logits_of(loaded, TOKENS, splits, TABLE), expected, atol=3e-4, rtol=2e-4)


@pytest.mark.parametrize(("attention", "device"), PLACES)
def test_greedy_ids_equal_transformers(made: tuple[Any, Path], attention: str, device: str) -> None:
    """Several prompts at once in a small pool: chunks, mixed steps, copies and recomputes on the way."""
    _, folder = made
    prompts = [TOKENS[start : start + length] for start in (0, 9, 30) for length in (14, 30)]
    cases = oracle.greedy(folder, prompts, 24)
    tables = tables_of(read_config(folder), 256).count
    blocks = 8 if tables == 1 else 5 * tables + 1  # windows give blocks back: fewer, or nobody is preempted
    bench = Bench(folder, on(attention, device=device, blocks=blocks, max_chunk_tokens=16))
    requests = [Generate(str(index), case.prompt, 24, GREEDY) for index, case in enumerate(cases)]
    assert sum(len(case.expected) for case in cases) >= 120
    for finished, case in zip(bench.run(requests, stagger=1), cases, strict=True):
        assert finished.tokens[: len(case.expected)] == case.expected
        assert finished.logprobs[: len(case.expected)] == pytest.approx(case.logprobs, abs=1e-3)
    assert bench.preemptions > 0


def test_what_biases_and_norms_are_there_shows_in_the_weights(tmp_path: Path) -> None:
    """Every tensor of the checkpoint is used, and counted alike by both kinds of decoder."""
    for family, extra in (("llama", 0), ("qwen2", 2 * 128), ("qwen3", 2 * 2 * 32)):
        changes = {**BASE, **({"head_dim": 16} if family == "qwen2" else {})}
        folder = tiny.write_directory(tiny.model(1, family, **changes), tmp_path / family)
        plain = sum(p.numel() for name, p in tiny.model(1, family, **changes).named_parameters())
        assert load(folder, on("batched")).weight_bytes == 4 * plain
        assert extra == sum(
            p.numel()
            for name, p in tiny.model(1, family, **changes).named_parameters()
            if "bias" in name or "q_norm" in name or "k_norm" in name
        )


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"])
@pytest.mark.parametrize("quantise", [False, True])
def test_gguf_equals_the_original_directory(tmp_path: Path, family: str, quantise: bool) -> None:
    """engine A: unpacked and straight are bit-equal; unquantised also with the directory the file was made from."""
    changes = {**BASE, "hidden_size": 128, "head_dim": 32, "sliding_window": None}
    if family.startswith("gemma"):
        changes |= {"sliding_window": 18, "query_pre_attn_scalar": 32, "num_hidden_layers": 6}
    if family == "gemma2":
        changes |= {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 6.0}
    if family == "gemma3_text":
        theta = {"rope_type": "linear", "factor": 2.0, "rope_theta": 3e4}
        changes["rope_parameters"] = {"full_attention": theta}
    model = tiny.model(7, family, **changes).to(torch.bfloat16).float()
    gguf = tiny.write_gguf(model, tmp_path / "m.gguf", quantise)
    through = load(gguf, on("batched"), cache=tmp_path / "cache")
    straight = load(gguf, on("batched"), cache=tmp_path / "other", straight=True)
    found = logits_of(through, TOKENS, [70], TABLE)
    assert torch.equal(found, logits_of(straight, TOKENS, [70], TABLE))
    assert through.config.architecture == {
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "gemma2": "Gemma2ForCausalLM",
        "gemma3_text": "Gemma3ForCausalLM",
    }.get(family, "LlamaForCausalLM")
    direct = load(tiny.write_directory(model, tmp_path / "m"), on("batched"))
    expected = logits_of(direct, TOKENS, [70], TABLE)
    if quantise:
        assert 0 < (found - expected).norm() / expected.norm() < 0.15
    else:
        assert torch.equal(found, expected)


def test_gguf_biases_are_reordered_with_their_rows(tmp_path: Path) -> None:
    model = tiny.model(7, "llama", **{**BASE, "attention_bias": True}).to(torch.bfloat16).float()
    through = load(tiny.write_gguf(model, tmp_path / "m.gguf"), on("batched"), cache=tmp_path / "cache")
    direct = load(tiny.write_directory(model, tmp_path / "m"), on("batched"))
    assert through.config.qkv_bias
    assert through.config.output_bias
    assert torch.equal(logits_of(through, TOKENS, [70], TABLE), logits_of(direct, TOKENS, [70], TABLE))


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        ("llama", {**LLAMA3, "rope_theta": 500_000.0, "original_max_position_embeddings": 8192, "factor": 32.0}),
        ("qwen2", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}),
    ],
)
def test_gguf_scales_rotations_as_the_original(tmp_path: Path, family: str, rope: dict[str, Any]) -> None:
    """Llama 3's file has no parameters: they are found again in what its frequencies are divided by."""
    changes = {**BASE, "hidden_size": 128, "head_dim": 32, "rope_parameters": rope}
    model = tiny.model(7, family, **changes).to(torch.bfloat16).float()
    through = load(tiny.write_gguf(model, tmp_path / "m.gguf"), on("batched"), cache=tmp_path / "cache")
    direct = load(tiny.write_directory(model, tmp_path / "m"), on("batched"))
    assert through.config.rope == direct.config.rope
    assert through.config.rope.kind == rope["rope_type"]
    assert torch.equal(logits_of(through, TOKENS, [70], TABLE), logits_of(direct, TOKENS, [70], TABLE))


def test_gguf_of_another_architecture_or_scaling_is_refused(tmp_path: Path) -> None:
    model = tiny.model(1, "llama", **BASE)
    for kind, why in (("yarn", r"rope\.scaling\.factor"), ("longrope", r"rope\.scaling\.type='longrope'")):
        scaled = tiny.write_gguf(model, tmp_path / f"{kind}.gguf", llama__rope__scaling__type=kind)
        with pytest.raises(ModelStoreError, match=f"{why}: rotations scaled so are not supported in GGUF"):
            load(scaled, ENGINE, cache=tmp_path)
    odd = tiny.model(1, "llama", **{**BASE, "rope_parameters": LLAMA3})  # another original context than Llama 3.1's
    with pytest.raises(ModelStoreError, match=r"rope_freqs\.weight: rotations scaled so are not supported"):
        load(tiny.write_gguf(odd, tmp_path / "odd.gguf"), ENGINE, cache=tmp_path)
    plain = tiny.write_gguf(model, tmp_path / "p.gguf", llama__rope__scaling__type="none")
    assert load(plain, ENGINE, cache=tmp_path).config.rope.kind == "default"
