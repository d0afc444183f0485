"""What holds for the package as a whole: documentation of every policy, use of every hook, what it imports."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from policies import hookspecs
from policies.manager import make_manager
from policies.registry import Registry

ROOT = Path(__file__).parents[2]
DESIGN = (ROOT / "policies" / "DESIGN.md").read_text()
SECTIONS = DESIGN + (ROOT / "docs" / "policies.md").read_text()
FACTS = {
    "scheduling": ("Unit of fairness", "Inputs", "Config", "Trade-offs", "Bound", "Source"),
    "auth": ("Inputs", "Config", "Trade-offs", "Source"),
    "quota": ("Inputs", "Config", "Trade-offs", "Source"),
    "cache_scope": ("Inputs", "Config", "Trade-offs", "Source"),
    "routing": ("Inputs", "Config", "Trade-offs", "Source"),
    "admission": ("Inputs", "Config", "Trade-offs", "Source"),
}


def test_every_policy_has_a_section_with_its_facts_and_settings() -> None:
    for item in Registry.from_manager(make_manager()).policies():
        spec = item.spec
        match = re.search(rf"^### {spec.kind}: `{spec.name}`\n(.*?)(?=^##)", SECTIONS + "\n## end", re.M | re.S)
        assert match, f"neither policies/DESIGN.md nor docs/policies.md has a section '### {spec.kind}: `{spec.name}`'"
        for fact in FACTS[spec.kind]:
            assert f"**{fact}**" in match[1], f"{spec.name}: no {fact}"
        for name, field in spec.config.model_fields.items():
            assert f"`{field.alias or name}`" in match[1], f"{spec.name}: setting {name} is not described"


def test_every_hook_is_called_somewhere() -> None:
    sources = [path.read_text() for path in (ROOT / "policies").glob("*.py") if path.name != "hookspecs.py"]
    for name in (name for name in dir(hookspecs) if name.startswith("forebay_")):
        assert any(f"hook.{name}" in source for source in sources), f"nobody calls {name}"
        assert f"`{name}" in DESIGN, f"policies/DESIGN.md does not describe {name}"


def test_imports_neither_gateway_nor_workers_nor_anything_heavy() -> None:
    code = (
        "import sys, pkgutil, importlib, policies\n"
        "for module in pkgutil.walk_packages(policies.__path__, 'policies.'):\n"
        "    importlib.import_module(module.name)\n"
        "roots = {name.split('.')[0] for name in sys.modules}\n"
        "print(sorted(roots & {'gateway', 'workers', 'plugins', 'torch', 'opentelemetry', 'starlette', 'pytest',"
        " 'yaml', 'hypothesis', 'httpx', 'grpc', 'msgspec', 'structlog', 'numpy'}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
