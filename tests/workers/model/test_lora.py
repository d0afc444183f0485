"""Adapters answer as the model with them merged in would, whoever else is in the batch; broken ones are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace as with_fields
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from tests.workers.model import adapters, tiny
from tests.workers.model.harness import GREEDY, Bench
from tests.workers.model.test_techniques import EVERY, switch_of
from workers.adapters import CONFIG_FILE, WEIGHTS_FILE, AdapterError
from workers.config import EngineConfig
from workers.protocol import Generate
from workers.techniques import SWITCHES

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "all": {},
    "attention": {"target_modules": ["q_proj", "v_proj"], "r": 7, "lora_alpha": 5},
    "ranks": {
        "use_rslora": True,
        "rank_pattern": {"layers.1.self_attn.q_proj": 9, "down_proj": 2},
        "alpha_pattern": {"up_proj": 3, r"layers\.0.*k_proj": 20},
    },
    "one layer": {"layers_to_transform": [1], "target_modules": ["gate_proj", "o_proj"], "r": 16},
}
PROMPTS = [[*range(40, 57), 100 + own, 7] for own in range(3)] + [[5, 5, 6, 5, 8], list(range(90, 121))]
NEW = 8
BASE: Mapping[str, Any] = {"device": "cpu", "threads": 1, "block_size": 16, "blocks": 64, "dtype": "float32"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``base``; of every adapter ``<name>`` and ``<name>-merged``."""
    folder = tmp_path_factory.mktemp("lora")
    made = tiny.model(3, hidden_size=64, intermediate_size=96, head_dim=16)
    base = tiny.write_directory(made, folder / "base")
    for seed, (name, settings) in enumerate(SETTINGS.items(), 1):
        adapters.write(base, folder / name, seed=seed, merged=folder / f"{name}-merged", **settings)
    return folder


def engine(models: Path, *names: str, **changes: Any) -> EngineConfig:
    sources = [{"name": Path(name).name.replace(" ", "-"), "source": str(models / name)} for name in names]
    kernel = {} if "attention" in changes else {"attention": "native", "threads": 2}
    return EngineConfig(**{**BASE, **kernel, "adapters": sources, **changes})


def digests(bench: Bench) -> dict[str, str]:
    assert bench.model.adapters is not None
    return {adapter.name: adapter.digest for adapter in bench.model.adapters}


@cache
def alone(models: Path, name: str | None, attention: str) -> list[list[int]]:
    """The answers of the model with ``name`` merged in."""
    source = models / ("base" if name is None else f"{name}-merged")
    bench = Bench(source, engine(models, attention=attention))
    return [one.tokens for one in bench.run(Generate(f"r{i}", p, NEW, GREEDY) for i, p in enumerate(PROMPTS))]


@pytest.mark.parametrize("attention", ["native", "batched", "reference"])
def test_everyone_in_one_batch_answers_as_its_merged_model(models: Path, attention: str) -> None:
    """All adapters and none, mixed, with chunks of prompts beside decodes. Engine A5: each as its own solo run."""
    bench = Bench(models / "base", engine(models, *SETTINGS, attention=attention, max_step_tokens=24))
    found = digests(bench)
    assert len(set(found.values())) == len(SETTINGS)
    everyone = [None, *SETTINGS]
    requests = [
        Generate(f"{name}-{i}", prompt, NEW, GREEDY, adapter=name and found[name.replace(" ", "-")])
        for i, prompt in enumerate(PROMPTS)
        for name in everyone
    ]
    answers = [one.tokens for one in bench.run(requests, stagger=1)]
    assert bench.noted.widest > len(everyone)
    wanted = {name: alone(models, name, attention) for name in everyone}
    assert len({str(answer) for answer in wanted.values()}) == len(everyone), "the adapters change nothing"
    for place, name in enumerate(everyone):
        assert answers[place :: len(everyone)] == wanted[name], name


def test_the_kernel_gives_the_same_bits_in_any_company(models: Path) -> None:
    """An adapter's row and a plain one: alone, and among all others, in bf16."""
    bench = Bench(models / "base", engine(models, *SETTINGS, dtype="bfloat16", prefix_cache=False))
    found = digests(bench)
    names = [None, "all", "ranks"]
    requests = [Generate(f"{n}", PROMPTS[0], NEW, GREEDY, adapter=n and found[n]) for n in names]
    together = bench.run([*requests, Generate("more", PROMPTS[4], NEW, GREEDY, adapter=found["attention"])])
    for one, request in zip(together, requests, strict=False):
        again = bench.run([Generate(f"again-{request.id}", request.tokens, NEW, GREEDY, adapter=request.adapter)])
        assert (again[0].tokens, again[0].logprobs) == (one.tokens, one.logprobs)


