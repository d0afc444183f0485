"""Blocks handed over between workers that speak TLS: both show a certificate; without one nothing is handed over."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from tests.certificates import Authority
from tests.workers.transfer.pair import Side, both, config, request
from workers.engine.testing import solo
from workers.protocol import Generate, Source
from workers.rpc import TlsFiles, WorkerServer
from workers.transfer.stream import GrpcConnector, handler

PROMPT = list(range(100, 150))


class Encrypted:
    """A prefill worker behind a port that speaks TLS, and a decode worker that reads from it with ``tls``."""

    def __init__(self, tls: TlsFiles | None, server: TlsFiles) -> None:
        self.prefill = Side(config("prefill"), blocks=256)
        self.decode = Side(config("decode", transfer={"timeout_s": 30}), GrpcConnector(tls))
        self.server = WorkerServer(
            "127.0.0.1:0",
            lambda message: None,
            secret="correct-horse-battery",
            tls=server,
            blocks=handler(self.prefill.desk.parts),
        )

    async def answer(self, generate: Generate) -> str:
        """Run it; what became of the transfer."""
        await self.server.start()
        first, second = both(generate)
        assert second.source is not None
        self.prefill.deliver(first)
        self.decode.deliver(msgspec.structs.replace(second, source=Source(self.server.address, second.source.ticket)))
        await self.decode.ended(generate.id)
        [result] = self.decode.results
        return result


class Site:
    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        self.foreign = Authority(folder, "foreign")
        self.made: list[Encrypted] = []

    def files(self, name: str, *hosts: str, by: Authority | None = None) -> TlsFiles:
        pair = (by or self.authority).issue(name, *hosts)
        return TlsFiles(self.authority.cert, pair.cert, pair.key)

    def pair(self, tls: TlsFiles | None) -> Encrypted:
        self.made.append(Encrypted(tls, self.files("prefill", "127.0.0.1")))
        return self.made[-1]


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    made = Site(tmp_path)
    yield made
    for one in made.made:
        await one.decode.close()
        await one.server.stop()
        await one.prefill.close(leased=one.prefill.engine._handover.leases)


async def test_blocks_come_over_an_encrypted_connection(site: Site) -> None:
    pair = site.pair(site.files("decode"))
    assert await pair.answer(request("r", PROMPT)) == "ok"
    assert pair.decode.tokens["r"] == solo(PROMPT, 6, 0)


@pytest.mark.parametrize("certificate", ["none", "of another authority"])
async def test_who_shows_no_certificate_of_ours_gets_nothing(site: Site, certificate: str) -> None:
    """And computes the prompt itself."""
    tls = None if certificate == "none" else site.files("intruder", by=site.foreign)
    pair = site.pair(tls)
    assert await pair.answer(request("r", PROMPT)) == "broken"
    assert pair.decode.tokens["r"] == solo(PROMPT, 6, 0)
