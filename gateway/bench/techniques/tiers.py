"""What lies below the device: a long prompt that was evicted and comes back, and preempted sequences that were swapped.

Rules
- A pool is sized after the long prompt (a little more than two of them), host memory after the pool (twice as much).
- An evicted prompt is evicted for real: others are computed until neither the device nor, for the disk's row, host
  memory has any of it, and everything ordered is on the disk. The disk's files lie in the system's page cache then.
- Every answer is compared with the one from computing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.bench import load, metrics
from gateway.bench.engine import BenchEngine
from gateway.bench.load import Load, Request
from gateway.bench.report import BenchError
from gateway.bench.techniques.lab import Found, Lab, answered

PROMPTS = 2
"""Asked for again in a round; a figure is the median of theirs."""
ANSWER = 8


def pool(lab: Lab) -> int:
    """Blocks of the device: 400 for 3,000 tokens in blocks of 16."""
    size = lab.target.engine.block_size
    return max(4, lab.shape.long_tokens * 32 // (15 * size))


def tiers(lab: Lab, blocks: int, folder: str) -> str:
    """The setting; ``folder``: of a disk, empty for none."""
    block = lab.plain.loaded.kv_bytes_per_token * lab.target.engine.block_size
    disk = f", {{kind: disk, path: '{folder}', size: {16 * blocks * block}}}" if folder else ""
    return f"tiers=[{{kind: host, size: {2 * blocks * block}}}{disk}]"


@dataclass(frozen=True, slots=True)
class Restored:
    """Time to the first token of a long prompt: computed, and brought back from ``tier``."""

    tier: str

    def __call__(self, lab: Lab) -> Found:
        """Measure. Raises BenchError."""
        blocks, length = pool(lab), lab.shape.long_tokens
        with tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder:
            setting = tiers(lab, blocks, folder if self.tier == "disk" else "")
            common = (f"blocks={blocks}", "kv_cache_reuse=true", "prefix_cache=true")
            with lab.engine(*common, dropped=["tiers"]) as off, lab.engine(*common, setting) as on:
                turns = _Turns(lab, self.tier, off, on)
                pairs = lab.alternate(f"tiers, {self.tier}", turns.computed, turns.restored)
                stats = on.planner.stats().tiers[self.tier]
                used = on.planner.pool.total
        proof = {
            "restored blocks": stats.restored_blocks,
            "of them found": f"{turns.found} of {turns.asked} tokens",
            "equal answers": f"{turns.equal} of {turns.answers}",
        }
        worked = stats.restored_blocks > 0
        where = f"{length} tokens, evicted from {used} blocks"
        said = (f"blocks={blocks}", setting.replace(folder, "…"))
        return Found(where, "ms to the first token", pairs, proof, worked, said)


class _Turns:
    def __init__(self, lab: Lab, tier: str, off: BenchEngine, on: BenchEngine) -> None:
        self._lab, self._tier, self._off, self._on = lab, tier, off, on
        self._known: dict[str, list[int]] = {}
        self.found = self.asked = self.equal = self.answers = 0

    def computed(self, turn: int) -> float:
        """On the side without tiers, which never saw the prompts."""
        figure, answers, _ = self._ask(self._off, turn)
        self._known |= answers
        return figure

    def restored(self, turn: int) -> float:
        """Compute them, evict them, ask again."""
        self._ask(self._on, turn)
        self._flood(turn)
        figure, answers, cached = self._ask(self._on, turn)
        if turn:
            self.found += cached
            self.asked += PROMPTS * self._lab.shape.long_tokens
            self.answers += len(answers)
            self.equal += sum(answer == self._known[key] for key, answer in answers.items())
        return figure

    def _ask(self, engine: BenchEngine, turn: int) -> tuple[float, dict[str, list[int]], int]:
        length, vocab = self._lab.shape.long_tokens, self._off.vocab
        label = f"tiers/{self._tier}/{turn}"
        requests = [Request(f"{label}/{i}", load.prompt(f"{label}/{i}", length, vocab), ANSWER) for i in range(PROMPTS)]
        lines = engine.run(Load(tuple(requests), 1, keep_answers=True))
        figures = metrics.summarise(lines)
        if figures["failed"]:
            raise BenchError(f"requests failed: {figures.get('errors')}")
        answers = {line.id: line.answer for line in lines}
        return figures["ttft_p50_ms"], answers, sum(line.cached or 0 for line in lines)

    def _flood(self, turn: int) -> None:
        """Other prompts, until the asked ones are where they should be."""
        engine = self._on
        size = engine.config.block_size
        host = engine.loaded.store.slots if self._tier == "disk" and engine.loaded.store is not None else 0
        length = min(self._lab.shape.long_tokens, engine.loaded.max_context - 1)
        # No more than that: what comes back makes others leave the device, which need room in host memory then.
        count = -(-(engine.loaded.blocks + host) * size // length) + (host > 0)
        for index in range(count):
            label = f"flood/{self._tier}/{turn}/{index}"
            engine.run(load.uniform(label, 1, length, 1, engine.vocab, 1))
            engine.settle()


def swapped(lab: Lab) -> Found:
    """More sequences than the pool holds to their end: preempted ones computed again, or brought back."""
    count = 16
    size = lab.target.engine.block_size
    each = max(2 * size, (lab.shape.input_tokens + lab.shape.output_tokens) // 2)
    blocks = count * -(-each // size)
    common = (f"blocks={blocks}", f"max_running={count}", "kv_cache_reuse=true")
    setting = tiers(lab, blocks, "")
    with lab.engine(*common, dropped=["tiers"]) as off, lab.engine(*common, setting) as on:
        answers: dict[BenchEngine, dict[str, list[int]]] = {off: {}, on: {}}

        def turn(engine: BenchEngine, number: int) -> float:
            # Of equal lengths all would lose their blocks when the last one is full, and be found under its key.
            lengths = [(each + 5 * index % size, each) for index in range(count)]
            work = load.shaped(f"swap/{number}", lengths, engine.vocab)
            return answered(engine, work, number, answers[engine])

        pairs = lab.alternate("swap", lambda number: turn(off, number), lambda number: turn(on, number))
        planner, before = on.planner, off.planner
        swaps = planner.tiers.swaps if planner.tiers is not None else 0
        equal = sum(answer == answers[off][key] for key, answer in answers[on].items())
        proof = {
            "preemptions": _both(before.roster.preemptions, planner.roster.preemptions),
            "tokens computed again": _both(before.roster.recomputed, planner.roster.recomputed),
            "swapped out": swaps,
            "restored blocks": planner.stats().tiers["host"].restored_blocks,
            "equal answers": f"{equal} of {len(answers[on])}",
        }
    where = f"{count} running, {each} in / {each} out, {blocks} blocks"
    said: Sequence[str] = (f"blocks={blocks}", setting)
    return Found(where, "output tokens/s", pairs, proof, swaps > 0, said)


def _both(off: int, on: int) -> str:
    return f"{off} off, {on} on"
