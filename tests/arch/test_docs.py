"""The documentation names everything that exists, and nothing that does not."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import typer.main

from gateway.cli import app
from gateway.settings import Settings
from policies.spi import KINDS
from tests.arch.config_keys import keys
from tests.arch.source import ROOT, files

DOCS = ROOT / "docs"


def rows(page: str) -> list[list[str]]:
    """Cells of every table row of a page, headings and rules left out."""
    lines = (DOCS / page).read_text().splitlines()
    tables = [line for line in lines if line.startswith("|") and not line.startswith("|---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in tables]


def commands(command: Any, words: tuple[str, ...] = ()) -> list[str]:
    """``config check``, ``serve``, …: every command that can be run."""
    children = getattr(command, "commands", {})
    if not children:
        return [" ".join(words)]
    return [name for child, sub in children.items() for name in commands(sub, (*words, child))]


def test_every_configuration_key_is_documented_with_its_default() -> None:
    table = [cells for cells in rows("configuration.md") if "." in cells[0] or cells[0] == "`plugins`"]
    documented = {cells[0].strip("`"): cells[1].strip("`") for cells in table}
    # tenant_defaults takes a tenant's keys, and every level the same limits: the page says so once.
    real = {key.path: key.default for key in keys(Settings) if not key.path.startswith("tenant_defaults.")}
    for block in ("tenants[].user_limits", "tenants[].key_limits", "organisations[].limits"):
        repeated = {path for path in real if path.startswith(f"{block}.")}
        assert {path.removeprefix(block) for path in repeated} <= {
            path.removeprefix("tenants[].limits") for path in real if path.startswith("tenants[].limits.")
        }
        real = {path: default for path, default in real.items() if path not in repeated} | {block: "no limits"}
    assert documented == real


def test_every_command_is_documented() -> None:
    text = (DOCS / "cli.md").read_text()
    found = commands(typer.main.get_command(app))
    assert len(found) >= 9
    assert [name for name in found if f"forebay {name}" not in text] == []


def test_every_documented_command_exists() -> None:
    """No page promises a command that is not there."""
    real = commands(typer.main.get_command(app))
    groups = {name.split(" ")[0] for name in real if " " in name}
    wrong = []
    for path in files():
        if path.suffix != ".md":
            continue
        for words in re.findall(r"`forebay ((?:[a-z]+ ?){1,2})", path.read_text()):
            first, *rest = words.split()
            name = f"{first} {rest[0]}" if first in groups and rest else first
            if name not in real and name not in groups:
                wrong.append(f"{path.relative_to(ROOT)}: forebay {words.strip()}")
    assert wrong == []


def test_every_built_in_policy_is_documented_with_its_settings() -> None:
    from policies.builtin import forebay_policies

    text = (DOCS / "policies.md").read_text()
    table = {(cells[0].strip("`"), cells[1].strip("`")): " ".join(cells[2:]) for cells in rows("policies.md")}
    missing = []
    specs = forebay_policies()
    assert {spec.kind for spec in specs} == set(KINDS)
    for spec in specs:
        row = table.get((spec.kind, spec.name))
        if row is None:
            missing.append(f"{spec.kind} {spec.name}")
            continue
        settings = [field.alias or name for name, field in spec.config.model_fields.items()]
        missing += [f"{spec.kind} {spec.name}: {name}" for name in settings if f"`{name}`" not in row]
    assert missing == []
    assert text.startswith("# ")


def test_every_dependency_is_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    names = {re.split(r"[^A-Za-z0-9_.-]", requirement)[0] for requirement in wanted}
    assert {cells[0] for cells in rows("dependencies.md") if cells[0] != "library"} == names


def test_links_between_pages_lead_somewhere() -> None:
    broken = [
        f"{path.relative_to(ROOT)} -> {target}"
        for path in files()
        if path.suffix == ".md"
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", path.read_text())
        if not (path.parent / target).exists()
    ]
    assert broken == []