@pytest.mark.parametrize("attention", ["native", "batched"])
def test_nobody_hits_anothers_blocks(models: Path, attention: str) -> None:
    """Engine A1, A5: the same prompt under base, two adapters, and under each again: own hits only, own tokens."""
    bench = Bench(models / "base", engine(models, "all", "ranks", attention=attention))
    found = digests(bench)
    wanted = {name: alone(models, name, attention)[4] for name in (None, "all", "ranks")}
    for turn in range(2):
        for name, tokens in wanted.items():
            request = Generate(f"{turn}-{name}", PROMPTS[4], NEW, GREEDY, adapter=name and found[name])
            (one,) = bench.run([request])
            assert one.last is not None
            assert one.last.prompt_cached == turn * 16
            assert one.tokens == tokens


def test_preempted_sequences_come_back_under_their_adapter(models: Path) -> None:
    bench = Bench(models / "base", engine(models, "all", "ranks", blocks=11))
    found = digests(bench)
    names = ["all", None, "ranks", "all", "ranks", "all"]
    prompts = [[*range(40, 73), 100 + own, 7] for own in range(len(names))]
    requests = [Generate(f"r{i}", prompts[i], 40, GREEDY, adapter=n and found[n]) for i, n in enumerate(names)]
    answers = [one.tokens for one in bench.run(requests, stagger=1)]
    assert bench.preemptions > 0
    calm = Bench(models / "base", engine(models, "all", "ranks", prefix_cache=False))
    assert answers == [one.tokens for one in calm.run(requests)]


@pytest.mark.parametrize("name", sorted(set(EVERY) - {"adapters"}))
def test_beside_every_other_switch(name: str, models: Path, tmp_path: Path) -> None:
    """Exact switches: as the merged model. Lossy ones: the same in company as alone, and other than the base model."""
    try:
        config = engine(models, "all", "ranks", **{"attention": "auto", **EVERY[name](tmp_path)})
    except ValidationError as error:
        if not any(field in str(error) for field in EVERY[name](tmp_path)) or "adapters" not in str(error):
            pytest.fail(f"refused without naming both: {error}")
        return
    bench = Bench(models / "base", config)
    found = digests(bench)
    requests = [
        Generate(f"{one}-{i}", prompt, NEW, GREEDY, adapter=one and found[one])
        for i, prompt in enumerate(PROMPTS[2:])
        for one in ("all", None, "ranks")
    ]
    answers = [one.tokens for one in bench.run(requests, stagger=1)]
    assert answers[0] != answers[1] != answers[2] != answers[0]
    exact = next(switch for switch in SWITCHES if switch.field == switch_of(name)).exact
    if exact:
        assert answers[0::3] == alone(models, "all", "batched")[2:]
    else:
        again = [bench.run([with_fields(request, id=f"alone-{request.id}")])[0].tokens for request in requests]
        assert again == answers


def copy_of(models: Path, folder: Path, name: str = "all", **changes: Any) -> Path:
    """An adapter with other fields in its config."""
    folder.mkdir(exist_ok=True)
    (folder / WEIGHTS_FILE).write_bytes((models / name / WEIGHTS_FILE).read_bytes())
    fields = json.loads((models / name / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps({**fields, **changes}))
    return folder


FIELDS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, "use_dora=true is not supported"),
    "biases": ({"bias": "all"}, "bias='all' is not supported"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save=\\['lm_head'\\] is not supported"),
    "another method": ({"peft_type": "IA3"}, "peft_type='IA3' is not supported"),
    "changed base": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' changes the base"),
    "a newer field": ({"use_tomorrows_trick": True}, "use_tomorrows_trick=True is not supported"),
    "another rank": ({"r": 8}, "lora_A has shape \\[4, 96\\]; for r=8"),
    "no rank": ({"r": 0}, "r=0 must be a positive whole number"),
    "an endless alpha": ({"lora_alpha": float("inf")}, "lora_alpha=inf must be a positive number"),
    "a huge alpha": ({"lora_alpha": 1e60}, "lora_alpha=1e\\+60 makes numbers of lora_B that are not finite"),
    "a rank beyond all": ({"r": 10**400}, "r=10+ must be a positive whole number"),
    "layers of another form": ({"layers_to_transform": [[0]]}, "layers_to_transform=\\[\\[0\\]\\] is not of the form"),
    "patterns of another form": ({"rank_pattern": ["q_proj"]}, "rank_pattern=\\['q_proj'\\] is not of the form"),
    "no alpha": ({"lora_alpha": "x"}, "lora_alpha='x' must be a positive number"),
    "bad pattern": ({"rank_pattern": {"(": 3}}, "rank_pattern: '\\(' is no regular expression"),
    "unknown target": ({"target_modules": ["q_proj", "lm_head"]}, "target_modules names 'lm_head'"),
}


