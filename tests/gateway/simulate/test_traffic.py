"""Recorded traffic: from the request log to a traffic log, to a replay, to a scenario that is like it."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.simulate.export import export
from gateway.simulate.scenario_file import load
from gateway.simulate.simulation import Simulation, simulate
from gateway.simulate.synthesise import MAX_KS, fit, fit_arrivals, fit_lengths, gamma_cdf, ks, scenario
from gateway.simulate.traffic_log import Row, TrafficLogError, read, write
from tests.gateway.simulate.scenarios import make

LOG = {"kind": "log", "file": "traffic.csv"}


def line(arrival: float, tenant: str = "a", prompt: int = 40, output: int = 10, **more: Any) -> str:
    fields = {"arrival": arrival, "tenant": tenant, "model": "m", "outcome": "ok", "prompt": prompt, "output": output}
    return json.dumps({**fields, **more})


def test_the_request_log_becomes_rows(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    lines = [
        line(1000.5, prefixes=["p1", "p2", "x"], block_size=16, prompt=70),
        line(1000.0, prefixes=["p1", "p2", "y"], block_size=16, prompt=70),
        line(1003.0, "b", prefixes=["p1"], block_size=16),
        line(1004.0, output=0, outcome="shed"),
        "not a request",
        '{"event": "something else"}',
    ]
    path.write_text("\n".join(lines))
    found = export(path)
    assert (found.refused, found.foreign) == (1, 2)
    assert [(row.arrival, row.tenant) for row in found.rows] == [(0.0, "a"), (0.5, "a"), (3.0, "b")]
    assert [(row.prefix, row.prefix_tokens) for row in found.rows] == [("p2", 32), ("p2", 32), ("", 0)]
    assert [row.tenant for row in export(path, tenants=["b"]).rows] == ["b"]
    assert export(path, model="other").rows == []


@given(
    st.lists(
        st.builds(
            Row,
            arrival=st.floats(0, 1e6, allow_nan=False),
            tenant=st.sampled_from(["a", "b,c", 'd"e']),
            prompt=st.integers(1, 10**6),
            output=st.integers(1, 10**6),
            prefix=st.sampled_from(["", "ab12"]),
            prefix_tokens=st.integers(0, 100),
        )
    )
)
def test_rows_survive_both_formats(tmp_path_factory: pytest.TempPathFactory, rows: list[Row]) -> None:
    folder = tmp_path_factory.mktemp("rows")
    for name in ("t.csv", "t.jsonl"):
        text = io.StringIO()
        assert write(rows, text, as_csv=name.endswith("csv")) == len(rows)
        (folder / name).write_text(text.getvalue())
        assert read(folder / name) == sorted(rows, key=lambda row: row.arrival)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "arrival,tenant\n1,a\n", "lacks prompt, output"),
        ("t.csv", "arrival,tenant,prompt,output\n1,a,x,2\n", "t.csv:2: invalid literal"),
        ("t.csv", "arrival,tenant,prompt,output\n-1,a,1,2\n", "arrival must be seconds"),
        ("t.csv", "arrival,tenant,prompt,output\n1,a,0,2\n", "must be 1 token or more"),
        ("t.jsonl", "arrival,tenant\n", "is not a JSON object"),
        ("t.jsonl", '{"arrival": 1}\n', "tenant is missing"),
    ],
)
def test_a_broken_file_is_refused_with_its_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(TrafficLogError, match=message):
        read(tmp_path / name)


def test_a_log_is_replayed_request_by_request(tmp_path: Path) -> None:
    rows = [Row(0.5, "a", 20, 5), Row(1.25, "b", 30, 7), Row(2.0, "a", 10, 3, "p", 8), Row(99.0, "a", 10, 3)]
    with (tmp_path / "traffic.csv").open("w") as file:
        write(rows, file, as_csv=True)
    loaded = make(tmp_path, {"id": "a", "arrivals": LOG}, {"id": "b", "arrivals": LOG}, drain=True)
    requests = list(Simulation(loaded)._workload.requests())
    assert [(r.at, r.tenant, r.prompt, r.output) for r in requests] == [
        (0.5, 0, 20, 5),
        (1.25, 1, 30, 7),
        (2, 0, 10, 3),
    ]
    assert (requests[2].group, requests[2].prefix) == (0, 8)
    run = simulate(loaded)
    assert [account.output for account in run.ledger.accounts] == [8, 7]


def test_a_log_without_the_tenant_is_refused(tmp_path: Path) -> None:
    (tmp_path / "traffic.csv").write_text("arrival,tenant,prompt,output\n1,b,1,2\n")
    with pytest.raises(TrafficLogError, match="has no request of tenant 'a'"):
        Simulation(make(tmp_path, {"id": "a", "arrivals": LOG}))


def test_the_incomplete_gamma_function_is_right() -> None:
    """Shape 1 is the exponential distribution, shape 1/2 the square of a normal one, shape 3 a Poisson count."""
    for x in (0.01, 0.5, 1, 2, 7, 40):
        assert gamma_cdf(1, x) == pytest.approx(1 - math.exp(-x))
        assert gamma_cdf(0.5, x) == pytest.approx(math.erf(math.sqrt(x)))
        assert gamma_cdf(3, x) == pytest.approx(1 - math.exp(-x) * (1 + x + x * x / 2))
    assert gamma_cdf(2, 0) == 0


def test_the_distance_is_that_of_the_definition() -> None:
    assert ks([0.5], lambda x: x) == 0.5
    assert ks([0.25, 0.5, 0.75, 1.0], lambda x: x) == 0.25
    assert ks([1, 2, 3, 4], lambda x: x / 4) == 0


def moments(spec: dict[str, Any], count: int = 3000) -> list[float]:
    from pydantic import TypeAdapter

    from gateway.simulate.arrivals import Arrivals

    made: Any = TypeAdapter(Arrivals).validate_python(spec)
    return list(made.times(Random(1), count / 3))[:count]


def test_arrivals_are_recognised() -> None:
    poisson = fit_arrivals(moments({"kind": "poisson", "rate": 3}))
    assert poisson is not None
    assert poisson.spec["kind"] == "poisson"
    assert poisson.spec["rate"] == pytest.approx(3, rel=0.05)
    gamma = fit_arrivals(moments({"kind": "gamma", "rate": 3, "cv": 2}))
    assert gamma is not None
    assert gamma.spec["kind"] == "gamma"
    assert gamma.spec["cv"] == pytest.approx(2, rel=0.1)
    assert max(poisson.ks, gamma.ks) <= MAX_KS
    assert fit_arrivals(moments({"kind": "on_off", "rate": 9, "on_s": 10, "off_s": 20})) is None
    assert fit_arrivals([0.0, 0.0, 0.0]) is None


@pytest.mark.parametrize(
    ("kind", "draw"),
    [
        ("fixed", lambda rng: 7),
        ("uniform", lambda rng: rng.randint(10, 400)),
        ("lognormal", lambda rng: max(1, round(rng.lognormvariate(5, 0.7)))),
        ("empirical", lambda rng: rng.choice([10, 11, 500, 520])),
    ],
)
def test_lengths_are_recognised_and_close(kind: str, draw: Any) -> None:
    rng = Random(1)
    found = fit_lengths([draw(rng) for _ in range(4000)])
    assert found.spec["kind"] == kind
    assert found.ks <= MAX_KS


@given(st.lists(st.integers(1, 5000), min_size=2, max_size=300))
def test_whatever_was_recorded_the_fit_is_close(values: list[int]) -> None:
    assert fit_lengths(values).ks <= MAX_KS


def test_a_synthesised_scenario_is_like_what_was_recorded(tmp_path: Path) -> None:
    """Recorded by one simulation, fitted, simulated again: rates and mean lengths agree."""
    import yaml

    rng = Random(3)
    rows, at = [], 0.0
    for _ in range(3000):
        at += rng.expovariate(2.0)
        tenant = rng.choice(["chat", "batch"])
        prompt = rng.randint(50, 100) if tenant == "chat" else max(1, round(rng.lognormvariate(4, 0.5)))
        rows.append(Row(at, tenant, prompt, rng.choice([5, 20])))
    data, fits = scenario(rows, log_file="traffic.csv", weights={"chat": 2.0})
    assert [found.tenant for found in fits] == ["batch", "chat"]
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(data))
    loaded = load(tmp_path / "s.yaml")
    assert loaded.scenario.tenants[1].weight == 2
    again = list(Simulation(loaded)._workload.requests())
    assert len(again) == pytest.approx(3000, rel=0.08)
    for i, tenant in enumerate(("batch", "chat")):
        for name in ("prompt", "output"):
            before = [getattr(row, name) for row in rows if row.tenant == tenant]
            after = [getattr(request, name) for request in again if request.tenant == i]
            assert sum(after) / len(after) == pytest.approx(sum(before) / len(before), rel=0.06)


def test_what_fits_nothing_is_replayed(tmp_path: Path) -> None:
    rows = [Row(float(i // 50 * 60), "a", 10, 5) for i in range(200)]
    data, _ = scenario(rows, log_file="traffic.csv")
    assert data["tenants"] == [{"id": "a", "arrivals": {"kind": "log", "file": "traffic.csv"}}]


def test_common_prefixes_become_groups() -> None:
    rng = Random(1)
    rows, at = [], 0.0
    for _ in range(1000):
        at += rng.expovariate(1)
        rows.append(Row(at, "a", 64 + rng.randint(1, 50), 9, rng.choice("pqr"), 64))
    data, _ = scenario(rows, log_file="t.csv")
    assert data["tenants"][0]["prefix"] == {"groups": 3, "tokens": 64}
    assert data["tenants"][0]["input"]["kind"] == "uniform"
    assert data["tenants"][0]["input"]["low"] <= 2


def test_nothing_to_fit_is_said() -> None:
    with pytest.raises(ValueError, match="nothing to fit"):
        scenario([Row(0, "a", 1, 1)], log_file="t.csv")
    assert fit([Row(0, "a", 1, 1)]) == []
