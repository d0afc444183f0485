"""GGUF → the files of a Hugging Face model directory, one tensor at a time in memory. No torch.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Quantised tensors are dequantised once; the
worker then computes on what the quantised file says, rounded to the target type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray

from workers.model.fields import is_size, number, positive
from workers.model.gguf_rope import FACTORS, llama3, yarn
from workers.model.gguf_tokenizer import generation_config_of, tokenizer_config_of, tokenizer_json_of
from workers.model_store import ModelStoreError, Progress

Metadata = dict[str, Any]
Array = NDArray[Any]

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
}
_LAYER |= {
    ours.replace("weight", "bias"): theirs.replace("weight", "bias")
    for ours, theirs in _LAYER.items()
    if theirs.endswith("_proj.weight")
}
_GEMMA_LAYER = _LAYER | {
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
"""``general.architecture`` → the class of ``config.json``. Mistral's files say llama."""
_GEMMA = frozenset({"gemma2", "gemma3"})
PIECE = 1 << 20
"""Elements that are dequantised at once."""
_LARGEST = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models: there scores are scaled by hidden size ÷ heads, in all others by the size of a head."""
_PERMUTED = frozenset({"llama"})
"""Of these llama.cpp's converter reorders q and k, for interleaved RoPE; the others keep the half-split form."""


