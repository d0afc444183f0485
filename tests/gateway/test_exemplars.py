"""Exemplars between tokens: only of traces that are kept whatever comes, and they can be looked up."""

from __future__ import annotations

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.gateway.conftest import Start
from tests.gateway.harness import until
from tests.otlp import OtlpReceiver
from workers.testing import Echo


@pytest.mark.parametrize(("ratio", "linked"), [(1.0, True), (0.0, False)])
async def test_a_gap_between_tokens_leads_to_its_trace(start: Start, ratio: float, linked: bool) -> None:
    with OtlpReceiver() as collector:
        telemetry = {"otlp_endpoint": collector.endpoint, "sample_ratio": ratio}
        async with start({"telemetry": telemetry}, echo=Echo(step_s=0.01)) as site:
            for _ in range(3):
                assert (await site.complete(max_tokens=12)).status_code == 200
            accept = {"accept": "application/openmetrics-text; version=1.0.0"}
            text = (await site.admin.get("/metrics", headers=accept)).text
            [family] = [
                family
                for family in text_string_to_metric_families(text)
                if family.name == "forebay_inter_token_latency_seconds"
            ]
            assert sum(sample.value for sample in family.samples if sample.name.endswith("_count")) >= 30
            found = {sample.exemplar.labels["trace_id"] for sample in family.samples if sample.exemplar}
            assert bool(found) == linked
            await until(lambda: found <= set(collector.traces()), "the traces that exemplars name")
