"""A model divided among two processes, against the same model in one: small ones made here, whose parts go by two."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.bench import load
from gateway.bench.engine import BenchEngine
from gateway.bench.report import BenchError
from gateway.bench.techniques.lab import Found, Lab, answered

CONCURRENCY = 8


@dataclass(frozen=True, slots=True)
class Divided:
    """Both sides compute in torch and fp32 on the machine's cores; the native kernel is for one process."""

    settings: tuple[str, ...]
    experts: bool = False

    def __call__(self, lab: Lab) -> Found:
        """Measure. Raises BenchError."""
        from workers.model import specimen

        if lab.plain.loaded.device != "cpu":
            raise BenchError(f"ranks here are processes on a CPU; the engine runs on {lab.plain.loaded.device}")
        common = ("dtype=float32", "attention=batched", "kv_cache=64MiB", "device=cpu")
        dropped = ["adapters", "adapter_memory", "speculation", "weight_dtype", "blocks", "tiers", "role"]
        with tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder:
            vocab = lab.plain.vocab
            source = specimen.model(Path(folder) / "m", lab.files.dir, vocab, experts=self.experts)
            with (
                lab.engine(*common, source=str(source), dropped=dropped) as off,
                lab.engine(*common, *self.settings, source=str(source), dropped=dropped) as on,
            ):
                answers: dict[BenchEngine, dict[str, list[int]]] = {off: {}, on: {}}

                def turn(engine: BenchEngine, number: int) -> float:
                    work = load.uniform(f"devices/{number}", CONCURRENCY, 64, 32, vocab, CONCURRENCY)
                    return answered(engine, work, number, answers[engine])

                name = ", ".join(self.settings)
                pairs = lab.alternate(name, lambda number: turn(off, number), lambda number: turn(on, number))
                ranks = on.loaded.ranks
                alive = ranks.alive if ranks is not None else 1
                weights = off.loaded.weight_bytes
        equal = sum(answer == answers[off][key] for key, answer in answers[on].items())
        kind = f"Mixtral of {specimen.EXPERTS} experts" if self.experts else "Llama"
        proof: dict[str, Any] = {"ranks alive": alive, "equal answers": f"{equal} of {len(answers[on])}"}
        where = f"random {kind} of {weights / 1e6:.0f} MB, {CONCURRENCY} running"
        return Found(where, "output tokens/s", pairs, proof, alive == 2, self.settings)
