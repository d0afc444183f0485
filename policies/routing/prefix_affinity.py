"""``prefix_affinity``: to the worker that most likely still holds the job's prefix, unless it is overloaded.

Source: the idea of SGLang's cache-aware router; a score and a balance rule in place of its pair of thresholds.

Rules
- The score of a worker is the cached tokens of the job that it holds less ``load_weight`` · the tokens that it owes to
  jobs in flight, beyond what the least loaded one owes. The best score wins; without any cached token, or where no
  such worker beats it, the least loaded one does. So misses spread, and a hot prefix comes to live on several workers.
- What a worker holds is guessed from its report (``hot_prefixes``) and from where jobs with the same prefix keys went
  before (an LRU index of at most ``index_keys`` keys). A wrong guess costs a recomputation, never a wrong answer.
- Prefix keys are chained from the cache scope, so keys of different scopes never meet: no tenant's choice of worker
  depends on what another tenant asked.
- Affinity yields to balance: a worker is passed over while its in-flight count is above ``max_imbalance`` times the
  mean (and above the least loaded one's by more than ``_SLACK``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from pydantic import Field

from policies.routing._load import least, load, reason
from policies.spi import PolicyConfig, PolicyContext, PolicySpec
from policies.types import Job, PrefixKey, RouteDecision, WorkerView

_SLACK = 2
_MAX_HOMES = 4
"""Workers remembered per key: a hot prefix lives on several."""


class PrefixAffinityConfig(PolicyConfig):
    """Balance and memory."""

    max_imbalance: float = Field(1.5, ge=1, allow_inf_nan=False)
    load_weight: float = Field(0.5, ge=0, allow_inf_nan=False)
    """Cached tokens that one more token owed outweighs."""
    index_keys: int = Field(65_536, ge=1)


class PrefixAffinity:
    """O(workers · blocks of the prompt) at worst."""

    def __init__(self, config: PrefixAffinityConfig) -> None:
        self._config = config
        self._homes: OrderedDict[PrefixKey, tuple[str, ...]] = OrderedDict()

    def choose(self, job: Job, workers: Sequence[WorkerView], now: float) -> RouteDecision:
        """Best score among the workers in balance that hold some of the prefix; else the least loaded."""
        hits = {worker.name: self._hit_tokens(job, worker) for worker in workers}
        mean = sum(worker.inflight for worker in workers) / len(workers)
        lowest = min(worker.inflight for worker in workers)
        least_owed = min(worker.inflight_tokens for worker in workers)

        def score(worker: WorkerView) -> float:
            return hits[worker.name] - self._config.load_weight * (worker.inflight_tokens - least_owed)

        best, affine = least(workers), False
        balanced = [
            worker
            for worker in workers
            if hits[worker.name] and worker.inflight <= max(self._config.max_imbalance * mean, lowest + _SLACK)
        ]
        if balanced:
            holder = min(balanced, key=lambda worker: (-score(worker), load(worker)))
            if holder is best or score(holder) > score(best):
                best, affine = holder, True
        self._remember(job, best.name)
        return RouteDecision(best.name, "prefix" if affine and len(workers) > 1 else reason(workers), hits[best.name])

    def _hit_tokens(self, job: Job, worker: WorkerView) -> int:
        # A key stands for the whole chain up to it: the deepest one that is known decides.
        for depth in range(len(job.prefix_keys), 0, -1):
            key = job.prefix_keys[depth - 1]
            if key in worker.hot_prefixes or worker.name in self._homes.get(key, ()):
                return max(0, min(depth * worker.block_size, job.prompt_tokens - 1))
        return 0

    def _remember(self, job: Job, worker: str) -> None:
        # Deepest first: when the index is full, the shared beginnings of prompts are the last to be forgotten.
        for key in reversed(job.prefix_keys[: self._config.index_keys]):
            others = [name for name in self._homes.get(key, ()) if name != worker]
            self._homes[key] = (worker, *others[: _MAX_HOMES - 1])
            self._homes.move_to_end(key)
        while len(self._homes) > self._config.index_keys:
            self._homes.popitem(last=False)

    def __len__(self) -> int:
        """Keys in the index."""
        return len(self._homes)


def _make(config: PrefixAffinityConfig, ctx: PolicyContext) -> PrefixAffinity:
    return PrefixAffinity(config)


SPEC = PolicySpec(
    "routing", "prefix_affinity", PrefixAffinityConfig, _make, "To the worker that holds the prefix, within balance."
)
