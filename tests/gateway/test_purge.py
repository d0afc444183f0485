"""Whom a purge asks, and that its receipt never claims more than was done."""

from __future__ import annotations

from pathlib import Path

from gateway.pool import Pool, PoolListener, WorkerState
from gateway.purge import purge
from gateway.scopes import PER_TENANT
from gateway.settings import Launch, Settings
from gateway.settings import Pool as PoolConfig
from gateway.tenants import Tenants
from policies.types import TenantId
from tests.gateway.conftest import Start
from tests.gateway.harness import BASE, until
from workers.launchers.base import LaunchContext
from workers.launchers.static import StaticLauncher

ALPHA = TenantId("alpha")


async def test_a_worker_that_drains_is_swept_too(start: Start) -> None:
    """security 15: it has blocks until it is gone."""
    async with start() as site:
        assert (await site.complete(prompt=[5] * 64, max_tokens=2)).status_code == 200
        [handle] = site.dispatcher.workers
        handle.state = WorkerState.DRAINING
        receipt = (await site.admin.delete("/admin/tenants/alpha/cache")).json()
        assert receipt["zeroed_blocks"] >= 4
        assert receipt["complete"]


class Nobody(PoolListener):
    """Hears nothing."""


async def test_a_worker_of_somebody_else_that_is_not_connected_is_named(tmp_path: Path) -> None:
    """security 15: it may live, with everything that it cached, and be connected again."""
    address = f"unix:{tmp_path}/nobody.sock"
    config = PoolConfig(name="p", launch=Launch(use="static", addresses=(address,)))
    pool = Pool("m", "source", config, StaticLauncher(LaunchContext(addresses=(address,))), Nobody())
    pool.start()
    try:
        await until(lambda: pool.snapshot()[0]["address"] == address, "the place is taken")
        tenants = Tenants(Settings.model_validate(BASE))
        tenants.used(ALPHA, b"scope")
        receipt = await purge(ALPHA, tenants, [pool], b"secret")
    finally:
        await pool.stop()
    assert receipt.failed == {"m/p-0": "not connected"}
    assert not receipt.complete


async def test_a_receipt_is_not_complete_when_scopes_were_forgotten() -> None:
    """security 15, scope ``user``: with more users than are remembered the sweep cannot name them all."""
    tenants = Tenants(Settings.model_validate(BASE))
    for number in range(PER_TENANT):
        tenants.used(ALPHA, number.to_bytes(4, "big"))
    assert (await purge(ALPHA, tenants, [], b"secret")).body()["complete"]
    tenants.used(ALPHA, b"one more")
    receipt = await purge(ALPHA, tenants, [], b"secret")
    body = receipt.body()
    assert body["scopes"] == PER_TENANT
    assert body["complete"] is False
    assert [reason for reason in body["incomplete_because"] if "more cache scopes" in reason]
