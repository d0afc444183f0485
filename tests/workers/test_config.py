"""``engine:``: numbers that no machine could mean are refused where they stand, before anything is started."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from workers.config import EngineConfig

HUGE = "9" * 400 + "GiB"
HOST = {"kind": "host", "size": "1GiB"}


CASES: list[tuple[str, Any, str]] = [
    ("kv_cache", HUGE, "less than or equal to 9223372036854775807"),
    ("kv_cache", 10**400, "less than or equal to 9223372036854775807"),
    ("adapter_memory", HUGE, "less than or equal to 9223372036854775807"),
    ("adapter_memory", True, "True is not a size"),
    ("tiers", [{**HOST, "size": HUGE}], "less than or equal to 9223372036854775807"),
    ("tiers", [{**HOST, "size": True}], "True is not a size"),
    ("blocks", 10**15, "less than 2147483648"),
    ("max_step_tokens", 10**12, "less than or equal to 1048576"),
    ("max_running", 10**12, "less than or equal to 1048576"),
    ("threads", 10**9, "less than or equal to 1024"),
    ("speculation", {"method": "draft", "draft_model": " "}, "' ' is no model; write a source"),
    ("speculation", {"method": "draft", "draft_model": "a\0b"}, "is no model; write a source"),
    ("transfer", {"timeout_s": float("inf")}, "less than or equal to 3600"),
    ("transfer", {"lease_s": 1e9}, "less than or equal to 3600"),
    ("transfer", {"lease_s": 1e300}, "between 1e-09 and 1e\\+15 in size"),
]


@pytest.mark.parametrize(("field", "value", "said"), CASES, ids=range(len(CASES)))
def test_what_no_machine_could_mean_is_refused(field: str, value: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=said) as raised:
        EngineConfig.model_validate({field: value})
    assert raised.value.errors()[0]["loc"][0] == field


def test_more_ranks_than_one_worker_may_have_are_refused() -> None:
    with pytest.raises(ValidationError, match="tensor_parallel=16 and pipeline_parallel=8 make 128 processes"):
        EngineConfig(tensor_parallel=16, pipeline_parallel=8)
    assert EngineConfig(tensor_parallel=16, pipeline_parallel=4).ranks == 64


@pytest.mark.parametrize(("text", "size"), [("1.5GiB", 3 * 2**29), ("0.1kB", 100), ("9007199254740993", 2**53 + 1)])
def test_sizes_are_exact(text: str, size: int) -> None:
    assert EngineConfig.model_validate({"kv_cache": text}).kv_cache == size
