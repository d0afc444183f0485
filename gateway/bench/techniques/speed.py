"""Techniques that are seen in what a load of equal requests takes: speculation, bytes kept, adapters, prefix hits."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gateway.bench import load, metrics
from gateway.bench.engine import BenchEngine
from gateway.bench.load import Load, Request, Timeline
from gateway.bench.report import BenchError
from gateway.bench.techniques.lab import Found, Lab
from gateway.bench.traffic import WORDS

RANK = 8
"""Of the adapters made here."""


@dataclass(frozen=True, slots=True)
class Side:
    """One engine and what it counted in the counted rounds."""

    engine: BenchEngine
    answers: dict[str, list[int]]
    counted: dict[str, int]

    def note(self, lines: Sequence[Timeline]) -> None:
        """After a round."""
        self.answers.update((line.id, line.answer) for line in lines)
        counted = self.counted
        counted["cached"] = counted.get("cached", 0) + sum(line.cached or 0 for line in lines)
        counted["adapter"] = counted.get("adapter", 0) + self.engine.steps.adapter_rows


Proof = Callable[[Side, Side], tuple[bool, dict[str, Any]]]
"""(off, on) → whether it did anything, and the figures that show it."""
Work = Callable[[Lab, str, int], Load]
"""(lab, label, concurrency) → what one round asks; equal for equal labels."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of a load with ``settings`` on, against the engine as it is or with ``off``."""

    settings: tuple[str, ...]
    work: Work
    proof: Proof
    concurrency: int = 1
    off: tuple[str, ...] = ()
    figure: str = "output_tokens_s"
    unit: str = "output tokens/s"
    temperature: float = 0.0
    about: str = ""
    """Of the load, beside how many run."""

    def __call__(self, lab: Lab) -> Found:
        """Measure. Raises BenchError."""
        with (
            lab.engine(*self.off, temperature=self.temperature) as first,
            lab.engine(*self.settings, temperature=self.temperature) as second,
        ):
            off, on = Side(first, {}, {}), Side(second, {}, {})
            name = ", ".join(self.settings)
            pairs = lab.alternate(name, lambda turn: self._turn(lab, off, turn), lambda turn: self._turn(lab, on, turn))
            worked, proof = self.proof(off, on)
            equal = sum(answer == off.answers[key] for key, answer in on.answers.items())
        proof = {**proof, "equal answers": f"{equal} of {len(on.answers)}"}
        about = f"{self.about}, " if self.about else ""
        return Found(f"{about}{self.concurrency} running", self.unit, pairs, proof, worked, self.settings)

    def _turn(self, lab: Lab, side: Side, turn: int) -> float:
        work = self.work(lab, f"{'/'.join(self.settings)}/{turn}", self.concurrency)
        lines = side.engine.run(replace(work, keep_answers=True))
        figures = metrics.summarise(lines)
        if figures["failed"]:
            raise BenchError(f"requests failed: {figures.get('errors')}")
        if turn:
            side.note(lines)
        return float(figures[self.figure])


def numbers(lab: Lab, label: str, concurrency: int) -> Load:
    """Random token ids of the report's shape."""
    shape = lab.shape
    count = max(2, concurrency)
    return load.uniform(label, count, shape.input_tokens, shape.output_tokens, lab.plain.vocab, concurrency)