class GgufModel:
    """A GGUF file opened for reading (memory-mapped): metadata, config, tensors under their Hugging Face names."""

    def __init__(self, path: Path) -> None:
        """Raises ModelStoreError when the file is not GGUF or not of a supported architecture."""
        self.path = path
        try:
            self._reader = GGUFReader(str(path))
            self.metadata: Metadata = {name: field.contents() for name, field in self._reader.fields.items()}
        except Exception as error:  # the library raises what numpy does where counts and lengths lead astray
            raise ModelStoreError(f"{path} is not a readable GGUF file: {error}") from error
        architecture = self.metadata.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
            raise ModelStoreError(
                f"{path}: general.architecture is {architecture!r}; supported in GGUF: {', '.join(ARCHITECTURES)}"
            )
        self._architecture = architecture
        if (parts := self.metadata.get("split.count", 0)) not in (0, 1):
            raise ModelStoreError(f"{path} is one of {parts} parts; join them first: llama-gguf-split --merge")
        layer, every = layer_names(self._architecture), self._reader.tensors
        self._tensors = {_hf_name(tensor.name, path, layer): tensor for tensor in every if tensor.name != FACTORS}
        self._factors = next((tensor for tensor in every if tensor.name == FACTORS), None)
        for name, shape in self.shapes().items():
            if not shape or not all(map(is_size, shape)):
                raise ModelStoreError(f"{path}: tensor {name!r} has shape {list(shape)}")
        self._heads = self._size("attention.head_count")
        self._kv_heads = self._size("attention.head_count_kv", self._heads)
        self._rope_scaling()

    def config(self) -> dict[str, Any]:
        """The ``config.json`` this file amounts to."""
        meta, heads = self.metadata, self._heads
        hidden = self._size("embedding_length")
        window = self._size("attention.sliding_window") if self._maybe("attention.sliding_window", 0) else 0
        rope = self._rope_scaling()
        return {
            "architectures": [ARCHITECTURES[self._architecture]],
            "model_type": {"gemma3": "gemma3_text"}.get(self._architecture, self._architecture),
            **({} if self._architecture in _GEMMA else {"hidden_act": "silu"}),
            "hidden_size": hidden,
            "intermediate_size": self._size("feed_forward_length"),
            "num_hidden_layers": self._size("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._kv_heads,
            "head_dim": self._head_dim(),
            "max_position_embeddings": self._size("context_length"),
            # Stored as float32; seven digits give back the decimal that was meant (1e-05, not 9.99999974e-06).
            "rms_norm_eps": float(f"{self._number('attention.layer_norm_rms_epsilon'):.7g}"),
            "rope_theta": self._theta(),
            "vocab_size": self._vocab(),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self._tensors,
            "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in self._tensors,
            **({"sliding_window": window} if window else {}),
            **({"rope_scaling": rope} if rope else {}),
            **(self._gemma() if self._architecture in _GEMMA else {}),
            "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
            "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
            "dtype": "bfloat16",
        }

    def _head_dim(self) -> int:
        return self._size("attention.key_length", self._size("embedding_length") // self._heads)

    def _theta(self) -> float:
        return self._number("rope.freq_base", 10000.0)

    def _rope_scaling(self) -> dict[str, Any] | None:
        """How rotations are scaled. Raises ModelStoreError for ways that are not known."""
        kind, head_dim = self._maybe("rope.scaling.type", "none"), self._head_dim()
        strange: str | None = None
        turned = self._maybe("rope.dimension_count", head_dim)
        if turned != head_dim:
            strange = f"rope.dimension_count={turned!r} of heads of {head_dim}"
        elif self._factors is not None:
            plain = self._factors.tensor_type.name == "F32" and kind == "none"
            found = llama3(self._factors.data.reshape(-1), self._theta(), head_dim) if plain else None
            if found is not None and self._architecture == "llama":
                return found
            strange = FACTORS
        elif kind == "linear":
            factor = self._number("rope.scaling.factor", 1.0)
            return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
        elif kind == "yarn":
            begin = f"{self._architecture}.rope.scaling."
            told = {key.removeprefix(begin): value for key, value in self.metadata.items() if key.startswith(begin)}
            if not isinstance(read := yarn(told), str):
                return read
            strange = f"rope.scaling.{read}"
        elif kind != "none":
            strange = f"rope.scaling.type={kind!r}"
        if strange is not None:
            raise ModelStoreError(
                f"{self.path}: {strange}: rotations scaled so are not supported in GGUF; use the model's safetensors "
                "directory instead"
            )
        return None

    def _gemma(self) -> dict[str, Any]:
        """What llama.cpp knows of Gemma without being told."""
        hidden, layers = self._size("embedding_length"), self._size("block_count")
        scalar = hidden // self._heads if layers == _LARGEST[self._architecture] else self._size("attention.key_length")
        told = {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": scalar}
        if self._architecture == "gemma3":
            return {**told, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6}
        caps = {name: self._maybe(name, None) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
        return {**told, **caps}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensor name → shape [out, in], in file order."""
        return {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in self._tensors.items()}

    def tensor(self, name: str) -> NDArray[np.float32]:
        """One tensor, dequantised to fp32 [out, in], as ``pieces`` gives it."""
        array = np.empty(self.shapes()[name], dtype=np.float32)
        done = 0
        for piece in self.pieces(name):
            array[done : done + len(piece)] = piece
            done += len(piece)
        return array

    def permuted(self, name: str) -> int:
        """Heads whose rows ``unpermute`` has to put back in this tensor; 0: its rows are in order."""
        if self._architecture not in _PERMUTED:
            return 0
        heads = self._heads if ".q_proj." in name else self._kv_heads if ".k_proj." in name else 0
        if heads and (rows := int(self._tensors[name].shape[-1])) % (2 * heads):
            raise ModelStoreError(f"{self.path}: tensor {name!r} has {rows} rows, which {heads} heads cannot share")
        return heads

    def stored(self, name: str) -> tuple[str, Array]:
        """A tensor as it lies in the file: its type's name and its bytes, rows in the file's order."""
        stored = self._tensors[name]
        return stored.tensor_type.name, stored.data

    def pieces(self, name: str) -> Iterator[NDArray[np.float32]]:
        """One tensor, dequantised some rows at a time, since that takes several times their size in memory.

        Rows of q and k in the half-split RoPE order, Gemma's norms less one.
        """
        stored = self._tensors[name]
        shape = self.shapes()[name]
        turned = self.permuted(name)
        rows = stored.data.reshape(shape[0], -1)
        step = len(rows) if turned or len(shape) == 1 else max(1, PIECE // shape[1])
        for start in range(0, len(rows), step):
            try:
                piece = dequantize(rows[start : start + step], stored.tensor_type).astype(np.float32, copy=True)
                piece = piece.reshape(-1, *shape[1:])
            except (NotImplementedError, ValueError) as error:
                kind = stored.tensor_type.name
                raise ModelStoreError(f"{self.path}: tensor {name!r} of type {kind} cannot be read: {error}") from error
            if turned:
                piece = unpermute(piece, turned)
            if self._architecture in _GEMMA and name.endswith("norm.weight"):
                piece -= 1.0  # llama.cpp's converter adds what the checkpoint's norms leave out
            yield piece

    def _vocab(self) -> int:
        """Rows of the embedding: at least the tokens that have names; Qwen pads it."""
        key = "tokenizer.ggml.tokens"
        if not isinstance(named := self.metadata.get(key), list):
            raise ModelStoreError(f"{self.path}: GGUF metadata lacks {key}")
        embedding = self._tensors.get("model.embed_tokens.weight")
        return len(named) if embedding is None else int(embedding.shape[-1])

    def _need(self, key: str) -> Any:
        """A figure of the architecture. Raises ModelStoreError when it is missing."""
        key = f"{self._architecture}.{key}"
        if key not in self.metadata:
            raise ModelStoreError(f"{self.path}: GGUF metadata lacks {key}")
        return self.metadata[key]

    def _size(self, key: str, default: int | None = None) -> int:
        """A figure that is a size. Raises ModelStoreError when it is missing, without a ``default``, or none."""
        value = self._need(key) if default is None else self._maybe(key, default)
        return positive({key: value}, key, f"{self.path}: {self._architecture}")

    def _number(self, key: str, default: float | None = None) -> float:
        """A figure above 0; likewise."""
        value = self._need(key) if default is None else self._maybe(key, default)
        return number({key: value}, key, f"{self.path}: {self._architecture}")

    def _maybe(self, key: str, default: Any) -> Any:
        return self.metadata.get(f"{self._architecture}.{key}", default)


def unpermute(array: Array, heads: int) -> Array:
    """Undo llama.cpp's reordering of q/k rows or biases: interleaved pairs (2i, 2i+1) → halves (i, i + head_dim/2)."""
    pairs = array.reshape(heads, len(array) // heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(array.shape))


def to_bf16_bits(array: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round fp32 to bfloat16, nearest even, as torch does; returns the bit patterns. NaN stays NaN."""
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    nan = np.isnan(array)
    if nan.any():
        rounded[nan] = 0x7FC0
    return rounded


def unpack(
    gguf: Path,
    directory: Path,
    progress: Progress | None,
    dtype: Literal["bf16", "f32"] = "bf16",
    template: str | None = None,
) -> None:
    """Write tokenizer, configs and ``model.safetensors`` into ``directory``. Raises ModelStoreError.

    ``template``: the chat template of a file that has none.
    """
    model = GgufModel(gguf)
    if template is not None:
        model.metadata.setdefault("tokenizer.chat_template", template)
    config = model.config()
    config["dtype"] = "bfloat16" if dtype == "bf16" else "float32"
    files = {
        "tokenizer.json": tokenizer_json_of(model.metadata),
        "tokenizer_config.json": tokenizer_config_of(model.metadata),
        "generation_config.json": generation_config_of(model.metadata),
        "config.json": json.dumps(config, indent=1),
    }
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")
    _write_safetensors(model, directory / "model.safetensors", progress, dtype)


def _write_safetensors(model: GgufModel, path: Path, progress: Progress | None, dtype: Literal["bf16", "f32"]) -> None:
    """Stream tensors into one safetensors file: u64 header length, JSON header, data back to back."""
    width, label = (2, "BF16") if dtype == "bf16" else (4, "F32")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in model.shapes().items():
        size = int(np.prod(shape)) * width
        header[name] = {"dtype": label, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    done = 0
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in model.shapes():
            for piece in model.pieces(name):
                data = to_bf16_bits(piece).tobytes() if dtype == "bf16" else piece.tobytes()
                file.write(data)
                done += len(data)
                if progress:
                    progress("unpack", done, offset)


def layer_names(architecture: str) -> dict[str, str]:
    """Tensor names within a layer: GGUF → Hugging Face."""
    return _GEMMA_LAYER if architecture in _GEMMA else _LAYER


def _hf_name(name: str, path: Path, layer: dict[str, str]) -> str:
    if name in _TOP:
        return _TOP[name]
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    if match and match[2] in layer:
        return f"model.layers.{match[1]}.{layer[match[2]]}"
    raise ModelStoreError(f"{path}: tensor {name!r} does not belong to a Llama-family decoder")
