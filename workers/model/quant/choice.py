"""How a model's matrices are rounded: without data, or as a text that went through it says."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from workers.config import EngineConfig
from workers.model.config import ModelConfig
from workers.model.quant.calibrate import LENGTH, MOST_TOKENS, calibrated, text
from workers.model.quant.kept import Fitted, find_or_fit, read
from workers.model.quant.matrix import Quantised
from workers.model.quant.scheme import rounding
from workers.model.registry import architecture
from workers.model.weights import GgufSource, Rounding, SafetensorsSource
from workers.model_store import ModelFiles, cache_dir
from workers.tokenizer import Tokenizer

_log = logging.getLogger(__name__)  # of the standard library: commands that print figures load models too


def rounding_for(
    engine: EngineConfig,
    config: ModelConfig,
    files: ModelFiles,
    opened: SafetensorsSource | GgufSource,
    architectures: Mapping[str, str],
    device: torch.device,
    cache: Path | None,
) -> Rounding | None:
    """What ``engine.weight_dtype`` and ``weight_calibration`` ask for; None where nothing is rounded.

    Fits where it has to, which takes the time of a few thousand prompt tokens in torch, and as long again. Raises
    ModelStoreError.
    """
    if engine.weight_dtype != "int4" or not engine.weight_calibration:
        return rounding(engine.weight_dtype)
    made = architecture(config.architecture, architectures)
    sample = text()

    def fit() -> dict[str, Quantised]:
        began = time.monotonic()
        # A large model on few cores takes long enough that whoever waits for it asks why.
        hint = {"layers": config.layers, "without": "engine.weight_calibration: false"}
        _log.info("rounding_is_fitted", extra=hint)
        found = calibrated(made, config, opened, _pieces(_tokenizer(files, opened), sample, config), device)
        _log.info("rounding_fitted", extra={"seconds": round(time.monotonic() - began, 1), "matrices": len(found)})
        return found

    about = {
        "revision": files.revision,
        "decoder": architectures[config.architecture],
        "text": hashlib.sha256(sample.encode()).hexdigest(),
    }
    return find_or_fit(cache or cache_dir(), about, fit)


def rounding_at(weight_dtype: str, path: str) -> Rounding | None:
    """What another process chose for this model: ``path`` of its file, or nothing. ValueError when it is gone."""
    if not path:
        return rounding(weight_dtype)
    found = read(Path(path))
    if found is None:
        raise ValueError(f"the rounding at {path} went away or broke while it was loaded; start again")
    return found


def path_of(chosen: Rounding | None) -> str:
    """For ``rounding_at`` of other processes. Raises ValueError for a rounding that only this one has."""
    if not isinstance(chosen, Fitted):
        return ""
    if chosen.path is None:
        raise ValueError(
            "engine.weight_dtype=int4 on several devices is fitted once and read by all from the cache, and that "
            "cannot be written; set FOREBAY_CACHE, or weight_calibration: false"
        )
    return str(chosen.path)


def digest_of(chosen: Rounding | None) -> str:
    """What tells a fitted rounding from another; empty where the settings already say all."""
    return chosen.digest if isinstance(chosen, Fitted) else ""


def _tokenizer(files: ModelFiles, opened: SafetensorsSource | GgufSource) -> Tokenizer:
    if isinstance(opened, SafetensorsSource):
        return Tokenizer.load(files.dir)
    from workers.model.gguf_tokenizer import tokenizer_json_of

    return Tokenizer(json.loads(tokenizer_json_of(opened.metadata)), {}, {}, {}, None)


def _pieces(tokenizer: Tokenizer, sample: str, config: ModelConfig) -> list[list[int]]:
    """The text in prompts, each with what the model wants in front."""
    front, tokens = (
        [token for token in found if token < config.vocab]
        for found in (tokenizer.encode_text(""), tokenizer.encode_text(sample, prefix=False))
    )
    length = min(LENGTH, config.max_context) - len(front)
    return [front + tokens[at : at + length] for at in range(0, MOST_TOKENS, max(1, length)) if at < len(tokens)]
