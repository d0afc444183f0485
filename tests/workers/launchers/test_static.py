"""Workers that somebody else runs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from workers.launchers.base import LaunchContext, LaunchError, WorkerSpec
from workers.launchers.static import StaticLauncher


def spec(index: int) -> WorkerSpec:
    return WorkerSpec(f"w{index}", index, "m", "source")


async def test_each_worker_gets_its_address_and_the_secret() -> None:
    context = LaunchContext(addresses=("10.0.0.5:9000", "[::1]:9001"), secret_env="S", env={"S": "a long secret"})
    launcher = StaticLauncher(context)
    workers = [await launcher.start(spec(index)) for index in range(2)]
    assert [worker.address for worker in workers] == ["10.0.0.5:9000", "[::1]:9001"]
    assert [worker.secret for worker in workers] == ["a long secret"] * 2
    assert workers[0].pid is None
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(workers[0].wait(), 0.01)
    await workers[0].stop(0)


async def test_more_workers_than_addresses() -> None:
    with pytest.raises(LaunchError, match=r"launch\.count.*worker 2.*addresses lists 1"):
        await StaticLauncher(LaunchContext(addresses=("unix:/run/w",))).start(spec(1))


@pytest.mark.parametrize(
    ("context", "wrong"),
    [
        ({}, r"launch\.addresses is empty"),
        ({"addresses": ("nowhere",)}, r"'nowhere' is neither"),
        ({"addresses": ("host:0",)}, r"'host:0'"),
        ({"addresses": ("host:99999",)}, r"'host:99999'"),
        ({"addresses": ("unix:",)}, r"'unix:'"),
        ({"addresses": (":80",)}, r"':80'"),
        ({"addresses": ("host:1",)}, r"launch\.secret_env is missing"),
        ({"addresses": ("host:1",), "secret_env": "GONE"}, r"variable GONE is not set"),
        ({"addresses": ("unix:/x",), "secret_env": "GONE"}, r"variable GONE is not set"),
    ],
)
def test_mistakes_are_named(context: dict[str, Any], wrong: str) -> None:
    with pytest.raises(LaunchError, match=wrong):
        StaticLauncher(LaunchContext(**context))
