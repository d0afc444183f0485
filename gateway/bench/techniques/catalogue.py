"""``bench techniques``: each of the engine's switches on and off in turn, on a load that shows what it is for.

Rules
- How it is measured: ``lab.py``. Every technique is a function of the ``Lab``; nothing here knows what one does.
- A technique that cannot be measured here (a device, a model, a file that is not there) has a row that says why.
- One that did nothing has a row that says so.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.bench.display import Display
from gateway.bench.render import Table
from gateway.bench.report import BenchError, Report
from gateway.bench.target import Target
from gateway.bench.techniques import devices, roles, speed, tiers, windows
from gateway.bench.techniques.lab import Found, Lab, Shape

COLUMNS = ("technique", "load", "unit", "off", "on", "on ÷ off", "of rounds", "proof")
Technique = Callable[[Lab], Found]


def _speculation(work: speed.Work, about: str, *, concurrency: int = 1, temperature: float = 0.0) -> speed.Speed:
    settings = ("speculation={method: ngram}",)
    return speed.Speed(settings, work, speed.drafts, concurrency, temperature=temperature, about=about)


def _kept(setting: str) -> speed.Speed:
    return speed.Speed((f"kv_dtype={setting}",), speed.numbers, speed.kept, 32)


def _far(setting: str) -> speed.Speed:
    settings, unit = (f"kv_dtype={setting}",), "ms between tokens, p50"
    return speed.Speed(settings, speed.far, speed.kept, 8, figure="itl_p50_ms", unit=unit, about="long contexts")


PLAIN = ("fold_weights=false",)
"""Weights as the model has them: what other forms of weights are held against, folded ones too."""


def _weights(setting: str, concurrency: int) -> speed.Speed:
    return speed.Speed((f"weight_dtype={setting}",), speed.numbers, speed.weights, concurrency, off=PLAIN)


def _folded(concurrency: int) -> speed.Speed:
    return speed.Speed(("fold_weights=true",), speed.numbers, speed.folded, concurrency, off=PLAIN)


def _draft(lab: Lab) -> Found:
    """With the model that was named; without, with one that is next to never right, to see what that costs."""
    if lab.draft is not None:
        return _guessed_by(lab.draft, "questions")(lab)
    from workers.model import specimen

    layers = max(1, lab.plain.loaded.config.layers // 8)
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder:
        cut = specimen.first_layers(Path(folder) / "m", lab.files.dir, layers)
        return _guessed_by(str(cut), f"questions, guessed by its own first {layers} layers")(lab)


def _guessed_by(source: str, about: str) -> speed.Speed:
    settings = (f"speculation={{method: draft, draft_model: '{source}'}}",)
    return speed.Speed(settings, speed.other, speed.guesses, about=about)


TECHNIQUES: Mapping[str, Technique] = {
    "speculation ngram, copying": _speculation(speed.copying, "repeat a text"),
    "speculation ngram, other": _speculation(speed.other, "questions"),
    "speculation ngram, other, at 0.7": _speculation(speed.other, "questions", temperature=0.7),
    "speculation ngram, 16 running": _speculation(speed.other, "questions", concurrency=16),
    "speculation draft": _draft,
    "kv_dtype int8": _kept("int8"),
    "kv_dtype fp8": _kept("fp8"),
    "kv_dtype int8, long contexts": _far("int8"),
    "kv_dtype fp8, long contexts": _far("fp8"),
    "fold_weights, 1 running": _folded(1),
    "fold_weights, 8 running": _folded(8),
    "weight_dtype int8, 1 running": _weights("int8", 1),
    "weight_dtype int8, 32 running": _weights("int8", 32),
    "weight_dtype int4, 1 running": _weights("int4", 1),
    "weight_dtype int4, 32 running": _weights("int4", 32),
    "weight_dtype gguf, 1 running": _weights("gguf", 1),
    "weight_dtype gguf, 32 running": _weights("gguf", 32),
    "prefix_cache": speed.Speed(
        ("prefix_cache=true",),
        speed.shared,
        speed.hits,
        off=("prefix_cache=false",),
        figure="ttft_p50_ms",
        unit="ms to the first token",
        about="prompts that begin alike",
    ),
    "tiers, host": tiers.Restored("host"),
    "tiers, disk": tiers.Restored("disk"),
    "preemption by swap": tiers.swapped,
    "sliding windows": windows.held,
    "adapters, 1 among 8 running": speed.adapters(1, 8),
    "adapters, 8 among 8 running": speed.adapters(8, 8),
    "role prefill and decode": roles.apart,
    "tensor_parallel 2": devices.Divided(("tensor_parallel=2",)),
    "pipeline_parallel 2": devices.Divided(("pipeline_parallel=2",)),
    "expert_parallel": devices.Divided(("tensor_parallel=2", "expert_parallel=true"), experts=True),
}


def pick(names: Sequence[str] | None) -> dict[str, Technique]:
    """Those whose name begins with one of ``names``; all without. Raises BenchError for one that begins none."""
    if not names:
        return dict(TECHNIQUES)
    for name in names:
        if not any(known.startswith(name) for known in TECHNIQUES):
            raise BenchError(f"--only {name!r} is no technique; there are {'; '.join(TECHNIQUES)}")
    return {name: one for name, one in TECHNIQUES.items() if name.startswith(tuple(names))}


def techniques_report(
    target: Target, display: Display, techniques: Mapping[str, Technique], shape: Shape, *, draft: str | None = None
) -> Report:
    """Measure all; one of ``report.runs`` for each. Raises BenchError when the model itself cannot be loaded."""
    lab = Lab(target, display, shape, draft)
    parameters: dict[str, Any] = {
        "input": shape.input_tokens,
        "output": shape.output_tokens,
        "long": shape.long_tokens,
        "engine": target.engine.model_dump(mode="json"),
    }
    try:
        report = Report("techniques", lab.plain.versions(), parameters)
        for number, (name, technique) in enumerate(techniques.items(), 1):
            display.say(f"{number} of {len(techniques)}: {name}")
            try:
                run = {"technique": name, **technique(lab).figures()}
                display.say(f"  {run['off']} → {run['on']} {run['unit']}, {run['ratio']} ×; {_proof(run)}")
            except BenchError as error:
                run = {"technique": name, "refused": str(error)}
                display.say(f"  not measured: {error}")
            report.runs.append(run)
    finally:
        lab.close()
    return report


def _proof(run: Mapping[str, Any]) -> str:
    return "; ".join(f"{name} {value}" for name, value in run["proof"].items())


def table(report: Report) -> Table:
    """A row for each technique."""
    made = Table("techniques, on against off", COLUMNS)
    for run in report.runs:
        if "refused" in run:
            made.add(run["technique"], *[None] * (len(COLUMNS) - 1))
            made.notes.append(f"{run['technique']}: not measured: {run['refused']}")
            continue
        if not run["worked"]:
            made.notes.append(f"{run['technique']}: did nothing on this load")
        spread = f"{run['ratio_low']}–{run['ratio_high']}"
        made.add(
            *(run[key] for key in ("technique", "load", "unit", "off", "on", "ratio")),
            spread,
            _proof(run),
        )
    made.notes.append("Medians of rounds in which both sides took turns; on ÷ off is the median of the rounds' ratios.")
    return made
