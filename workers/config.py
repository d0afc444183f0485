"""The ``engine:`` block of a pool. No torch here: the gateway validates with this model too."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from policies.strict import StrictScalars
from workers import techniques
from workers.adapters import AdapterSource
from workers.sizes import MOST, Bytes, bytes_or_auto
from workers.speculation import Speculation
from workers.tier_config import DiskTierConfig, HostTierConfig, TierConfig, checked
from workers.transfer_config import Role, Transfer

ADAPTER_MEMORY = 256 * 2**20

MOST_RANKS = 64
MEAN_REQUEST_TOKENS = 512
"""Prompt + output of a typical chat request, where nothing is known yet."""


class EngineConfig(StrictScalars):
    """How one worker computes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    weight_dtype: Literal["auto", "int8", "int4", "gguf"] = "auto"
    """``int8`` and ``int4`` round the matrices to 8 and 4 bits in groups of 32 when they are loaded; ``gguf`` keeps
    what a GGUF file has in its own bits, exactly. ``auto``: as ``dtype``."""
    fold_weights: bool = True
    """Keep bfloat16 weights in 12 bits, exactly (native kernel on a CPU that multiplies bfloat16). False: in 16."""
    weight_calibration: bool = True
    """``int4`` is fitted to what the model computes over a short shipped text: once for a model, then kept in the
    cache. False: rounded without data, at once."""
    attention: Literal["auto", "native", "flashinfer", "triton", "batched", "reference"] = "auto"
    """``native`` is one C++ call per step (CPU), ``flashinfer`` and ``triton`` are kernels over block tables (CUDA),
    ``batched`` is torch, ``reference`` the plain one that all others are measured against. ``auto`` takes the first of
    native or, on CUDA, flashinfer and triton that is there and knows the model, else batched."""
    cuda_graphs: bool = True
    """Record steps that only decode at start and replay them (CUDA, with flashinfer or triton)."""
    block_size: int = Field(16, ge=1, le=256)
    kv_cache: Annotated[Annotated[int, Field(gt=0, le=MOST)] | Literal["auto"], BeforeValidator(bytes_or_auto)] = 2**30
    """Bytes for keys and values; whole blocks that fit are made at start. ``auto``: what the device has left."""
    kv_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """How keys and values are kept: ``auto`` as the model computes, else a byte per number and a scale per token and
    head (``model/kv_format.py``): about half of bfloat16's bytes, answers that differ slightly."""
    memory_margin: float = Field(0.05, ge=0, lt=1)
    """Part of the device's free memory that is planned for nothing (``model/budget.py``)."""
    blocks: int | None = Field(None, ge=2, lt=2**31)
    """Exact number of blocks; overrides ``kv_cache``. For tests and comparisons."""
    max_step_tokens: int = Field(512, ge=1, le=2**20)
    """Token budget of one step: decodes first, the rest for prompt chunks. Beside decodes a chunk's tokens count by the
    work that they are, which grows with their place in the prompt (``engine/allowance.py``)."""
    max_chunk_tokens: int | None = Field(None, ge=1)
    """Most prompt tokens of one sequence per step; None = up to the step's budget."""
    max_running: Annotated[int, Field(ge=1, le=2**20)] | Literal["auto"] = 64
    """``auto`` follows the KV cache's size ÷ the observed mean length of requests (``engine/slots.py``)."""
    max_context: int | None = Field(None, ge=1)
    """Longest prompt + output in tokens; None = the model's own limit."""
    prefix_cache: bool = True
    cache_share: float = Field(1.0, ge=0, le=1)
    """Part of the pool that is split by weight between the tenants with cached blocks: below its part a tenant's cache
    is safe from another's flood. 0 = evict in plain least-recently-used order."""
    tiers: Annotated[tuple[TierConfig, ...], AfterValidator(checked)] = ()
    """Where blocks of the prefix cache go that the device has no place for: ``host`` memory, then a ``disk``."""
    mode: Literal["continuous", "static"] = "continuous"
    """``static`` batches are for comparison: a batch runs to its end before the next is admitted."""
    kv_cache_reuse: bool = True
    """False recomputes everything every step (no KV cache), for comparison only."""
    speculation: Speculation | None = None
    """Guess tokens and check several in one step (``workers/speculation.py``); None = off."""
    role: Role = "both"
    """``prefill``: only compute prompts, for the model's decode workers. ``decode``: take the blocks of long prompts
    from prefill workers, while there are any."""
    transfer: Transfer = Transfer()
    """How blocks get from prefill to decode workers."""
    threads: int | None = Field(None, ge=1, le=1024)
    """Compute threads; None = one per core, or what the control group has time for (``host.py``)."""
    cores: str | None = Field(None, pattern=r"^\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*$")
    """Cores that the worker is bound to, as ``0-3,8``; None = any. For several workers on one machine."""
    allocator: Literal["auto", "system", "tcmalloc", "jemalloc"] = "auto"
    """Memory allocator that a local launcher preloads; ``auto``: tcmalloc or jemalloc where one is installed."""
    seed: int = 0
    tensor_parallel: int = Field(1, ge=1, le=MOST_RANKS)
    """Devices that share each layer: heads, MLP and vocabulary are divided. One process each; CUDA devices from
    ``device`` on, or so many processes on a CPU. Computes in torch."""
    pipeline_parallel: int = Field(1, ge=1, le=MOST_RANKS)
    """Groups of ``tensor_parallel`` devices that have some of the layers each, one behind the other."""
    expert_parallel: bool = False
    """Experts of a mixture are divided whole among the devices of ``tensor_parallel`` instead of each being cut."""
    rank_timeout_s: float = Field(20.0, gt=0, le=3600)
    """A device that the others wait for longer within a step is lost, and the worker ends."""

    adapters: tuple[AdapterSource, ...] = ()
    """LoRA adapters that are loaded at start, by name; others can be loaded and dropped while it runs."""
    max_adapters: int = Field(16, ge=1, le=1024)
    """Most adapters that are loaded at once."""
    max_adapter_rank: int = Field(64, ge=1, le=512)
    """Highest rank of an adapter."""
    adapter_memory: Bytes | None = None
    """Bytes that adapters may occupy, set aside in the memory plan. None: 256 MiB where ``adapters`` names any, else
    nothing, and then none can be loaded later."""

    @property
    def step_overrun(self) -> int:
        """Most decodes that are not counted beside the end of a prompt (``engine/allowance.py``)."""
        return self.max_step_tokens // 8

    @property
    def step_rows(self) -> int:
        """Most rows of a step."""
        return self.max_step_tokens + self.step_overrun

    @property
    def adapter_room(self) -> int:
        """Bytes that adapters may occupy; 0: this engine takes none."""
        if self.adapter_memory is not None:
            return self.adapter_memory
        return ADAPTER_MEMORY if self.adapters else 0

    @field_validator("adapters")
    @classmethod
    def _distinct(cls, adapters: tuple[AdapterSource, ...]) -> tuple[AdapterSource, ...]:
        names = [adapter.name for adapter in adapters]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise ValueError(f"two adapters are called {name!r}; give each a name of its own")
        return adapters

    @property
    def ranks(self) -> int:
        """Processes that the model is divided among."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def host_tier(self) -> HostTierConfig | None:
        """Of ``tiers``."""
        return next((tier for tier in self.tiers if tier.kind == "host"), None)

    @property
    def disk_tier(self) -> DiskTierConfig | None:
        """Of ``tiers``."""
        return next((tier for tier in self.tiers if tier.kind == "disk"), None)

    @model_validator(mode="after")
    def _compatible(self) -> Self:
        if len(self.adapters) > self.max_adapters:
            raise ValueError(
                f"adapters names {len(self.adapters)}, max_adapters is {self.max_adapters}: raise it or name fewer"
            )
        techniques.check(self)
        if self.ranks > MOST_RANKS:
            raise ValueError(
                f"tensor_parallel={self.tensor_parallel} and pipeline_parallel={self.pipeline_parallel} make "
                f"{self.ranks} processes of one worker; {MOST_RANKS} are the most"
            )
        if self.ranks > 1 and self.attention == "native":
            name = "tensor_parallel" if self.tensor_parallel > 1 else "pipeline_parallel"
            raise ValueError(
                f"attention=native and {name}={getattr(self, name)} exclude each other: the kernel computes a step of "
                "the whole model in one call; write attention: auto, which takes torch here"
            )
        if self.ranks > 1 and self.adapter_room:
            raise ValueError(
                f"adapter_memory={self.adapter_room} makes room for adapters, whose factors are not divided among "
                f"{self.ranks} devices; leave it out, or tensor_parallel and pipeline_parallel"
            )
        if self.pipeline_parallel > 1 and self.weight_dtype == "gguf":
            raise ValueError(
                f"weight_dtype=gguf reads one file onto one device, and pipeline_parallel={self.pipeline_parallel}; "
                "write weight_dtype: int8 or int4, which are rounded on each"
            )
        if self.expert_parallel and self.tensor_parallel == 1:
            raise ValueError(
                "expert_parallel=true divides experts among the devices of tensor_parallel, which is 1: set "
                "tensor_parallel, or leave expert_parallel out"
            )
        return self


KV_SCALE_BYTES = 2
"""Of the scale (bfloat16) that a token's keys, or values, of one head have where ``kv_dtype`` is not ``auto``."""


def kv_bytes_per_token(
    layers: int,
    kv_heads: int,
    head_dim: int,
    bytes: int,  # noqa: A002 - the field's word
    kv_dtype: str = "auto",
) -> int:
    """Bytes that one token's keys and values occupy over all layers (``bytes``: of one of the model's numbers)."""
    head = head_dim * bytes if kv_dtype == "auto" else head_dim + KV_SCALE_BYTES
    return 2 * layers * kv_heads * head
