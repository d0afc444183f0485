"""``engine.tiers``: what is taken, and what is refused with a remedy."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from workers.config import EngineConfig

HOST = {"kind": "host", "size": "1GiB"}
DISK = {"kind": "disk", "path": "kv", "size": "2GiB"}


def test_both_tiers_are_read_and_survive_the_way_to_the_worker() -> None:
    config = EngineConfig.model_validate({"tiers": [HOST, DISK]})
    assert config.host_tier is not None
    assert config.disk_tier is not None
    assert (config.host_tier.size, config.disk_tier.size) == (2**30, 2**31)
    assert EngineConfig.model_validate_json(config.model_dump_json()) == config
    assert EngineConfig().host_tier is EngineConfig().disk_tier is None


@pytest.mark.parametrize(
    ("tiers", "said"),
    [
        ([DISK], "needs one of kind host above it"),
        ([DISK, HOST], "write kind host before kind disk"),
        ([HOST, HOST], "2 tiers of kind host"),
        ([{"kind": "tape", "size": 1}], "a tier has a kind, host or disk"),
        ([{"size": 1}], "a tier has a kind, host or disk"),
        (["host"], "a tier has a kind, host or disk"),
        ([{"kind": "host", "size": "much"}], "is not a size"),
        ([{"kind": "host", "size": 0}], "greater than 0"),
        ([{"kind": "host", "size": "9" * 400 + "GiB"}], "less than or equal to 9223372036854775807"),
        ([{"kind": "host", "size": True}], "True is not a size"),
        ([HOST, {**DISK, "path": " "}], "is not a folder"),
        ([HOST, {**DISK, "max_age_s": 0}], "greater than 0"),
        ([HOST, {**DISK, "ttl": 3}], "Extra inputs"),
    ],
)
def test_what_makes_no_sense_is_refused(tiers: list[Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        EngineConfig.model_validate({"tiers": tiers})
