"""One model under two settings, task by task, and whether what was lost is more than may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass

from gateway.bench.evals.subject import Subject, Tick
from gateway.bench.evals.tasks import AGREEMENT, LANGUAGES, TASKS, Score, UnfitError, agreement, text
from gateway.bench.report import BenchError

MAX_DROP, MAX_POINTS = 2.0, 5.0
"""Percent of perplexity more, and points of a hundred less, that are allowed where nothing else is said. The tasks are
small: one question more or less is noise."""
Stage = Callable[[str], AbstractContextManager[Tick]]


@dataclass(frozen=True, slots=True)
class Row:
    """``drop``: percent of perplexity more, else points of a hundred less; negative: it got better."""

    task: str
    before: Score
    after: Score | None = None
    drop: float | None = None
    allowed: float | None = None

    @property
    def failed(self) -> bool:
        """Lost more than allowed."""
        return self.drop is not None and self.allowed is not None and not self.drop <= self.allowed


def pick(names: Sequence[str] | None) -> list[str]:
    """The tasks to run, in their order. Raises BenchError for an unknown one."""
    known = [*TASKS, AGREEMENT]
    if unknown := sorted(set(names or ()) - set(known)):
        raise BenchError(f"--only {unknown[0]!r} is no task; there are {', '.join(known)}")
    return [name for name in known if not names or name in names]


def allowances(texts: Sequence[str]) -> dict[str, float]:
    """``["3", "code=10"]`` → what each task may lose. Raises BenchError."""
    found = {name: MAX_DROP if task.better == "less" else MAX_POINTS for name, task in TASKS.items()}
    found[AGREEMENT] = MAX_POINTS
    for entry in texts:
        name, equals, value = entry.rpartition("=")
        try:
            most = float(value)
        except ValueError:
            most = math.nan
        if not math.isfinite(most) or most < 0:
            raise BenchError(f"--max-drop {entry!r}: write a number of percent, or TASK=NUMBER, for instance code=10")
        if equals and name not in found:
            raise BenchError(f"--max-drop {entry!r}: {name!r} is no task; there are {', '.join(found)}")
        found.update({name: most} if equals else dict.fromkeys(found, most))
    return found


def run(subject: Subject, names: Sequence[str], stage: Stage) -> dict[str, Score]:
    """Each task's score, but of those that are nothing for this model."""
    scores = {}
    for name in names:
        if name not in TASKS:
            continue
        try:
            with stage(name) as tick:
                scores[name] = TASKS[name].run(subject, tick)
        except UnfitError as why:
            with stage(f"{name}: left out, {why}"):
                pass
    return scores


def compare(
    before: Subject, after: Subject | None, names: Sequence[str], allowed: Mapping[str, float], stage: Stage
) -> list[Row]:
    """All tasks under the one, then under the other."""
    first = run(before, names, lambda name: stage(f"{name}, before" if after is not None else name))
    if after is None:
        return [Row(name, score) for name, score in first.items()]
    second = run(after, list(first), lambda name: stage(f"{name}, after"))
    rows = [
        Row(name, first[name], second[name], drop(name, first[name], second[name]), allowed[name]) for name in first
    ]
    if AGREEMENT in names:
        with stage(AGREEMENT):
            found = agreement(*([one.read(text(language)) for language in LANGUAGES] for one in (before, after)))
        rows.append(Row(AGREEMENT, Score(1.0, found.count), found, 100 * (1 - found.value), allowed[AGREEMENT]))
    return rows


def drop(task: str, before: Score, after: Score) -> float:
    """See ``Row``."""
    if TASKS[task].better == "less":
        return 100 * (after.value / before.value - 1)
    return 100 * (before.value - after.value)


def as_json(rows: Sequence[Row]) -> list[dict[str, object]]:
    """For ``--json``."""
    return [{**asdict(row), "failed": row.failed} for row in rows]
