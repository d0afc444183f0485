"""A GGUF file read as it lies, for ``engine.weight_dtype: gguf`` and for machines whose disk must not be written."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from workers.model.config import ModelConfig, parse_config
from workers.model.weights import GgufSource
from workers.model_store import ModelFiles, ModelStoreError, cache_dir, file_sha256


def open_gguf(path: Path, cache: Path | None) -> tuple[ModelFiles, ModelConfig, GgufSource]:
    """Config and tensors of ``path`` without unpacking it. Raises ModelStoreError."""
    from workers.model.gguf_tokenizer import generation_config_of, tokenizer_json_of
    from workers.model.gguf_unpack import GgufModel

    model = GgufModel(path)
    tokenizer = hashlib.sha256(tokenizer_json_of(model.metadata).encode()).hexdigest()
    generation = json.loads(generation_config_of(model.metadata))
    config = parse_config(model.config(), generation, str(path))
    files = ModelFiles(path.parent, f"sha256:{file_sha256(path, cache or cache_dir())}", tokenizer, path)
    return files, config, GgufSource(model)


def as_it_lies(files: ModelFiles, cache: Path | None) -> GgufSource:
    """The GGUF file that ``files`` were unpacked from. Raises ModelStoreError when it is not there, or another."""
    from workers.model.gguf_unpack import GgufModel

    wanted = "engine.weight_dtype=gguf reads the GGUF file that a model came in"
    if files.gguf is None and files.dir.joinpath("forebay.json").exists():
        raise ModelStoreError(
            f"{wanted}, and {files.dir} was unpacked before such files were kept: remove it and start again"
        )
    if files.gguf is None:
        raise ModelStoreError(f"{wanted}, and {files.dir} came in none; use int8, int4 or auto")
    if f"sha256:{file_sha256(files.gguf, cache or cache_dir())}" != files.revision:
        raise ModelStoreError(f"{wanted}, and {files.gguf} has changed since it was unpacked; start again")
    return GgufSource(GgufModel(files.gguf))