def copying(lab: Lab, label: str, concurrency: int) -> Load:
    """A passage and its beginning again, which an answer goes on with."""
    shape = lab.shape
    length = max(3, shape.input_tokens * 3 // 4)
    requests = []
    for index in range(max(4, concurrency)):
        passage = lab.passage(_number(label, index), length)
        again = passage[: max(1, len(passage) // 3)]
        requests.append(Request(f"{label}-{index}", (*passage, *again), shape.output_tokens))
    return Load(tuple(requests), concurrency)


def other(lab: Lab, label: str, concurrency: int) -> Load:
    """Short questions, of whose words little is in the answer."""
    kinds = ("Write a story about the {} and the {}.", "Explain what a {} has to do with a {}.", "List {}s and {}s.")
    requests = []
    for index in range(max(4, concurrency)):
        number = _number(label, index)
        first, second = WORDS[number % len(WORDS)], WORDS[(7 * number + 3) % len(WORDS)]
        tokens = lab.encode(kinds[number % len(kinds)].format(first, second) + "\n\n")
        requests.append(Request(f"{label}-{index}", tuple(tokens), lab.shape.output_tokens))
    return Load(tuple(requests), concurrency)


def far(lab: Lab, label: str, concurrency: int) -> Load:
    """All decode behind two thirds of a long prompt: steps that read many keys and values."""
    length = lab.shape.long_tokens * 2 // 3
    return load.uniform(label, concurrency, length, lab.shape.output_tokens // 2, lab.plain.vocab, concurrency)


def shared(lab: Lab, label: str, concurrency: int) -> Load:
    """Prompts that have all but their last 32 tokens in common, one after the other."""
    del concurrency
    given = lab.shape.input_tokens
    own = min(32, max(1, given // 2))
    return load.common_prefix(label, 4, max(1, given - own), own, 8, lab.plain.vocab)


def adapted(digests: Sequence[str]) -> Work:
    """As ``numbers``, every request with the next of these adapters."""

    def work(lab: Lab, label: str, concurrency: int) -> Load:
        plain = numbers(lab, label, concurrency)
        requests = enumerate(plain.requests)
        dealt = [replace(request, adapter=digests[index % len(digests)]) for index, request in requests]
        return replace(plain, requests=tuple(dealt))

    return work


def drafts(off: Side, on: Side) -> tuple[bool, dict[str, Any]]:
    """Guesses that became tokens."""
    return on.engine.planner.stats().drafts_accepted > 0, guesses(off, on)[1]


def guesses(_: Side, on: Side) -> tuple[bool, dict[str, Any]]:
    """Guesses that were made, right or wrong."""
    stats = on.engine.planner.stats()
    accepted, guessed = stats.drafts_accepted, stats.drafts_accepted + stats.drafts_rejected
    return guessed > 0, {"drafts": f"{accepted} of {guessed} accepted"}


def kept(off: Side, on: Side) -> tuple[bool, dict[str, Any]]:
    """Bytes per token of keys and values, tokens in the same bytes."""
    before, after = off.engine.loaded.kv_bytes_per_token, on.engine.loaded.kv_bytes_per_token
    return after < before, {
        "bytes per token": f"{before} to {after}",
        "tokens in the same bytes": _times(before, after),
    }


def weights(off: Side, on: Side) -> tuple[bool, dict[str, Any]]:
    """Bytes of weights."""
    before, after = off.engine.loaded.weight_bytes, on.engine.loaded.weight_bytes
    return after < before, {"weights": f"{before / 1e6:.0f} to {after / 1e6:.0f} MB", "of them": _times(after, before)}


def folded(off: Side, on: Side) -> tuple[bool, dict[str, Any]]:
    """Bytes that the kernel reads of the weights."""
    before, after = (side.engine.loaded.weight_bytes - _away(side) for side in (off, on))
    return after < before, {"weights": f"{before / 1e6:.0f} to {after / 1e6:.0f} MB", "of them": _times(after, before)}


def _away(side: Side) -> int:
    from workers.model.native.runner import NativeRunner

    runner = side.engine.loaded.runner
    return runner.decoder.folded_away if isinstance(runner, NativeRunner) else 0


def hits(_: Side, on: Side) -> tuple[bool, dict[str, Any]]:
    """Prompt tokens that were found."""
    return on.counted["cached"] > 0, {"cached tokens": on.counted["cached"]}


def _times(one: float, other_: float) -> str:
    return f"{one / other_:.2f} ×"


def _number(label: str, index: int) -> int:
    import zlib

    return zlib.crc32(f"{label}/{index}".encode()) % 10_007


def adapters(count: int, concurrency: int) -> Callable[[Lab], Found]:
    """The same load without adapters and with ``count`` of them among its requests."""

    def measure(lab: Lab) -> Found:
        from workers.model import specimen

        with tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder:
            config = lab.plain.loaded.config
            paths = [specimen.adapter(Path(folder) / f"a{one}", config, rank=RANK, seed=one) for one in range(count)]
            named = ", ".join(f"{{name: a{one}, source: '{path}'}}" for one, path in enumerate(paths))
            with lab.engine(f"adapters=[{named}]") as engine:
                table = engine.loaded.adapters
                digests = [adapter.digest for adapter in table] if table is not None else []
                off, on = Side(engine, {}, {}), Side(engine, {}, {})
                plain = Speed((f"{count} adapters of rank {RANK}",), numbers, hits, concurrency)
                with_them = replace(plain, work=adapted(digests))
                pairs = lab.alternate(
                    plain.settings[0],
                    lambda turn: plain._turn(lab, off, turn),
                    lambda turn: with_them._turn(lab, on, turn),
                )
        rows = on.counted["adapter"]
        differ = sum(answer != off.answers[key] for key, answer in on.answers.items())
        proof: Mapping[str, Any] = {
            "tokens with an adapter": rows,
            "other answers than the base": f"{differ} of {len(on.answers)}",
        }
        return Found(
            f"{concurrency} running", plain.unit, pairs, proof, rows > 0 and differ > 0, (f"adapters: {count}",)
        )

    return measure
