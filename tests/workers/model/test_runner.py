"""The runner under the real engine: rows, choices, copies, modes, faults; and the model as a person meets it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tests.workers.model import tiny
from tests.workers.model.harness import GREEDY, Bench
from workers.config import EngineConfig
from workers.engine.plan import StepPlan
from workers.model.loading import load, pick_device, pick_dtype
from workers.model.runner import TorchRunner, compiled_since
from workers.model_store import ModelFiles, ModelStoreError
from workers.protocol import Generate, SamplingParams

ENGINE = EngineConfig(device="cpu", dtype="float32", blocks=64, block_size=4, threads=1)
PROMPTS = [[(5 * row + 3 * index * (row + 1)) % 290 for index in range(3 + 4 * row)] for row in range(6)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_directory(tiny.model(seed=11), tmp_path_factory.mktemp("runner") / "m")


def bench(directory: Path, **changes: Any) -> Bench:
    return Bench(directory, ENGINE.model_copy(update=changes))


def test_linears_see_exactly_the_planned_rows(directory: Path) -> None:
    """Counted by hooks on every linear of a mixed run: prompts, chunks, decodes and a hit, never a row of padding."""
    made = bench(directory, max_chunk_tokens=5, max_step_tokens=17)
    decoder = made.model.runner.decoder
    assert isinstance(decoder, torch.nn.Module)
    rows: dict[str, int] = {}
    sampled = planned = 0

    def counter(name: str) -> Any:
        def count(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], _output: torch.Tensor) -> None:
            assert inputs[0].ndim == 2
            rows[name] = rows.get(name, 0) + len(inputs[0])

        return count

    linears = {name: part for name, part in decoder.named_modules() if isinstance(part, torch.nn.Linear)}
    assert len(linears) == 2 * 4 + 1
    for name, part in linears.items():
        part.register_forward_hook(counter(name))
    inner = made.noted.run

    def run(plan: StepPlan) -> Any:
        nonlocal planned, sampled
        rows.clear()
        result = inner(plan)
        wanted = sum(bool(chunk.samplers) for chunk in plan.chunks)
        assert rows.pop("head", 0) == wanted
        assert set(rows.values()) == {plan.tokens}
        planned, sampled = planned + plan.tokens, sampled + wanted
        return result

    made.noted.run = run  # type: ignore[method-assign]
    made.run([Generate(f"{index}", prompt, 6, GREEDY) for index, prompt in enumerate(PROMPTS)], stagger=1)
    hit = made.run([Generate("again", PROMPTS[5], 6, GREEDY)])[0].last
    assert hit is not None
    assert hit.prompt_cached > 0
    assert made.noted.mixed_steps > 0
    assert planned == sum(len(prompt) + 5 for prompt in [*PROMPTS, PROMPTS[5]]) - hit.prompt_cached
    assert sampled == 7 * 6


@pytest.mark.parametrize("length", [7, 8, 13])
@pytest.mark.parametrize("blocks", [64, 9])
def test_four_choices_equal_four_seeded_single_runs(directory: Path, length: int, blocks: int) -> None:
    """engine I1: shared prompt, copied tail; in a tight pool the choices drive each other out on the way."""
    made = bench(directory, blocks=blocks)
    params = SamplingParams(temperature=1.0, seed=40, top_p=0.95, ignore_eos=True)
    prompt = PROMPTS[5][:length]
    made.run([Generate("n", prompt, 12, params, n=4, scope=b"n")])
    together = [made.done["n", index].tokens for index in range(4)]
    assert made.preemptions > 0 or blocks == 64
    assert made.done["n", 0].last.prompt_computed == length  # type: ignore[union-attr]
    for index in range(4):
        single = SamplingParams(temperature=1.0, seed=40 + index, top_p=0.95, ignore_eos=True)
        alone = made.run([Generate(f"single {index}", prompt, 12, single, scope=b"%d" % index)])[0]
        assert together[index] == alone.tokens
    assert len({tuple(tokens) for tokens in together}) == 4


@pytest.mark.parametrize("changes", [{"kv_cache_reuse": False}, {"mode": "static"}, {"prefix_cache": False}])
def test_comparison_modes_give_the_same_tokens(directory: Path, changes: dict[str, Any]) -> None:
    requests = [Generate(f"{index}", prompt, 8, GREEDY) for index, prompt in enumerate(PROMPTS)]
    usual, other = (bench(directory, **more).run(requests, stagger=1) for more in ({}, changes))
    assert [one.tokens for one in usual] == [one.tokens for one in other]


def test_recomputing_everything_runs_more_rows(directory: Path) -> None:
    made = bench(directory, kv_cache_reuse=False)
    made.run([Generate("a", PROMPTS[2], 5, GREEDY)])
    assert made.noted.chunks == [len(PROMPTS[2]) + step for step in range(5)]


def test_another_dtype_computes_in_it(directory: Path) -> None:
    made = bench(directory, dtype="bfloat16")
    assert made.model.runner.cache.data.dtype is torch.bfloat16
    assert made.model.kv_bytes_per_token == 2 * 2 * 2 * 8 * 2
    assert len(made.run([Generate("a", PROMPTS[3], 5, GREEDY)])[0].tokens) == 5


def test_a_broken_sequence_ends_and_the_others_go_on(directory: Path) -> None:
    """A token whose embedding is NaN poisons its own sequence only, and what it leaves in its blocks nobody reads."""
    made = bench(directory)
    decoder: Any = made.model.runner.decoder
    healthy = bench(directory).run([Generate("ok", [1, 2, 3, 4, 5, 6], 6, GREEDY)])[0].tokens
    decoder.embedding = decoder.embedding.clone()
    decoder.embedding[299] = math.nan
    bad, good = made.run(
        [Generate("bad", [1, 299, 3, 4, 5, 6], 6, GREEDY), Generate("ok", [1, 2, 3, 4, 5, 6], 6, GREEDY)]
    )
    assert bad.last is not None
    assert (bad.last.finish, bad.last.error, bad.tokens) == ("error", "internal", [])
    assert good.tokens == healthy
    assert made.run([Generate("next", [1, 2, 3, 4, 5, 6], 6, GREEDY)])[0].tokens == healthy


def test_what_is_compiled_after_the_start_is_counted(directory: Path) -> None:
    """engine H9. Nothing on a CPU; what a backend says of itself elsewhere."""
    runner = load(directory, ENGINE).runner
    assert isinstance(runner, TorchRunner)
    assert compiled_since(runner)() == 0
    forms = [2]
    runner.attention.compiled = lambda: forms[0]  # type: ignore[attr-defined]
    late = compiled_since(runner)
    assert late() == 0
    forms[0] = 5
    assert late() == 3


def test_zeroing_and_copying_come_before_computing(directory: Path) -> None:
    model = load(directory, ENGINE)
    runner: TorchRunner = model.runner
    runner.cache.data.fill_(3.0)
    assert runner.run(StepPlan(1, zero=[4, 5], copies=[(7, 4)])).sampled == []
    assert bool((runner.cache.data[:, :, 4] == 3.0).all())
    assert not runner.cache.data[:, :, 5].any()
    runner.zero_blocks([7])
    assert not runner.cache.data[:, :, 7].any()


def test_start_up_figures(directory: Path) -> None:
    model = load(directory, EngineConfig(device="cpu", dtype="float32", kv_cache="1MiB", block_size=16))
    parameters = 300 * 32 + 32 + 2 * (2 * 32 + 32 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 48)
    assert model.weight_bytes == parameters * 4
    assert model.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert model.blocks == 2**20 // (16 * 256)
    assert (model.max_context, model.vocab_size, model.eos_ids) == (256, 300, frozenset({2}))
    assert "1,048,576 bytes in 256 blocks of 16" in model.table
    assert "4,096 tokens, about 8 requests of 512" in model.table
    assert f"{parameters * 4:,} bytes" in model.table


@pytest.mark.parametrize(
    ("family", "changes", "positions"),
    [
        ("llama", {}, 64),
        ("gemma3_text", {"sliding_window": 20, "sliding_window_pattern": 2}, 64),
        ("mistral", {"sliding_window": 20}, 5000),  # blocks come back: a sequence may be longer than the cache
    ],
)
@pytest.mark.parametrize("attention", ["native", "batched"])
def test_rotations_are_laid_out_as_far_as_the_cache_reaches(
    tmp_path: Path, family: str, changes: dict[str, Any], positions: int, attention: str
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "max_position_embeddings": 5000}
    folder = tiny.write_directory(tiny.model(0, family, **sizes, **changes), tmp_path)
    model = load(folder, EngineConfig(device="cpu", dtype="float32", attention=attention, blocks=4))  # type: ignore[arg-type]
    assert model.max_context == 5000
    decoder: Any = model.runner.decoder  # type: ignore[union-attr]
    kept = decoder._kept if attention == "native" else [part for pair in decoder._ropes.values() for part in pair]
    turns = [part for part in kept if isinstance(part, torch.Tensor) and part.ndim > 1 and part.shape[-1] == 8]
    assert turns
    assert {len(part) for part in turns} == {positions}


def test_an_untied_head_counts_in_weight_bytes(tmp_path: Path) -> None:
    sizes = []
    for tied in (True, False):
        folder = tiny.write_directory(tiny.model(tie_word_embeddings=tied), tmp_path / str(tied))
        sizes.append(load(folder, ENGINE, cache=tmp_path).weight_bytes)
    assert sizes[1] - sizes[0] == 300 * 32 * 4


def test_settings_that_cannot_be_met_are_named(directory: Path) -> None:
    with pytest.raises(ValueError, match=r"engine\.max_context=9999 exceeds the model's own limit 256"):
        load(directory, ENGINE.model_copy(update={"max_context": 9999}))
    missing = torch.cuda.device_count()
    with pytest.raises(ValueError, match=rf"engine\.device=cuda:{missing} is not there: {missing} CUDA devices"):
        pick_device(f"cuda:{missing}")
    with pytest.raises(ModelStoreError, match="cannot be read straight"):
        load(directory, ENGINE, straight=True)
    assert load(directory, ENGINE.model_copy(update={"max_context": 100})).max_context == 100


def test_dtype_auto() -> None:
    cpu = torch.device("cpu")
    assert pick_dtype(EngineConfig(attention="reference"), cpu) is torch.float32
    assert pick_dtype(EngineConfig(dtype="float16"), cpu) is torch.float16
    able = torch.cpu.get_capabilities()
    fast = bool(able.get("avx512_bf16") or able.get("amx_bf16"))
    assert pick_dtype(EngineConfig(), cpu) is (torch.bfloat16 if fast else torch.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_capital_of_france(smollm2: ModelFiles, dtype: str) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2.dir / "tokenizer.json"))
    text = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    text += "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    engine = EngineConfig(device="cpu", dtype=dtype, blocks=16, threads=1)  # type: ignore[arg-type]
    made = Bench("", engine, load(smollm2, engine))
    prompt = tokenizer.encode(text).ids
    finished = made.run([Generate("chat", prompt, 30, SamplingParams(temperature=0.0))])[0]
    assert finished.last is not None
    assert finished.last.finish == "stop"
    assert "Paris" in tokenizer.decode(finished.tokens)


@pytest.mark.gpu
def test_cuda_gives_the_same_tokens(directory: Path) -> None:
    requests = [Generate(f"{index}", prompt, 8, GREEDY) for index, prompt in enumerate(PROMPTS)]
    cpu, cuda = (bench(directory, device=device).run(requests, stagger=1) for device in ("cpu", "cuda"))
    assert [one.tokens for one in cpu] == [one.tokens for one in cuda]
