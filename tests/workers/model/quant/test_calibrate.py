"""int4 fitted to a text on its way through a model: which matrices, for which families, and what becomes of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.workers.model import tiny
from tests.workers.model.harness import logits_of
from tests.workers.model.test_perplexity import TEXT
from workers.config import EngineConfig
from workers.model.config import read_config
from workers.model.llama import LlamaDecoder
from workers.model.loading import LoadedModel, load
from workers.model.quant import calibrate
from workers.model.quant.calibrate import calibrated
from workers.model.quant.matrix import Quantised
from workers.model.quant.rounding import int4
from workers.model.registry import BUILTIN, architecture
from workers.model.weights import SafetensorsSource
from workers.model_store import ModelStoreError
from workers.tokenizer import Tokenizer

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 272, "head_dim": 16}
TOKENS = [(7 * index * index + 3 * index) % 290 for index in range(60)]
PIECES = [[(11 * index * index + index) % 290 for index in range(start, start + 200)] for start in range(0, 2000, 200)]
FAMILIES: Mapping[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
}


def written(folder: Path, family: str = "llama", **changes: Any) -> Path:
    return tiny.write_directory(tiny.model(4, family, **{**SIZES, **FAMILIES[family], **changes}), folder)


def fit(folder: Path, pieces: list[list[int]]) -> dict[str, Quantised]:
    config = read_config(folder)
    with SafetensorsSource(folder) as source:
        return calibrated(architecture(config.architecture), config, source, pieces, torch.device("cpu"))


def loaded(folder: Path, cache: Path, **settings: Any) -> LoadedModel:
    base = {"device": "cpu", "dtype": "float32", "blocks": 64, "threads": 1, "weight_dtype": "int4"}
    return load(folder, EngineConfig.model_validate({**base, **settings}), cache=cache)


def answer(model: LoadedModel) -> Tensor:
    return logits_of(model, TOKENS, [60], list(range(4)))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_is_fitted_in_its_place(family: str, tmp_path: Path) -> None:
    """And near what rounding it without data gives. Routers, values and vocabulary are not among them."""
    folder = written(tmp_path, family)
    made, stored = fit(folder, PIECES), load_file(folder / "model.safetensors")
    inner = {name for name, weight in stored.items() if weight.dim() == 2 and ".layers." in name}
    assert set(made) == {name for name in inner if not name.endswith(("block_sparse_moe.gate.weight", "v_proj.weight"))}
    moved = False
    for name, one in made.items():
        weight, plain = stored[name].float(), int4(stored[name]).dense(torch.float32)
        assert one.shape == tuple(weight.shape)
        off = (one.dense(torch.float32) - weight).square().mean()
        assert off < 9 * (plain - weight).square().mean(), name
        moved |= not torch.equal(one.dense(torch.float32), plain)
    assert moved, "nothing was fitted"


def test_other_texts_lose_less_by_it(smollm2_cut: Path, tmp_path: Path) -> None:
    """Real inputs have much in common: with weights off the grid that they came on, logits move less."""
    generator = torch.Generator().manual_seed(3)
    stored = load_file(smollm2_cut / "model.safetensors")
    for name, weight in stored.items():
        if weight.dim() == 2 and ".layers." in name:
            step = weight.float().abs().mean() / 4
            weight += (step * (torch.rand(weight.shape, generator=generator) - 0.5)).to(weight.dtype)
    folder = tmp_path / "model"
    folder.mkdir()
    for file in ("config.json", "generation_config.json", "tokenizer.json"):
        (folder / file).symlink_to(smollm2_cut / file)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    words = Tokenizer.load(smollm2_cut).encode_text(TEXT.read_text(encoding="utf-8"))
    tokens = [token for token in words if token < 4096][:200]

    def logits(**settings: Any) -> Tensor:
        return logits_of(loaded(folder, tmp_path, **settings), tokens, [len(tokens)], list(range(13)))

    exact, fitted, plain = logits(weight_dtype="auto"), logits(), logits(weight_calibration=False)
    assert (fitted - exact).square().mean() < 0.7 * (plain - exact).square().mean()


def test_what_the_text_does_not_reach_is_rounded_without_data(tmp_path: Path) -> None:
    """An expert that no token chooses; no text at all."""
    folder = written(tmp_path, "mixtral", num_experts_per_tok=1)
    one_token = fit(folder, [[5, 5]])
    stored = load_file(folder / "model.safetensors")
    plain = {name: torch.equal(made.dense(), int4(stored[name]).dense()) for name, made in one_token.items()}
    experts = {name: same for name, same in plain.items() if ".experts." in name}
    assert sum(experts.values()) >= 12, "three matrices of at least two experts in both layers"
    assert not all(plain.values())
    assert all(torch.equal(made.dense(), int4(stored[name]).dense()) for name, made in fit(folder, [[5]]).items())


class Half(LlamaDecoder):
    """A decoder that multiplies with the matrices of its second layer by itself."""

    def forward(self, *given: Any) -> Tensor:
        first, second = self.layers
        self.layers = torch.nn.ModuleList([first])
        self._rope_of = self._rope_of[:1]
        super().forward(*given)
        made: Tensor = second.mlp.down.matrix.dense()
        return made


class Hasty(LlamaDecoder):
    """One that wants numbers before anything is computed."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.layers[0].mlp.down.matrix.dense()  # type: ignore[union-attr]


