"""Which files of tests begin first when several processes share the suite: those that take longest.

A long file that begins last keeps one process busy while the others wait for it; files that wait leave the cores to the
ones that compute. What takes long is written down here, roughly; of everything else the number of tests tells enough.
A file that is missing here, or has become faster, costs a little of the suite's time and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

TEST_S = 0.05
"""Seconds of a test that nothing else is known of."""

SHARED_SERVER = "tests/e2e (one server)"
"""The files that use the one server of ``tests/e2e/conftest.py``: one after the other in one process, so that it
is started once."""

UNITS: Mapping[str, str] = {
    f"tests/e2e/test_{name}.py": SHARED_SERVER
    for name in ("clients", "console", "disconnects", "isolation", "sampling", "structured")
}

SECONDS: Mapping[str, float] = {
    "tests/workers/model/test_parity.py": 128,
    SHARED_SERVER: 70,
    "tests/gateway/simulate/test_experiments.py": 48,
    "tests/gateway/console/test_browser.py": 28,
    "tests/gateway/test_pool.py": 28,
    "tests/gateway/test_pipeline.py": 27,
    "tests/gateway/test_dispatch.py": 26,
    "tests/gateway/http/test_identity.py": 26,
    "tests/gateway/cli/test_commands.py": 26,
    "tests/plugins/openai_upstream/test_faults.py": 26,
    "tests/gateway/test_swap.py": 22,
    "tests/gateway/test_adapters.py": 18,
    "tests/workers/model/test_native_parity.py": 18,
    "tests/plugins/openai_upstream/test_forwarding.py": 18,
    "tests/workers/model/test_paged_triton.py": 16,
    "tests/workers/model/native/test_kernel.py": 15,
    "tests/workers/model/test_techniques.py": 12,
    "tests/workers/model/test_families.py": 10,
    "tests/workers/model/quant/test_kernel.py": 10,
    "tests/plugins/openai_upstream/test_pools.py": 16,
    "tests/e2e/test_lifecycle.py": 14,
    "tests/gateway/test_admission.py": 13,
    "tests/workers/model/quant/test_weight_dtype.py": 13,
    "tests/gateway/http/test_openapi.py": 13,
    "tests/gateway/test_prefill.py": 13,
    "tests/e2e/test_speculation.py": 12,
    "tests/workers/model/native/test_no_memory.py": 12,
    "tests/gateway/console/test_pages.py": 12,
    "tests/gateway/test_delivery.py": 11,
    "tests/e2e/test_tiers.py": 11,
    "tests/gateway/test_thousand_streams.py": 11,
    "tests/e2e/test_traces.py": 11,
    "tests/e2e/test_workers_by_hand.py": 10,
    "tests/e2e/test_several_devices.py": 10,
    "tests/workers/model/test_memory.py": 10,
    "tests/gateway/bench/peers/test_contest.py": 10,
    "tests/gateway/test_admin.py": 10,
    "tests/e2e/test_disaggregation.py": 9,
    "tests/gateway/test_outcomes.py": 9,
    "tests/gateway/test_placement.py": 9,
    "tests/gateway/test_public_prefixes.py": 9,
    "tests/gateway/test_runtime.py": 9,
    "tests/e2e/test_usage.py": 8,
    "tests/workers/model/parallel/test_ranks.py": 8,
    "tests/gateway/test_retention.py": 8,
    "tests/gateway/cli/test_cache.py": 8,
    "tests/gateway/cli/test_listener.py": 8,
    "tests/gateway/console/test_actions.py": 8,
    "tests/gateway/test_purge.py": 8,
    "tests/gateway/test_soak.py": 8,
    "tests/e2e/test_faults.py": 7,
    "tests/plugins/test_example_policy.py": 7,
    "tests/e2e/test_banner.py": 7,
    "tests/gateway/test_replays.py": 7,
    "tests/gateway/test_log_lines.py": 7,
    "tests/gateway/test_landing.py": 7,
    "tests/gateway/cli/test_keys.py": 6,
    "tests/gateway/test_canary.py": 6,
    "tests/e2e/test_adapters.py": 6,
    "tests/gateway/test_client_retries.py": 6,
    "tests/e2e/test_reload.py": 5,
    "tests/workers/model/test_perplexity.py": 5,
    "tests/gateway/simulate/test_batching.py": 5,
    "tests/gateway/test_queue_reasons.py": 5,
    "tests/gateway/cli/test_adapters.py": 4,
}
"""Of files, or units of them, in which a test takes longer than its number tells."""


COMPUTING = ("tests/gateway/simulate/", "tests/policies/", "tests/workers/engine/", "tests/workers/model/")
"""Tests here compute all the time; the others mostly wait, for processes and for each other."""


def unit(path: str) -> str:
    """What runs in one process: a file, or the files that share what is dear."""
    return UNITS.get(path, path)


def sort(items: list[pytest.Item]) -> None:
    """Within each kind the heaviest units first, and both kinds evenly over the whole run; in a unit as collected."""
    places = _places(Counter(_unit_of(item) for item in items))
    items.sort(key=lambda item: places[_unit_of(item)])


def _places(tests: Mapping[str, int]) -> dict[str, tuple[float, str]]:
    """Of each unit: which part of its kind's time has passed when it begins."""
    seconds = {name: SECONDS.get(name, count * TEST_S) for name, count in tests.items()}
    whole = {kind: sum(seconds[name] for name in tests if name.startswith(COMPUTING) == kind) for kind in (True, False)}
    places, passed = {}, {True: 0.0, False: 0.0}
    for name in sorted(tests, key=lambda name: (-seconds[name], name)):
        kind = name.startswith(COMPUTING)
        places[name] = (passed[kind] / whole[kind], name)
        passed[kind] += seconds[name]
    return places


def _unit_of(item: pytest.Item) -> str:
    return unit(item.nodeid.split("::", 1)[0])


def scheduler(config: pytest.Config, log: Any) -> Any:
    """pytest-xdist's ``loadfile`` that hands out units, in the order in which they were sorted."""
    from xdist.scheduler import LoadFileScheduling

    class LoadUnits(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit(super()._split_scope(nodeid))

    config.option.loadscopereorder = False  # or it would sort by the number of tests
    return LoadUnits(config, log)
