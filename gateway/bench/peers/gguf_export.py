"""A model directory (safetensors) → GGUF with the very same weights, for peers that read nothing else.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Matrices keep their 16-bit type; norms become
fp32, as llama.cpp wants them. Rows of q and k go into llama.cpp's order (rotary pairs side by side). The tokenizer is
written so that the file loads; benchmarks send token ids only.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gateway.bench.report import BenchError

if TYPE_CHECKING:
    from workers.model.config import ModelConfig

ALIGNMENT = 32
_F32, _F16, _BF16 = 0, 1, 30
_TYPES: dict[str, tuple[int, str]] = {"BF16": (_BF16, "<u2"), "F16": (_F16, "<f2"), "F32": (_F32, "<f4")}
_FILE_TYPES = {_F32: 0, _F16: 1, _BF16: 32}
_NORMAL, _CONTROL = 1, 3
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def export(directory: Path, target: Path, *, half: bool = False) -> Path:
    """Write ``target`` unless it is there. With ``half`` bfloat16 becomes float16, for readers without bfloat16.

    bfloat16 has fewer digits, so that is exact but for weights below 6e-5, which lose some of their digits.
    Raises BenchError for a model that GGUF's plain Llama cannot describe.
    """
    from workers.model.config import read_config
    from workers.model_store import ModelStoreError

    if target.exists():
        return target
    try:
        config = read_config(directory)
    except ModelStoreError as error:
        raise BenchError(str(error)) from None
    if config.architecture != "LlamaForCausalLM" or config.rope.kind != "default":
        raise BenchError(
            f"{directory}: {config.architecture} with {config.rope.kind} RoPE is not exported to GGUF; peers that need "
            "it cannot be measured on this model"
        )
    tensors = list(_tensors(directory, config, half))
    metadata = {**_hyperparameters(config, tensors), **_tokenizer(directory, config)}
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_suffix(".part")
    with scratch.open("wb") as file:
        file.write(struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata)))
        for key, value in metadata.items():
            file.write(_string(key) + _value(value))
        offset = 0
        for name, kind, array in tensors:
            shape = array.shape[::-1]
            file.write(_string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset))
            offset += array.nbytes + -array.nbytes % ALIGNMENT
        file.write(b"\0" * (-file.tell() % ALIGNMENT))
        for _, _, array in tensors:
            file.write(array.tobytes() + b"\0" * (-array.nbytes % ALIGNMENT))
    scratch.rename(target)
    return target


def _tensors(directory: Path, config: ModelConfig, half: bool) -> Iterator[tuple[str, int, NDArray[Any]]]:
    """(GGUF name, GGML type, array [out, in]) of every tensor."""
    for path in sorted(directory.glob("*.safetensors")):
        raw: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
        size = int.from_bytes(raw[:8].tobytes(), "little")
        header = json.loads(raw[8 : 8 + size].tobytes())
        for name, entry in header.items():
            if name == "__metadata__" or (name == "lm_head.weight" and config.tied):
                continue
            if entry["dtype"] not in _TYPES:
                raise BenchError(f"{path}: {name} has dtype {entry['dtype']}; exported are {', '.join(_TYPES)}")
            kind, element = _TYPES[entry["dtype"]]
            begin, end = entry["data_offsets"]
            array: NDArray[Any] = raw[8 + size + begin : 8 + size + end].view(element).reshape(entry["shape"])
            if name.endswith("q_proj.weight"):
                array = _paired(array, config.heads)
            elif name.endswith("k_proj.weight"):
                array = _paired(array, config.kv_heads)
            if array.ndim == 1:
                kind, array = _F32, _single(array, kind)
            elif half and kind == _BF16:
                kind, array = _F16, _single(array, kind).astype(np.float16)
            yield _gguf_name(name), kind, array


def _single(array: NDArray[Any], kind: int) -> NDArray[np.float32]:
    """As fp32, exactly."""
    return (array.astype(np.uint32) << 16).view(np.float32) if kind == _BF16 else array.astype(np.float32)


def _paired(array: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows (i, i + head_dim/2) of each head side by side."""
    rows, columns = array.shape
    return array.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _gguf_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    parts = name.split(".", 3)
    if len(parts) == 4 and parts[3] in _LAYER:
        return f"blk.{parts[2]}.{_LAYER[parts[3]]}"
    raise BenchError(f"tensor {name!r} does not belong to a plain Llama decoder; it is not exported to GGUF")


def _hyperparameters(config: ModelConfig, tensors: list[tuple[str, int, NDArray[Any]]]) -> dict[str, Any]:
    main = next(kind for name, kind, _ in tensors if name == "token_embd.weight")
    return {
        "general.architecture": "llama",
        "general.name": "forebay benchmark export",
        "general.alignment": ALIGNMENT,
        "general.file_type": _FILE_TYPES[main],
        "llama.vocab_size": config.vocab,
        "llama.context_length": config.max_context,
        "llama.embedding_length": config.hidden,
        "llama.block_count": config.layers,
        "llama.feed_forward_length": config.intermediate,
        "llama.attention.head_count": config.heads,
        "llama.attention.head_count_kv": config.kv_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": config.rms_eps,
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": config.rope.theta,
    }


def _tokenizer(directory: Path, config: ModelConfig) -> dict[str, Any]:
    data = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    model = data["model"]
    tokens = [f"[unused{index}]" for index in range(config.vocab)]
    types = [_NORMAL] * config.vocab
    for token, index in model["vocab"].items():
        if index < config.vocab:
            tokens[index] = token
    for added in data.get("added_tokens", []):
        if added["id"] < config.vocab:
            tokens[added["id"]] = added["content"]
            types[added["id"]] = _CONTROL if added.get("special") else _NORMAL
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges", [])]
    end = min(config.eos_ids, default=0)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": end,
        "tokenizer.ggml.eos_token_id": end,
        "tokenizer.ggml.add_bos_token": False,
    }


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """A metadata value with its type."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if value and isinstance(value[0], int):
        return struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)
    return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
