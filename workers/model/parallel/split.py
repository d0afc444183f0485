"""Which part of a model a rank has (Shoeybi et al. 2019, arXiv:1909.08053 §3). Integers only.

Ranks are numbered stage by stage: rank = stage · width + lane. A stage (pipeline) has a run of layers; its lanes
(tensor) share each of them: heads, rows of the MLP and of the vocabulary. Experts are cut as other MLPs are, or (expert
parallel) every lane has whole ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import gcd

from workers.config import EngineConfig
from workers.model.config import ModelConfig

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r".*\.experts\.(\d+)\.")
_BY_ROWS = re.compile(r".*\.(q_proj|k_proj|v_proj|gate_proj|up_proj|w1|w3)\.(weight|bias)")
"""Every lane has some of a linear's outputs."""
_BY_COLUMNS = re.compile(r".*\.(o_proj|down_proj|w2)\.(weight|bias)")
"""Every lane has some of its inputs; the outputs are sums over lanes, so one of them adds the bias."""
_EMBEDDING, _HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


class SplitError(ValueError):
    """The model does not divide as asked. The text names figures and what would."""


@dataclass(frozen=True, slots=True)
class Cut:
    """What is read of a stored tensor: one of ``parts`` equal pieces along ``axis``, the last filled up with zeros."""

    axis: int
    index: int
    parts: int


@dataclass(frozen=True, slots=True)
class Split:
    """One rank's part of ``whole``. Raises SplitError from ``of``."""

    whole: ModelConfig
    width: int
    stages: int
    experts: bool
    """Whole experts on every lane instead of slices of each."""
    rank: int

    @staticmethod
    def of(whole: ModelConfig, engine: EngineConfig, rank: int) -> Split:
        """Raises SplitError naming the field, the model's figures, and the values that divide them."""
        made = Split(whole, engine.tensor_parallel, engine.pipeline_parallel, engine.expert_parallel, rank)
        made._check()
        return made

    @property
    def stage(self) -> int:
        """Which run of layers."""
        return self.rank // self.width

    @property
    def lane(self) -> int:
        """Which slice of each."""
        return self.rank % self.width

    @property
    def first(self) -> bool:
        """Whether it embeds tokens."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether it makes logits."""
        return self.stage == self.stages - 1

    @property
    def layers(self) -> range:
        """The layers of this stage."""
        return span(self.whole.layers, self.stage, self.stages)

    @property
    def part(self) -> ModelConfig:
        """The part as a model of its own: fewer heads, layers and rows of everything that is cut."""
        whole, width, moe = self.whole, self.width, self.whole.moe
        if moe is not None:
            moe = replace(
                moe,
                intermediate=moe.intermediate // (1 if self.experts else width),
                shared=moe.shared // width,
                dense=frozenset(layer - self.layers.start for layer in moe.dense if layer in self.layers),
                held=self._held,
            )
        return replace(
            whole,
            vocab=-(-whole.vocab // width),
            intermediate=whole.intermediate // width,
            layers=len(self.layers),
            heads=whole.heads // width,
            kv_heads=whole.kv_heads // width,
            moe=moe,
        )

    def stored(self, name: str) -> str | None:
        """The stored name of the part's tensor ``name``; None for one that the part has not."""
        if found := _LAYER.fullmatch(name):
            layer = int(found[1]) + self.layers.start
            return f"model.layers.{layer}.{found[2]}" if layer in self.layers and self._has(name) else None
        tied_head = name == _EMBEDDING and self.whole.tied and self.last
        here = {_EMBEDDING: self.first or tied_head, _HEAD: self.last, _NORM: self.last}
        return name if here.get(name, True) else None

    def named(self, stored: str) -> str | None:
        """The part's name of a stored tensor; None for one that the part has not."""
        name = stored
        if found := _LAYER.fullmatch(stored):
            name = f"model.layers.{int(found[1]) - self.layers.start}.{found[2]}"
        return name if self.stored(name) == stored else None

    def cut(self, name: str) -> Cut | None:
        """What is read of the tensor ``name``; None: all of it."""
        if self.width == 1 or (self.experts and _EXPERT.match(name)):
            return None
        if name in (_EMBEDDING, _HEAD) or _BY_ROWS.fullmatch(name):
            return Cut(0, self.lane, self.width)
        found = _BY_COLUMNS.fullmatch(name)
        return Cut(1, self.lane, self.width) if found and found[2] == "weight" else None

    def zeroed(self, name: str) -> bool:
        """Whether the tensor counts as zero here, since another lane adds it to the sum."""
        found = _BY_COLUMNS.fullmatch(name)
        return bool(found and found[2] == "bias" and self.lane)

    @property
    def _held(self) -> range | None:
        moe = self.whole.moe
        return span(moe.experts, self.lane, self.width) if moe is not None and self.experts else None

    def _has(self, name: str) -> bool:
        """Whether the layer's tensor is no other lane's expert."""
        found = _EXPERT.match(name)
        return found is None or self._held is None or int(found[1]) in self._held

    def _check(self) -> None:
        whole, moe = self.whole, self.whole.moe
        if self.experts and moe is None:
            raise SplitError(f"engine.expert_parallel=true: {whole.architecture} has no experts; leave it out")
        if moe is not None and self.experts and moe.experts < self.width:
            raise SplitError(
                f"engine.tensor_parallel={self.width} is more than the model's {moe.experts} experts, of which "
                f"engine.expert_parallel gives every rank at least one; write {moe.experts} or less"
            )
        if self.stages > whole.layers:
            raise SplitError(
                f"engine.pipeline_parallel={self.stages} is more than the model's {whole.layers} layers; write "
                f"{whole.layers} or less"
            )
        figures = {"num_attention_heads": whole.heads, "num_key_value_heads": whole.kv_heads}
        if moe is None or moe.dense:
            figures["intermediate_size"] = whole.intermediate
        if moe is not None and not self.experts:
            figures["an expert's intermediate size"] = moe.intermediate
        if moe is not None and moe.shared:
            figures["shared_expert_intermediate_size"] = moe.shared
        wrong = [f"{name}={value}" for name, value in figures.items() if value % self.width]
        if wrong:
            common = gcd(*figures.values())
            allowed = ", ".join(str(value) for value in range(1, common + 1) if common % value == 0)
            raise SplitError(
                f"engine.tensor_parallel={self.width} does not divide the model's {', '.join(wrong)}; this model can "
                f"be split by {allowed}; or split its layers with engine.pipeline_parallel"
            )


def span(count: int, index: int, parts: int) -> range:
    """The ``index``-th of ``parts`` runs of ``count`` things, whose lengths differ by one at most."""
    return range(count * index // parts, count * (index + 1) // parts)
