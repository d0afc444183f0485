"""Epochs outlive the process where there is a folder for them, and retention windows follow the clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.compose import BuildError
from gateway.epochs import FILE, Epochs, window, window_end
from gateway.purge import Purger
from gateway.settings import Settings
from gateway.tenants import Tenants
from policies.types import TenantId
from tests.gateway.conftest import Start
from tests.gateway.harness import BASE, merged

ALPHA = TenantId("alpha")


async def test_a_bump_is_there_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / FILE
    epochs = Epochs(path)
    epochs.bump(ALPHA)
    assert epochs.bump(ALPHA) == 2
    await epochs.save()
    again = Epochs(path)
    assert (again.get(ALPHA), again.get(TenantId("beta"))) == (2, 0)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [FILE]


@pytest.mark.parametrize("content", [b"", b"[]", b'{"alpha": -1}', b'{"alpha": "1"}', b"\xff"])
async def test_a_file_that_cannot_be_read_stops_the_start(start: Start, tmp_path: Path, content: bytes) -> None:
    """Guessing would undo purges."""
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    (folder / FILE).write_bytes(content)
    with pytest.raises(BuildError, match=r"state\.path.*restore or remove it"):
        async with start({"state": {"path": "state"}}):
            pass


async def test_a_purge_writes_the_epoch_down_before_it_answers(start: Start, tmp_path: Path) -> None:
    """security 15: with the same server secret, a restart makes nothing reachable again."""
    async with start({"state": {"path": "state"}}) as site:
        assert (await site.admin.delete("/admin/tenants/alpha/cache")).status_code == 200
        assert Epochs(tmp_path / "state" / FILE).get(ALPHA) == 1
        assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    async with start({"state": {"path": "state"}}) as site:
        tenants = {tenant["id"]: tenant["epoch"] for tenant in (await site.admin.get("/admin/cache")).json()["tenants"]}
        assert tenants == {"alpha": 1, "beta": 0}


async def test_a_receipt_says_when_the_epoch_is_not_on_disk(tmp_path: Path) -> None:
    epochs = Epochs(tmp_path / "gone" / FILE)
    purger = Purger(Tenants(Settings.model_validate(BASE), epochs), [], b"secret")
    receipt = await purger.purge(ALPHA)
    assert epochs.get(ALPHA) == 1
    assert not receipt.complete
    assert "could not be written" in receipt.reasons[0]


@given(st.text(), st.floats(0.01, 1e9), st.floats(0, 4e9), st.floats(0, 4e9))
def test_nothing_of_one_window_is_older_than_the_retention_time(name: str, keep: float, one: float, two: float) -> None:
    same = window(name, keep, one) == window(name, keep, two)
    assert not same or abs(one - two) <= keep * (1 + 1e-6)
    assert window(name, keep, one) > 0
    assert window(name, None, one) == 0


def test_windows_change_the_scope_and_nothing_else_does() -> None:
    now = [1_000_000.0]
    changes: dict[str, Any] = {"tenants": [{"id": "alpha", "privacy": {"cache_retention_s": 60}}, {"id": "beta"}]}
    tenants = Tenants(Settings.model_validate(merged(BASE, changes)), wall=lambda: now[0])
    first = tenants.get(ALPHA).scope_epoch
    tenants.used(tenants.get(ALPHA), b"scope")
    tenants.used(tenants.get(TenantId("beta")), b"other")
    assert tenants.outdated(ALPHA) == []
    now[0] += 60
    assert tenants.get(ALPHA).scope_epoch == tenants.scope_epoch(ALPHA) != first
    assert tenants.outdated(ALPHA) == [b"scope"]
    assert tenants.outdated(TenantId("beta")) == []
    tenants.swept(ALPHA, [b"scope"])
    assert tenants.outdated(ALPHA) == []
    assert tenants.get(ALPHA).epoch == 0


@given(
    st.text(max_size=8),
    st.floats(0.5, 1e6, allow_nan=False),
    st.floats(1e6, 2e9, allow_nan=False, allow_infinity=False),
)
def test_a_window_ends_where_the_next_begins(name: str, keep: float, now: float) -> None:
    """What a worker is told of the end is what the key hangs on."""
    number = window(name, keep, now)
    end = window_end(name, keep, number)
    slack = max(1e-5, keep * 1e-6)
    assert now <= end + slack
    assert end - now <= keep + slack
    assert window(name, keep, end - slack) == number
    assert window(name, keep, end + slack) == number + 1
    assert window_end(name, None, 0) == 0.0
