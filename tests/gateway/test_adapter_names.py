"""What a name means while workers come and go: the file at start, the admin API afterwards, never two contents."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from gateway.adapters import AdapterRefusedError, Adapters
from gateway.settings import Model
from gateway.worker_handle import LossKind, WorkerHandle, WorkerLoss
from workers.protocol import PROTOCOL, AdapterAnswer, AdapterInfo, Down, DropAdapter, Hello, LoadAdapter

DISK = {"adapters/sql": "sha256:file", "new/sql": "sha256:new", "adapters/law": "sha256:law"}
FILE = {"adapters": [{"name": "sql", "source": "adapters/sql"}]}


def model(name: str = "m", engine: Mapping[str, Any] = FILE) -> Model:
    return Model.model_validate({"name": name, "source": "x", "pools": [{"name": "p", "engine": engine}]})


class Worker:
    """A worker's end of the stream: loads what its disk holds, frees what it is told to."""

    def __init__(self, adapters: Adapters, name: str = "m/p-0", *, disk: Mapping[str, str] = DISK, **held: str) -> None:
        self.disk, self.log = disk, list[Down]()
        self.quiet = False
        self.held = dict(held)
        self.handle = WorkerHandle(name, model="m", pool="p", labels={}, incarnation=1, clock=lambda: 0.0)
        told = [AdapterInfo(one, digest, 4, 10) for one, digest in held.items()]
        hello = Hello(PROTOCOL, name, "m", "r", "t", 16, 10, 4, 100, adapters=told)
        self.handle.opened(self, hello)
        adapters.worker_up(self.handle)

    def send(self, message: Down) -> None:
        self.log.append(message)
        if not self.quiet:
            asyncio.get_running_loop().call_soon(self.answer, message)

    def flush(self) -> None:
        pass

    def answer(self, message: Down) -> None:
        if isinstance(message, LoadAdapter):
            digest = self.disk.get(message.source)
            info = AdapterInfo(message.name, digest, 4, 10) if digest is not None else None
            self.handle.adapters.answered(AdapterAnswer(message.id, info, None if info else "no such directory"))
        elif isinstance(message, DropAdapter):
            self.handle.adapters.answered(AdapterAnswer(message.id))

    @property
    def digests(self) -> set[str]:
        return set(self.handle.adapters.held)

    def lose(self) -> None:
        self.handle.closed(WorkerLoss(LossKind.EXITED))


async def rest() -> None:
    """Let everything that is under way end."""
    for _ in range(20):
        await asyncio.sleep(0)


def digest(adapters: Adapters, name: str) -> str | None:
    found = adapters.find(name)
    assert found is not None
    return found.digest


async def test_a_replaced_adapter_stays_replaced_when_a_worker_starts_again_with_the_files_own() -> None:
    adapters = Adapters([model()])
    assert digest(adapters, "sql") is None, "no worker has told yet"
    first = Worker(adapters, sql="sha256:file")
    await adapters.load("m", "sql", "new/sql")
    await rest()
    assert first.digests == {"sha256:new"}
    first.lose()
    again = Worker(adapters, sql="sha256:file")
    await rest()
    assert digest(adapters, "sql") == "sha256:new"
    assert again.digests == {"sha256:new"}
    await adapters.drop("sql")
    again.lose()
    third = Worker(adapters, sql="sha256:file")
    await rest()
    assert adapters.find("sql") is None
    assert third.digests == set()


async def test_other_files_on_a_workers_disk_count_only_where_nobody_has_the_old_ones() -> None:
    adapters = Adapters([model()])
    one = Worker(adapters, "m/p-0", sql="sha256:file")
    other = Worker(adapters, "m/p-1", sql="sha256:edited")
    assert digest(adapters, "sql") == "sha256:file"
    found = adapters.find("sql")
    assert found is not None
    assert adapters.workers(found) == ["m/p-0"]
    one.lose()
    other.lose()
    Worker(adapters, "m/p-0", sql="sha256:edited")
    assert digest(adapters, "sql") == "sha256:edited"


async def test_a_gateway_younger_than_its_worker_learns_what_it_holds() -> None:
    adapters = Adapters([model(), model("law")])
    worker = Worker(adapters, sql="sha256:file", extra="sha256:extra", law="sha256:bad")
    await rest()
    assert digest(adapters, "m:extra") == "sha256:extra"
    assert worker.digests == {"sha256:file", "sha256:extra"}, "a model's name is no adapter's"


async def test_a_worker_that_comes_while_an_adapter_is_loaded_gets_it_too() -> None:
    adapters = Adapters([model()])
    slow = Worker(adapters, "m/p-0", sql="sha256:file")
    slow.quiet = True
    loading = asyncio.create_task(adapters.load("m", "law", "adapters/law"))
    await rest()
    late = Worker(adapters, "m/p-1", sql="sha256:file")
    slow.answer(slow.log[-1])
    await loading
    await rest()
    assert slow.digests == late.digests == {"sha256:file", "sha256:law"}


async def test_one_worker_that_fails_leaves_nothing_at_the_others() -> None:
    adapters = Adapters([model()])
    good, bad = Worker(adapters, "m/p-0"), Worker(adapters, "m/p-1", disk={})
    with pytest.raises(AdapterRefusedError, match=r"m/p-1: no such directory") as refused:
        await adapters.load("m", "law", "adapters/law")
    await rest()
    assert refused.value.status == 400
    assert (good.digests, bad.digests, adapters.find("law")) == (set(), set(), None)
    bad.disk = {"adapters/law": "sha256:another"}
    with pytest.raises(AdapterRefusedError, match="not the same as on the other workers"):
        await adapters.load("m", "law", "adapters/law")
    await rest()
    assert (good.digests, bad.digests, adapters.find("law")) == (set(), set(), None)


async def test_a_worker_lost_while_it_loads_is_a_clear_refusal() -> None:
    adapters = Adapters([model()])
    worker = Worker(adapters)
    worker.quiet = True
    loading = asyncio.create_task(adapters.load("m", "law", "adapters/law"))
    await rest()
    worker.lose()
    with pytest.raises(AdapterRefusedError, match="was lost meanwhile") as refused:
        await loading
    assert refused.value.status == 503


async def test_contents_are_kept_while_anybody_has_taken_them() -> None:
    """Whoever has resolved a name runs with that content, however often the name is given another one."""
    adapters = Adapters([model()])
    worker = Worker(adapters, sql="sha256:file")
    taken = adapters.find("sql")
    assert taken is not None
    adapters.take(taken)
    adapters.take(taken)
    await adapters.load("m", "sql", "new/sql")
    await rest()
    assert worker.digests == {"sha256:file", "sha256:new"}
    adapters.give_back(taken)
    await rest()
    assert adapters.requests(taken) == 1
    assert "sha256:file" in worker.digests
    adapters.give_back(taken)
    await rest()
    assert worker.digests == {"sha256:new"}
    assert adapters.contents("m") == ["sha256:file", "sha256:new"], "for purges of public prefixes"


async def test_two_names_of_one_content_share_it() -> None:
    adapters = Adapters([model()])
    worker = Worker(adapters)
    await adapters.load("m", "law", "adapters/law")
    await adapters.load("m", "alias", "adapters/law")
    await adapters.drop("law")
    await rest()
    assert worker.digests == {"sha256:law"}
    await adapters.drop("alias")
    await rest()
    assert worker.digests == set()
