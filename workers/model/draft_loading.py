"""Finds a draft model, holds its vocabulary against the model's, and puts it beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from workers.config import EngineConfig, kv_bytes_per_token
from workers.model.budget import Beside, weight_bytes
from workers.model.config import ModelConfig, read_config
from workers.model.draft import DraftRunner, Guesser
from workers.model_store import ModelFiles, Progress, resolve
from workers.tokenizer_files import read_json, vocabulary_bytes

if TYPE_CHECKING:
    from workers.model.loading import LoadedModel

Load = Callable[[ModelFiles, EngineConfig], "LoadedModel"]


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft model on disk that fits its model."""

    files: ModelFiles
    config: ModelConfig
    name: str

    @classmethod
    def find(
        cls,
        engine: EngineConfig,
        model: Path,
        config: ModelConfig,
        *,
        base_dir: str | Path,
        cache: Path | None,
        progress: Progress | None,
    ) -> Draft | None:
        """What ``engine.speculation`` names, or None. ``model``: the directory of the model that it guesses for.

        Raises ValueError for one that is not there, unknown, or of another vocabulary.
        """
        speculation = engine.speculation
        if speculation is None or speculation.draft_model is None:
            return None
        name = speculation.draft_model
        try:
            files = resolve(name, base_dir=base_dir, cache=cache, progress=progress)
            found = read_config(files.dir)
        except ValueError as error:
            raise ValueError(f"engine.speculation.draft_model={name}: {error}") from error
        ours, theirs = (vocabulary_bytes(read_json(folder / "tokenizer.json")) for folder in (model, files.dir))
        if ours != theirs:
            raise ValueError(
                f"engine.speculation.draft_model={name}: its vocabulary ({len(theirs):,} tokens) is not the model's "
                f"({len(ours):,}), so its guesses would mean other words; name a smaller model of the same family"
            )
        if found.vocab > config.vocab:
            raise ValueError(
                f"engine.speculation.draft_model={name}: it knows {found.vocab:,} token ids, the model only "
                f"{config.vocab:,}; name a smaller model of the same family"
            )
        return cls(files, found, name)

    def beside(self, engine: EngineConfig, dtype: torch.dtype) -> Beside:
        """What it takes of the device's memory."""
        config = self.config
        per_token = kv_bytes_per_token(config.layers, config.kv_heads, config.head_dim, dtype.itemsize, engine.kv_dtype)
        return Beside(weight_bytes(config, dtype.itemsize, engine.weight_dtype), per_token)

    def join(self, model: LoadedModel, engine: EngineConfig, load: Load) -> LoadedModel:
        """Load it with as many blocks as the model has, and let both run together. Raises what ``load`` does."""
        alone: dict[str, object] = {"speculation": None, "blocks": model.blocks, "max_context": None}
        alone |= {"adapters": (), "adapter_memory": None, "tiers": (), "role": "both"}
        alone |= {"tensor_parallel": 1, "pipeline_parallel": 1, "expert_parallel": False}
        if engine.weight_dtype == "gguf" and self.files.gguf is None:  # it need not have come as the model did
            alone["weight_dtype"] = "auto"
        small = load(self.files, engine.model_copy(update=alone))
        assert isinstance(small.runner, Guesser)
        runner = DraftRunner(
            model.runner,
            small.runner,
            blocks=model.blocks,
            block_size=model.block_size,
            budget=engine.max_step_tokens,
            longest=small.max_context,
        )
        return replace(
            model,
            runner=runner,
            weight_bytes=model.weight_bytes + small.weight_bytes,
            kv_bytes_per_token=model.kv_bytes_per_token + small.kv_bytes_per_token,
            attention=f"{model.attention}, guesses by {self.name} ({small.attention})",
        )
