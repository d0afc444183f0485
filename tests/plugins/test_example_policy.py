"""The walkthrough of docs/writing-a-policy.md, step by step: installed, conforming, simulated, swapped in live."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from gateway.simulate.figures import Figures
from gateway.simulate.scenario_file import load
from gateway.simulate.simulation import simulate
from policies.manager import PluginError, make_manager
from policies.registry import Registry
from policies.testing import checks, suite
from tests.arch.source import ROOT
from tests.gateway.conftest import start as start  # the fixture
from tests.gateway.harness import MODEL, held, pool, until
from workers.testing import Echo

PLUGIN = "example_policy"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The distribution, built and installed without a network into a folder of its own, which is then on the path."""
    source = tmp_path_factory.mktemp("source") / PLUGIN
    shutil.copytree(ROOT / "plugins" / PLUGIN, source)
    site = tmp_path_factory.mktemp("site")
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(site)]
    done = subprocess.run([sys.executable, *pip, str(source)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    sys.path.insert(0, str(site))
    yield site
    sys.path.remove(str(site))
    sys.modules.pop("forebay_example_policy", None)


@pytest.fixture
def registry(installed: Path) -> Registry:
    return Registry.from_manager(make_manager([PLUGIN]))


def test_installing_alone_changes_nothing(installed: Path) -> None:
    """A plugin takes part only where ``plugins:`` names it."""
    point = next(point for point in metadata.entry_points(group="forebay.plugins") if point.name == PLUGIN)
    assert point.dist is not None
    assert point.dist.name == "forebay-example-policy"
    assert "turns" not in {item.spec.name for item in Registry.from_manager(make_manager()).policies("scheduling")}
    with pytest.raises(PluginError, match="did you mean 'example_policy'"):
        make_manager(["exmaple_policy"])


def test_it_is_loaded_by_its_entry_point(registry: Registry) -> None:
    found = {item.spec.name: item.origin for item in registry.policies("scheduling")}
    assert found["turns"] == PLUGIN
    assert found["vtc"] == "builtin"


@pytest.mark.parametrize("check", checks("scheduling"))
def test_it_passes_the_conformance_kit(installed: Path, check: str) -> None:
    from forebay_example_policy import Turns  # type: ignore[import-not-found]

    getattr(suite("scheduling", Turns)(), check)()


SCENARIO = """
duration_s: 60
plugins: [example_policy]
policy: {use: turns}
workers: {max_running: 4}
tenants:
  - {id: quiet, arrivals: {kind: poisson, rate: 0.5}, input: {kind: fixed, value: 64}, output: {kind: fixed, value: 64}}
  - {id: loud, arrivals: {kind: poisson, rate: 20}, input: {kind: fixed, value: 64}, output: {kind: fixed, value: 64}}
"""


def test_it_is_tried_in_the_simulator(installed: Path, tmp_path: Path) -> None:
    """The quiet tenant waits for its turn only; under fcfs it waits behind everybody."""
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO)
    loaded = load(path)
    turns, fcfs = (
        Figures.of(simulate(loaded.under(policy))).as_json()["tenants"]["quiet"]["ttft_p95_s"]
        for policy in ("turns", "fcfs")
    )
    assert turns < 3
    assert fcfs > 10


async def test_it_is_swapped_in_live(installed: Path, start: Any) -> None:
    """``plugins: [example_policy]``, then ``POST /admin/policies`` while requests wait: each is answered.

    The new policy watches first, as the walkthrough has it, and what waits then leaves in turns.
    """
    changes = {"plugins": [PLUGIN], "models": [pool(max_running=2)]}
    async with start(changes, echo=Echo(step_s=0.01)) as site:
        with held(site.dispatcher):
            asked = [asyncio.create_task(site.complete("alpha", max_tokens=8)) for _ in range(80)]
            await until(lambda: len(site.dispatcher.queue) == 80, "requests wait")
            before = (await site.admin.get("/admin/policies")).json()
            body = {"scheduling": {"use": "turns"}, "shadow_s": 0.5}
            begun = await site.admin.post("/admin/policies", json=body)
        assert begun.status_code == 202, begun.text
        assert begun.json()["shadow"]["state"] == "running"
        asked += [asyncio.create_task(site.complete("beta", max_tokens=8)) for _ in range(3)]
        runtime = site.gateway.parts.runtime
        await until(lambda: runtime.current.generation == before["generation"] + 1, "the switch")
        after = (await site.admin.get("/admin/policies")).json()
        assert after["policies"]["scheduling"]["use"] == "turns"
        assert after["shadow"]["state"] == "switched"
        assert after["shadow"]["models"][MODEL]["picks"] > 0
        assert len(site.dispatcher.queue) > 0, "some still waited"
        assert site.dispatcher.snapshot()["policy"] == "turns"
        done = await asyncio.gather(*asked)
        assert [response.status_code for response in done] == [200] * 83
        await site.at_rest()


async def test_a_gateway_that_does_not_name_it_does_not_know_it(installed: Path, start: Any) -> None:
    async with start(ready=False) as site:
        answer = await site.admin.post("/admin/policies", json={"scheduling": {"use": "turns"}})
        assert answer.status_code == 400
        assert "turns" in answer.text


def test_the_plugin_keeps_to_what_plugins_may_import() -> None:
    text = (ROOT / "plugins" / PLUGIN / "forebay_example_policy" / "__init__.py").read_text()
    imported = [line.split()[1] for line in text.splitlines() if line.startswith(("from ", "import "))]
    assert {name for name in imported if name not in ("__future__", "collections")} == {
        "policies.spi",
        "policies.types",
    }
