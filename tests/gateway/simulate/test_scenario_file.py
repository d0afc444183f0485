"""Reading scenarios: every mistake with its path and line, and what the shipped ones hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config_file import ConfigErrors
from gateway.paths import PathError
from gateway.simulate.scenario_file import load, resolve, shipped
from gateway.simulate.step_time import PS_PER_S
from gateway.simulate.step_time import load as load_step_time

GOOD = """
seed: 1
duration_s: 600
policy: {use: vtc, with: {input_cost: 1, output_cost: 2}}
workers: {count: 1, kv_tokens: 10000, block_size: 16, max_running: 64, max_step_tokens: 512, prefix_cache: false,
          step_ms: {base: 20, per_decode: 0.15, per_prefill_token: 0.25}}
tenants:
  - {id: a, weight: 1, keys: 1, arrivals: {kind: poisson, rate: 1.5}, \
     input: {kind: fixed, value: 256}, output: {kind: fixed, value: 256}}
"""


def mistakes(folder: Path, text: str) -> str:
    path = folder / "s.yaml"
    path.write_text(text)
    with pytest.raises(ConfigErrors) as caught:
        load(path)
    return str(caught.value)


def test_the_documented_schema_loads(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(GOOD)
    loaded = load(tmp_path / "s.yaml")
    scenario = loaded.scenario
    assert scenario.workers.blocks == 625
    assert (scenario.costs.input_cost, scenario.costs.output_cost) == (1, 2)
    step = load_step_time(scenario.workers.step_ms, tmp_path)
    assert (step.base, step.per_decode) == (PS_PER_S // 50, 150_000_000)


@pytest.mark.parametrize(
    ("before", "after", "where"),
    [
        ("rate: 1.5", "rate: 1.5, cv: 2", r"tenants[0].arrivals.cv (line 8): unknown key (known: kind, rate)"),
        ("rate: 1.5", "rate: -1", "tenants[0].arrivals.rate (line 8)"),
        ("kind: poisson, ", "kind: possion, ", "tenants[0].arrivals (line 8)"),
        ("value: 256}}", "value: 256, max: 1}}", "tenants[0].output.max (line 8): unknown key (known: kind, value)"),
        ("base: 20", "bas: 20", "workers.step_ms.bas (line 6): unknown key; did you mean 'base'?"),
        ("block_size: 16", "block_size: 0", "workers.block_size (line 5)"),
        ("use: vtc", "use: vct", "policy.use (line 4): unknown scheduling policy 'vct'; did you mean 'vtc'?"),
        ("input_cost: 1", "inputcost: 1", "policy.with.inputcost (line 4): unknown key 'inputcost'"),
        ("seed: 1", "sede: 1", "sede (line 2): unknown key; did you mean 'seed'?"),
        (", output: {kind: fixed, value: 256}", "", "tenants[0].output (line 8): is missing"),
    ],
)
def test_each_mistake_is_named_with_its_path(tmp_path: Path, before: str, after: str, where: str) -> None:
    assert before in GOOD
    assert where in mistakes(tmp_path, GOOD.replace(before, after, 1))


def test_all_mistakes_come_at_once(tmp_path: Path) -> None:
    text = mistakes(tmp_path, GOOD.replace("seed: 1", "sede: 1").replace("rate: 1.5", "rate: 0"))
    assert "sede" in text
    assert "tenants[0].arrivals.rate" in text


def test_tenants_must_differ(tmp_path: Path) -> None:
    twice = GOOD + GOOD.splitlines()[-1] + "\n"
    assert "tenants[1].id (line 9): duplicate tenant id 'a'" in mistakes(tmp_path, twice)


def test_a_log_brings_its_own_lengths(tmp_path: Path) -> None:
    text = GOOD.replace("{kind: poisson, rate: 1.5}", "{kind: log, file: x.csv}")
    assert "tenants[0].input (line 8): is in the log already" in mistakes(tmp_path, text)


@pytest.mark.parametrize("text", ["", "- 1", "a: [", "seed: 1\nseed: 2\n"])
def test_what_is_no_scenario_is_refused(tmp_path: Path, text: str) -> None:
    assert mistakes(tmp_path, text)


def test_a_calibration_file_is_read_and_its_mistakes_named(tmp_path: Path) -> None:
    text = GOOD.replace("{base: 20, per_decode: 0.15, per_prefill_token: 0.25}", "{calibration: bench.json}")
    (tmp_path / "s.yaml").write_text(text)
    cost = load(tmp_path / "s.yaml").scenario.workers.step_ms
    with pytest.raises(ConfigErrors, match="No such file"):
        load_step_time(cost, tmp_path)
    for wrong, message in (("[", "is not JSON"), ("{}", "--calibrate"), ('{"step_ms": {"bass": 1}}', "step_ms.bass")):
        (tmp_path / "bench.json").write_text(wrong)
        with pytest.raises(ConfigErrors, match=message):
            load_step_time(cost, tmp_path)
    (tmp_path / "bench.json").write_text('{"step_ms": {"base": 5, "per_decode": 1}, "device": "cpu"}')
    assert load_step_time(cost, tmp_path).base == PS_PER_S // 200


def test_figures_and_a_calibration_exclude_each_other(tmp_path: Path) -> None:
    text = GOOD.replace("{base: 20,", "{base: 20, calibration: bench.json,")
    assert "keep one of them" in mistakes(tmp_path, text)


def test_another_policy_keeps_what_tokens_count() -> None:
    loaded = load(resolve("two-tenants"))
    other = loaded.under("fcfs", 7)
    assert other.scenario.policy.use == "fcfs"
    assert other.scenario.seed == 7
    assert other.scenario.costs == loaded.scenario.costs
    with pytest.raises(ConfigErrors, match="unknown scheduling policy 'nope'"):
        loaded.under("nope")


def test_names_of_shipped_scenarios_resolve() -> None:
    assert resolve("two-tenants").name == "two-tenants.yaml"
    assert len(shipped()) >= 13
    with pytest.raises(PathError, match="two-tenants"):
        resolve("tow-tenants")


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_scenario_loads(name: str) -> None:
    loaded = load(resolve(name))
    assert loaded.scenario.description
