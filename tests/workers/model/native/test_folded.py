"""bfloat16 weights in 12 bits: the same weights to the last bit, whatever their exponents are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.workers.model import tiny
from tests.workers.model.native.by_hand import Kernel, ids, table
from workers.config import EngineConfig
from workers.model import loading
from workers.model.native import pack
from workers.model.native.build import load
from workers.model.native.runner import NativeRunner

pytestmark = pytest.mark.skipif(
    not torch.cpu.get_capabilities().get("avx512_bf16"), reason="needs an instruction that multiplies bfloat16"
)
ROWS, HEAD, WHOLE = 16, 64, 1024
"""Of a group; bytes before a short panel's groups; of a group that stayed as it was."""


def fold(weight: Tensor) -> pack.Packed:
    return pack.folded(pack.packed(weight, weight.dtype), weight.shape[1], load().fb_fold)


def unfolded(made: pack.Packed, k: int) -> tuple[Tensor, int]:
    """The dense panels, as int16, by the words of ``folded.h``, and how many groups stayed as they were."""
    assert made.starts is not None
    panels, stayed = [], 0
    for begin, end in zip(made.starts[:-1].tolist(), made.starts[1:].tolist(), strict=True):
        panel = made.memory[begin:end]
        exponents, bits, at = panel[:32].view(torch.int16), panel[32:HEAD].tolist(), HEAD
        for group in range(k // ROWS):
            if bits[group // 8] >> group % 8 & 1:
                panels.append(panel[at : at + WHOLE].view(torch.int16))
                at, stayed = at + WHOLE, stayed + 1
                continue
            for _ in range(4):
                words, rest = panel[at : at + 64].view(torch.int16).int(), panel[at + 64 : at + 192].short()
                codes = torch.cat([words >> shift & 15 for shift in (0, 4, 8, 12)])
                panels.append(exponents[codes.long()] | (rest & 0x7F) | (rest & 0x80) << 8)
                at += 192
        assert at == len(panel)
    return torch.cat(panels), stayed


def test_no_bit_of_a_weight_is_lost() -> None:
    torch.manual_seed(1)
    weight = torch.randn(70, 960).to(torch.bfloat16)
    rare = [0.0, -0.0, 1e-39, 3e38, float("inf"), float("-inf"), float("nan"), -1e-20]
    for i, value in enumerate(rare):
        weight[5 * i, 11 * i] = value
    got, stayed = unfolded(fold(weight), 960)
    assert torch.equal(got, pack.panels(weight).view(torch.int16))
    assert 3 <= stayed < 20


@pytest.mark.parametrize("exponents", [1, 3, 16])
def test_few_exponents_are_all_kept(exponents: int) -> None:
    torch.manual_seed(2)
    weight = (torch.randint(0, exponents, (64, 48)).float() - 40).exp2().to(torch.bfloat16)
    made = fold(weight)
    got, stayed = unfolded(made, 48)
    assert torch.equal(got, pack.panels(weight).view(torch.int16))
    assert stayed == 0
    assert len(made.memory) == 2 * (HEAD + 3 * 768)


def test_weights_of_any_exponents_stay_as_they_are() -> None:
    torch.manual_seed(3)
    weight = torch.randint(-(2**15), 2**15, (64, 64), dtype=torch.int16).view(torch.bfloat16)
    made = fold(weight)
    assert made.starts is None
    assert torch.equal(made.memory.view(torch.int16), pack.panels(weight).view(torch.int16))


def test_only_bfloat16_is_folded() -> None:
    weight = torch.randn(64, 64)
    assert fold(weight).memory.dtype == torch.float32


@pytest.mark.parametrize("ffn", [48, 160])
def test_logits_have_the_same_bits(tmp_path: Path, ffn: int) -> None:
    """At every height of a register tile, alone and beside others, and with weights that no sixteen exponents hold."""
    made = tiny.model(6, hidden_size=64, head_dim=16, intermediate_size=ffn, vocab_size=301, tie_word_embeddings=False)
    with torch.no_grad():
        for layer in made.model.layers:
            for linear in (layer.mlp.down_proj, layer.mlp.up_proj, layer.self_attn.q_proj):
                linear.weight[3::17, ::29] = 1e-9
    directory = tiny.write_directory(made, tmp_path)
    dense = Kernel(directory, torch.bfloat16, folds=False)
    for threads in (1, 3):
        kernel = Kernel(directory, torch.bfloat16, threads)
        assert kernel.decoder.weight_bytes() == dense.decoder.weight_bytes()
        assert dense.decoder.folded_away == 0 < 0.1 * dense.decoder.weight_bytes() < kernel.decoder.folded_away
        for count in (*range(1, 14), 25, 70, 140):
            chunk = (ids(count, count), 0, table(count, count))
            assert torch.equal(kernel.run(chunk), dense.run(chunk)), f"{count} rows"
            assert torch.equal(kernel.run(chunk, sampled=[count - 1]), dense.run(chunk, sampled=[count - 1]))


def test_folding_can_be_left_out(tmp_path: Path) -> None:
    """By configuration; what is planned and told of weights counts two bytes either way."""
    directory = tiny.write_directory(tiny.model(4, hidden_size=64, head_dim=16, intermediate_size=64), tmp_path)
    away, told = [], set()
    for folds in (True, False):
        settings = {"device": "cpu", "dtype": "bfloat16", "blocks": 8, "threads": 1, "fold_weights": folds}
        made = loading.load(directory, EngineConfig.model_validate(settings))
        assert isinstance(made.runner, NativeRunner)
        away.append(made.runner.decoder.folded_away)
        told.add(made.weight_bytes)
    assert away[0] > 0 == away[1]
    assert len(told) == 1
