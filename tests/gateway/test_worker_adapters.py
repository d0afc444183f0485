"""What a gateway asks one worker about adapters: answered once, lost with the worker, undone where nobody waited."""

from __future__ import annotations

import asyncio

import pytest

from gateway.worker_adapters import WorkerAdapters
from gateway.worker_handle import WorkerGoneError
from workers.protocol import AdapterAnswer, AdapterInfo, Down, DropAdapter, LoadAdapter

SQL = AdapterInfo("sql", "sha256:1", 4, 100)


async def test_an_adapter_counts_from_the_workers_word_until_it_is_asked_to_drop_it() -> None:
    sent: list[Down] = []
    adapters = WorkerAdapters(sent.append)
    loading = asyncio.create_task(adapters.load("sql", "adapters/sql", 5.0))
    await asyncio.sleep(0)
    (asked,) = sent
    assert isinstance(asked, LoadAdapter)
    assert SQL.digest not in adapters
    adapters.answered(AdapterAnswer(asked.id, adapter=SQL))
    assert (await loading).adapter == SQL
    assert SQL.digest in adapters
    dropping = asyncio.create_task(adapters.drop(SQL.digest))
    await asyncio.sleep(0)
    assert SQL.digest not in adapters, "no new request, though it is not freed yet"
    assert isinstance(sent[1], DropAdapter)
    adapters.answered(AdapterAnswer(sent[1].id))
    await dropping


async def test_a_refusal_and_a_loss_reach_who_asked() -> None:
    sent: list[Down] = []
    adapters = WorkerAdapters(sent.append)
    refused = asyncio.create_task(adapters.load("sql", "nowhere", 5.0))
    await asyncio.sleep(0)
    assert isinstance(sent[0], LoadAdapter)
    adapters.answered(AdapterAnswer(sent[0].id, error="no directory"))
    assert (await refused).error == "no directory"
    lost = asyncio.create_task(adapters.load("sql", "adapters/sql", 5.0))
    await asyncio.sleep(0)
    adapters.closed(WorkerGoneError("gone"))
    with pytest.raises(WorkerGoneError):
        await lost
    assert not adapters.held


async def test_what_was_loaded_too_late_is_dropped_again() -> None:
    """Nobody would ever use it, and its memory would be lost."""
    sent: list[Down] = []
    adapters = WorkerAdapters(sent.append)
    with pytest.raises(TimeoutError):
        await adapters.load("sql", "slow", 0.01)
    assert isinstance(sent[0], LoadAdapter)
    adapters.answered(AdapterAnswer(sent[0].id, adapter=SQL))
    assert isinstance(sent[1], DropAdapter)
    assert sent[1].digest == SQL.digest
    assert SQL.digest not in adapters
    adapters.answered(AdapterAnswer(sent[1].id))
    assert len(sent) == 2
