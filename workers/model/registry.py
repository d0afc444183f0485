"""Architecture name → ``module:attribute``, so that listing models imports no torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from workers.model_store import ModelStoreError

BUILTIN: Mapping[str, str] = {
    "LlamaForCausalLM": "workers.model.llama:LlamaDecoder",
    "MistralForCausalLM": "workers.model.llama:LlamaDecoder",
    "Qwen2ForCausalLM": "workers.model.llama:LlamaDecoder",
    "Qwen3ForCausalLM": "workers.model.llama:LlamaDecoder",
    "MixtralForCausalLM": "workers.model.moe:MoeDecoder",
    "Qwen2MoeForCausalLM": "workers.model.moe:MoeDecoder",
    "Qwen3MoeForCausalLM": "workers.model.moe:MoeDecoder",
    "Gemma2ForCausalLM": "workers.model.llama:LlamaDecoder",
    "Gemma3ForCausalLM": "workers.model.llama:LlamaDecoder",
}
"""One decoder, and the same with experts in place of its MLPs: where they differ (biases, norms of q and k, windows)
``config.py`` says so."""


def architecture(name: str, table: Mapping[str, str] = BUILTIN) -> Any:
    """The class that builds ``name``. Raises ModelStoreError naming what is registered."""
    target = table.get(name)
    if target is None:
        known = ", ".join(sorted(table))
        raise ModelStoreError(
            f"config.json: architectures[0]={name!r} is not supported (supported: {known}); "
            "a plugin can add it with the hook forebay_models"
        )
    module, colon, attribute = target.partition(":")
    if not colon:
        raise ModelStoreError(f"architecture {name!r} is registered as {target!r}, which is not module:attribute")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ModelStoreError(f"architecture {name!r} is registered as {target!r}, which fails: {error}") from error