@pytest.mark.parametrize("case", FIELDS)
def test_what_is_not_plain_lora_is_refused_by_name(case: str, models: Path, tmp_path: Path) -> None:
    changes, said = FIELDS[case]
    copy_of(models, tmp_path / "broken", **changes)
    with pytest.raises(AdapterError, match=said):
        Bench(models / "base", engine(models, str(tmp_path / "broken"), attention="batched"))


def test_broken_files_change_nothing(models: Path, tmp_path: Path) -> None:
    """Truncated, incomplete, not finite, of another model, too high, too large: said; the loaded one works on."""
    bench = Bench(
        models / "base", engine(models, "all", max_adapter_rank=9, adapter_memory=50_000, attention="batched")
    )
    read = bench.model.read_adapter
    assert read is not None
    tensors = load_file(models / "all" / WEIGHTS_FILE)
    first = next(iter(tensors))

    def broken(name: str, changed: Mapping[str, torch.Tensor]) -> str:
        folder = copy_of(models, tmp_path / name)
        save_file(dict(changed), folder / WEIGHTS_FILE)
        return str(folder)

    rest = {name: tensor for name, tensor in tensors.items() if name != first}
    cut = copy_of(models, tmp_path / "cut")
    (cut / WEIGHTS_FILE).write_bytes((cut / WEIGHTS_FILE).read_bytes()[:-100])
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / CONFIG_FILE).write_text("{}")
    (pickled / "adapter_model.bin").write_bytes(b"")
    cases = {
        str(tmp_path / "nowhere"): "is no directory",
        "a\0b": "is no directory",
        str(pickled): "pickle, which is never read",
        str(cut): "not a readable safetensors file",
        broken("half", rest): "both halves are needed",
        broken("layer", {name: t for name, t in tensors.items() if "layers.1.mlp.up_proj" not in name}): "is it whole",
        broken("empty", {}): "holds no tensors",
        broken("twice", {**tensors, first.replace(".weight", ".other.weight"): tensors[first].clone()}): "there twice",
        broken("small", {**tensors, first: (tensors[first] * float("nan")).to(torch.float8_e4m3fn)}): "not finite",
        broken("nan", {**tensors, first: tensors[first] * float("nan")}): "not finite",
        broken("deep", {first.replace("layers.0", "layers.7"): tensors[first]}): "this model has 2 layers",
        broken("head", {"base_model.model.lm_head.lora_A.weight": tensors[first]}): "has no place",
        str(models / "one layer"): "rank 16; engine.max_adapter_rank=9",
    }
    for source, said in cases.items():
        with pytest.raises(AdapterError, match=said):
            read("broken", source)
    large = read("ranks", str(copy_of(models, tmp_path / "other", "ranks", r=4)))
    assert bench.model.adapters is not None
    assert "adapter_memory=50,000 are left: drop one" in str(bench.model.adapters.install(large))
    assert [adapter.name for adapter in bench.model.adapters] == ["all"]


def test_an_unknown_adapter_is_an_error_and_never_the_base_model(models: Path) -> None:
    bench = Bench(models / "base", engine(models, "all"))
    (one,) = bench.run([Generate("r", PROMPTS[0], 4, GREEDY, adapter="sha256:0")])
    assert one.last is not None
    assert (one.last.finish, one.last.error, one.tokens) == ("error", "adapter", [])


def test_room_is_set_aside_in_the_plan(models: Path) -> None:
    without = Bench(models / "base", engine(models, attention="batched")).model.budget
    room = Bench(models / "base", engine(models, "all", adapter_memory=2**20, attention="batched")).model.budget
    assert (without.adapters, room.adapters) == (0, 2**20)
    assert room.planned - without.planned == 2**20
    assert room.figures()["adapters"] == 2**20
