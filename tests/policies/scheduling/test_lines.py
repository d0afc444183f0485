"""Per-tenant lines against a plain model."""

from __future__ import annotations

import pytest

from policies.scheduling._lines import Lines
from policies.testing import make_job
from policies.types import JobId, TenantId


def test_lines_keep_order_and_returned_jobs_go_first() -> None:
    lines = Lines()
    assert lines.push(make_job("a1"))
    assert not lines.push(make_job("a2"))
    assert lines.push(make_job("b1", "b"))
    assert lines.push_front(make_job("a0"))
    assert lines.head(TenantId("a")).id == "a0"
    assert lines.head_order(TenantId("a")) < 0 < lines.head_order(TenantId("b"))
    with pytest.raises(ValueError, match="'a1' is already queued"):
        lines.push_front(make_job("a1"))
    assert lines.discard(JobId("a1")) is not None
    assert lines.discard(JobId("a1")) is None
    assert [job.id for job in lines.drain()] == ["a0", "a2", "b1"]
    assert len(lines) == 0
    assert not lines.has(TenantId("a"))