def test_a_decoder_that_uses_matrices_by_itself_is_fitted_as_far_as_it_goes(tmp_path: Path) -> None:
    folder = written(tmp_path)
    config, stored = read_config(folder), load_file(folder / "model.safetensors")
    for kind, reached in ((Half, {"0"}), (Hasty, set())):
        with SafetensorsSource(folder) as source:
            made = calibrated(kind, config, source, PIECES, torch.device("cpu"))
        fitted = {name for name, one in made.items() if not torch.equal(one.dense(), int4(stored[name]).dense())}
        assert {name.split(".")[2] for name in fitted} == reached
        assert len(made) == 12


def test_it_is_read_again_and_made_again_when_it_broke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, passes = written(tmp_path / "model"), 0
    once = calibrate._Pass.run

    def counted(self: Any, *given: Any) -> dict[str, Quantised]:
        nonlocal passes
        passes += 1
        return once(self, *given)

    monkeypatch.setattr(calibrate._Pass, "run", counted)
    first, second = loaded(folder, tmp_path), loaded(folder, tmp_path, attention="batched")
    assert passes == 1
    assert first.numbers == second.numbers != first.revision
    assert first.weight_bytes < 0.3 * loaded(folder, tmp_path, weight_dtype="auto").weight_bytes
    (path,) = (tmp_path / "roundings").glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:-3])
    assert torch.equal(answer(loaded(folder, tmp_path)), answer(first))
    assert passes == 2


def test_it_is_told_and_never_on_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """``forebay eval --format json`` loads models as well."""
    folder = written(tmp_path / "model")
    capsys.readouterr()
    with caplog.at_level(logging.INFO):
        loaded(folder, tmp_path)
    assert [record.message for record in caplog.records] == ["rounding_is_fitted", "rounding_fitted"]
    assert capsys.readouterr().out == ""


def test_without_calibration_nothing_is_kept_and_numbers_are_the_revision(tmp_path: Path) -> None:
    folder = written(tmp_path / "model")
    model = loaded(folder, tmp_path, weight_calibration=False)
    assert model.numbers == model.revision
    assert not (tmp_path / "roundings").exists()


def test_a_gguf_file_read_as_it_lies_is_fitted_alike(tmp_path: Path) -> None:
    file = tiny.write_gguf(tiny.model(4, **SIZES), tmp_path / "tiny.gguf")
    engine = EngineConfig(device="cpu", dtype="float32", blocks=64, threads=1, weight_dtype="int4")
    straight = load(file, engine, cache=tmp_path / "one", straight=True)
    assert straight.numbers == load(file, engine, cache=tmp_path / "two").numbers != straight.revision


def test_a_weight_that_cannot_be_rounded_is_named(tmp_path: Path) -> None:
    made = tiny.model(4, **SIZES)
    with torch.no_grad():
        made.get_parameter("model.layers.1.mlp.down_proj.weight")[3, 5] = float("nan")
    folder = tiny.write_directory(made, tmp_path / "model")
    with pytest.raises(ModelStoreError, match=r"layers\.1\.mlp\.down_proj\.weight'.*not finite.*weight_dtype: auto"):
        loaded(folder, tmp_path)


def test_all_built_in_architectures_are_tried_here() -> None:
    """By their decoders: the families of one class differ in what the fit does not see."""
    tried = {BUILTIN[name] for name in ("LlamaForCausalLM", "MixtralForCausalLM")}
    assert set(BUILTIN.values()) == tried
