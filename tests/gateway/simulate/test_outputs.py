"""What people see: the command, its table, JSON and plots, the ways of batching."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from matplotlib.image import imread
from typer.testing import CliRunner

from gateway.cli import app
from gateway.cli.output import UserError
from gateway.simulate.batching import table
from gateway.simulate.figures import Figures
from gateway.simulate.plot import NoPlots, draw, plot
from gateway.simulate.scenario_file import load, shipped
from gateway.simulate.simulation import simulate
from tests.gateway.simulate.scenarios import WORKERS, burst, make, poisson, tenant

SMALL = {
    "duration_s": 10,
    "policy": {"use": "vtc"},
    "workers": WORKERS,
    "tenants": [tenant("a", poisson(5)), tenant("b", poisson(20), weight=2)],
}


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return str(path)


def forebay(*arguments: str) -> str:
    """Standard output of a command that succeeds."""
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_table_has_a_row_per_tenant(scenario: str) -> None:
    text = forebay("simulate", scenario)
    assert "tokens/s" in text
    assert [line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│")] == ["a", "b"]


def test_json_goes_to_a_file_or_to_stdout(scenario: str, tmp_path: Path) -> None:
    data = json.loads(forebay("simulate", scenario, "--json", "-", "--seed", "5", "--policy", "fcfs"))
    assert (data["seed"], data["policy"]) == (5, "fcfs")
    forebay("simulate", scenario, "--seed", "5", "--policy", "fcfs", "--json", str(tmp_path / "out.json"))
    assert json.loads((tmp_path / "out.json").read_text()) == data


def test_several_policies_are_compared(scenario: str) -> None:
    data = json.loads(forebay("simulate", scenario, "--policy", "vtc", "--policy", "fcfs", "--json", "-"))
    assert set(data["runs"]) == {"vtc", "fcfs"}


def test_without_a_scenario_the_shipped_ones_are_listed() -> None:
    assert [line.split()[0] for line in forebay("simulate").splitlines()] == shipped()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", "no-such"], "no shipped scenario"),
        (["simulate", "two-tenants", "--policy", "nope"], "unknown scheduling policy 'nope'"),
        (["simulate", "--table", "chairs"], "there is: batching"),
        (["simulate", "two-tenants", "--json", "/no/such/folder/x.json"], "cannot be written"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from gateway.simulate import simulation

    monkeypatch.setattr(simulation, "simulate", lambda loaded: simulate(_short(loaded)))
    with pytest.raises(UserError, match=message):
        CliRunner().invoke(app, arguments, catch_exceptions=False, standalone_mode=False)


def _short(loaded):  # type: ignore[no-untyped-def]
    from dataclasses import replace

    return replace(loaded, scenario=loaded.scenario.model_copy(update={"duration_s": 1.0}))


def test_plots_are_images_of_a_size_to_commit(tmp_path: Path) -> None:
    """Also of runs in which one tenant gets nothing, and of more tenants than are drawn."""
    crowd = [tenant(f"t{i}", poisson(2)) for i in range(14)]
    loaded = make(tmp_path, *crowd, tenant("late", burst(1, 19.99)), policy={"use": "vtc"})
    path = tmp_path / "plot.png"
    plot({"vtc": Figures.of(simulate(loaded))}, path, title="a crowd")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert 10_000 < len(data) < 150_000


def test_plots_show_every_tenant_with_its_name_and_what_it_got(tmp_path: Path) -> None:
    loaded = make(tmp_path, tenant("a", poisson(5)), tenant("b", poisson(20), weight=2), policy={"use": "vtc"})
    runs = {name: Figures.of(simulate(loaded.under(name, 1))) for name in ("vtc", "fcfs")}
    figure = draw(runs, title="two")
    assert figure.get_suptitle() == "two"
    assert len(figure.axes) == 6
    for (name, figures), panels in zip(runs.items(), (figure.axes[:3], figure.axes[3:]), strict=True):
        service, difference, ttft = panels
        assert [axes.get_title().split(":")[0] for axes in panels] == [name] * 3
        for axes in (service, ttft):
            assert [line.get_label() for line in axes.lines] == ["a", "b"]
            assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]
        assert [line.get_ydata()[-1] for line in service.lines] == pytest.approx(figures.series.service[-1])
        assert len(difference.lines) == 1
        assert np.nanmax(difference.lines[0].get_ydata()) <= figures.max_service_difference * 1.001
        for i, line in enumerate(ttft.lines):
            waits = figures.run.ledger.accounts[i].ttfts
            assert line.get_xdata().max() == pytest.approx(max(waits))
            assert line.get_ydata()[-1] == 1


def test_the_image_shows_a_line_in_every_panel(tmp_path: Path) -> None:
    """Pixels: each panel has both tenants' colours, and no panel is blank."""
    loaded = make(tmp_path, tenant("a", poisson(5)), tenant("b", poisson(20), weight=2), policy={"use": "vtc"})
    path = tmp_path / "plot.png"
    plot({"vtc": Figures.of(simulate(loaded))}, path)
    pixels = (imread(path)[:, :, :3] * 255).round().astype(int)
    height, width, _ = pixels.shape
    assert (width, height) == (1200, 336)
    blue, orange, red = (0x1F, 0x77, 0xB4), (0xFF, 0x7F, 0x0E), (0xD6, 0x27, 0x28)
    for panel, colours in enumerate(((blue, orange), (red,), (blue, orange))):
        part = pixels[:, panel * width // 3 : (panel + 1) * width // 3]
        for colour in colours:
            drawn = (abs(part - colour).max(axis=2) < 8).sum()
            assert drawn > 50, (panel, colour)


def test_without_matplotlib_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    figures = Figures.of(simulate(make(tmp_path, tenant("a", burst(1)))))
    with pytest.raises(NoPlots, match=r"forebay\[plot\]"):
        plot({"x": figures}, tmp_path / "plot.png")


def test_batching_and_a_cache_pay(tmp_path: Path) -> None:
    """Each way is faster than the one before, and all produce the same tokens."""
    loaded = make(
        tmp_path,
        {
            "id": "everyone",
            "arrivals": burst(60),
            "input": {"kind": "uniform", "low": 10, "high": 60},
            "output": {"kind": "lognormal", "mean": 20, "sigma": 0.8, "max": 100},
        },
        workers={"kv_tokens": 65536},
    )
    rows = table(loaded)
    totals = [row.total_s for row in rows]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] > 1.5 * totals[1]
    assert totals[1] > 1.2 * totals[2] > 1.2 * 1.2 * totals[3]
    assert len({round(row.output_tokens_s * row.total_s) for row in rows}) == 1


