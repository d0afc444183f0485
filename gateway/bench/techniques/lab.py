"""What every technique is measured with: engines, prompts, and rounds in which both sides take turns.

Rules
- One round runs the side without the technique, then the side with it, on the same prompts. So a machine that slows
  down slows both. The first round warms up and is not counted.
- A figure is the median of the rounds, the ratio the median of the rounds' ratios, with their range.
- A row carries its proof: counters that only move when the technique did something.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from gateway.bench import metrics
from gateway.bench.display import Display
from gateway.bench.engine import BenchEngine, open_engine, overridden
from gateway.bench.load import Load
from gateway.bench.report import BenchError
from gateway.bench.target import Target

if TYPE_CHECKING:
    from workers.model_store import ModelFiles
    from workers.tokenizer import Tokenizer

LANGUAGES = ("en", "de", "fr", "es")


@dataclass(frozen=True, slots=True)
class Shape:
    """Of every request, and how often both sides are run."""

    input_tokens: int = 512
    output_tokens: int = 128
    long_tokens: int = 3000
    """A long prompt: what tiers bring back, and what makes running answers wait."""
    rounds: int = 3
    seconds: float = 20.0
    """Of a load that is served for a while."""


@dataclass(frozen=True, slots=True)
class Found:
    """What came of a technique."""

    load: str
    unit: str
    pairs: Sequence[tuple[float, float]]
    """(off, on), by round."""
    proof: Mapping[str, Any]
    worked: bool
    """Whether the proof shows that it did anything."""
    settings: Sequence[str] = ()

    def figures(self) -> dict[str, Any]:
        """As reports have it."""
        ratios = [on / off if off else 0.0 for off, on in self.pairs]
        off, on = (statistics.median(side) for side in zip(*self.pairs, strict=True))
        return {
            "settings": list(self.settings),
            "load": self.load,
            "unit": self.unit,
            "off": float(f"{off:.5g}"),
            "on": float(f"{on:.5g}"),
            "ratio": round(statistics.median(ratios), 3),
            "ratio_low": round(min(ratios), 3),
            "ratio_high": round(max(ratios), 3),
            "rounds": len(self.pairs),
            "proof": dict(self.proof),
            "worked": self.worked,
        }


Side = Callable[[int], float]
"""One side's turn in a round (0: warm-up) → its figure."""


def answered(engine: BenchEngine, work: Load, number: int, answers: dict[str, list[int]]) -> float:
    """Output tokens/s of a turn in round ``number``; what was answered goes to ``answers``, the warm-up's does not.

    Raises BenchError where a request failed.
    """
    lines = engine.run(replace(work, keep_answers=True))
    figures = metrics.summarise(lines)
    if figures["failed"]:
        raise BenchError(f"requests failed: {figures.get('errors')}")
    if number:
        answers |= {line.id: line.answer for line in lines}
    return float(figures["output_tokens_s"])


@dataclass(slots=True)
class Lab:
    """Of one report. ``close`` ends what it opened."""

    target: Target
    display: Display
    shape: Shape
    draft: str | None = None
    """Source of a smaller model of the same vocabulary."""
    _plain: BenchEngine | None = None
    _tokenizer: Tokenizer | None = None
    _texts: dict[str, list[int]] = field(default_factory=dict)

    @property
    def plain(self) -> BenchEngine:
        """The engine as configured; loaded when first asked for. Raises BenchError."""
        if self._plain is None:
            with self.display.task("load the model"):
                self._plain = open_engine(self.target.source, self.target.engine, base_dir=self.target.base_dir)
        return self._plain

    @property
    def files(self) -> ModelFiles:
        """The model on disk."""
        return self.target.files()

    @contextmanager
    def engine(
        self, *settings: str, source: str | None = None, temperature: float = 0.0, dropped: Sequence[str] = ()
    ) -> Iterator[BenchEngine]:
        """An engine with other settings (``key=value``), ended afterwards; ``dropped``: fields at their defaults.

        Raises BenchError.
        """
        base = self.target.engine
        fields = type(base).model_fields
        base = base.model_copy(update={name: fields[name].get_default() for name in dropped})
        with self.display.task(f"load with {', '.join(settings) or 'nothing else'}"):
            made = open_engine(
                source or self.target.source,
                overridden(base, settings),
                base_dir=self.target.base_dir,
                temperature=temperature,
            )
        try:
            yield made
        finally:
            made.close()

    def alternate(self, name: str, off: Side, on: Side, *, rounds: int | None = None) -> list[tuple[float, float]]:
        """Both sides in turn, the first round not counted."""
        rounds = rounds or self.shape.rounds
        pairs = []
        with self.display.task(name) as tick:
            for turn in range(rounds + 1):
                pairs.append((off(turn), on(turn)))
                tick(turn + 1, rounds + 1)
        return pairs[1:]

    def encode(self, text: str) -> list[int]:
        """A text's tokens."""
        if self._tokenizer is None:
            from workers.tokenizer import Tokenizer

            self._tokenizer = Tokenizer.load(self.files.dir)
        return self._tokenizer.encode_text(text)

    def passage(self, number: int, tokens: int) -> list[int]:
        """So many tokens of the shipped texts, another beginning for every number."""
        from gateway.bench.evals.tasks import text

        language = LANGUAGES[number % len(LANGUAGES)]
        if language not in self._texts:
            self._texts[language] = self.encode(text(language))
        whole = self._texts[language]
        start = 17 * number % max(1, len(whole) - tokens)
        found = whole[start : start + tokens]
        if not found:
            raise BenchError("the model's tokenizer makes no tokens of the shipped texts")
        return found

    def close(self) -> None:
        """End the plain engine."""
        if self._plain is not None:
            self._plain.close()
            self._plain = None
