"""What the architecture tests look at: the tree's tracked files and each module's imports, read without importing."""

from __future__ import annotations

import ast
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("gateway", "policies", "workers")


@cache
def files() -> tuple[Path, ...]:
    """Every file that belongs to the project: tracked, or new and not ignored; all but caches outside a checkout."""
    if (ROOT / ".git").exists():
        listing = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout
        names = [name for name in listing.decode().split("\0") if name]
        return tuple(sorted(ROOT / name for name in names if (ROOT / name).is_file()))
    found = (path for path in ROOT.rglob("*") if path.is_file())
    return tuple(sorted(p for p in found if not any(part.startswith((".", "__pycache__")) for part in p.parts)))


@cache
def modules() -> dict[str, Path]:
    """Module name → file, of the three packages."""
    found = {}
    for path in files():
        relative = path.relative_to(ROOT)
        if path.suffix == ".py" and relative.parts[0] in PACKAGES:
            parts = relative.with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(module: str) -> frozenset[str]:
    """Modules that ``module`` imports anywhere in its text, also inside functions and TYPE_CHECKING blocks."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import; write the whole name"
            base = node.module or ""
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                found.add(whole if whole in modules() else base)
    return frozenset(found)


def within(module: str, package: str) -> bool:
    """Is ``module`` the package or inside it?"""
    return module == package or module.startswith(package + ".")