def test_the_request_log_becomes_a_scenario(tmp_path: Path) -> None:
    """By the command: exported, fitted, simulated."""
    from random import Random

    rng, at, lines = Random(1), 1_700_000_000.0, []
    for _ in range(4000):
        at += rng.expovariate(3)
        fields = {
            "arrival": at,
            "tenant": rng.choice("ab"),
            "outcome": "ok",
            "prompt": rng.randint(10, 90),
            "output": 12,
        }
        lines.append(json.dumps(fields))
    log, out = tmp_path / "requests.jsonl", tmp_path / "like.yaml"
    log.write_text("\n".join(lines))
    forebay("requests", "export", str(log), "-o", str(tmp_path / "traffic.csv"), "--synthesise", str(out))
    tenants = load(out).scenario.tenants
    assert [(t.arrivals.kind, t.input.kind, t.output.kind) for t in tenants if t.input and t.output] == [
        ("poisson", "uniform", "fixed")
    ] * 2
    assert len((tmp_path / "traffic.csv").read_text().splitlines()) == 4001
    assert len(forebay("requests", "export", str(log)).splitlines()) == 4000
    with pytest.raises(UserError, match="holds no request"):
        CliRunner().invoke(
            app, ["requests", "export", str(log), "--tenant", "c"], catch_exceptions=False, standalone_mode=False
        )
