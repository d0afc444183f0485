"""Who may import whom (DESIGN §2), exactly; in `make check` import-linter does the same for transitive imports."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.arch.source import PACKAGES, ROOT, files, imports, modules, within

# What the gateway's serving path may see of the worker package. `engine.block_hash` is the chain key that both sides
# compute (DESIGN §7); `model_store` unpacks a model's files without torch: the gateway needs their tokenizer.
SERVING_SEES = (
    "workers.config",
    "workers.protocol",
    "workers.rpc",
    "workers.launchers",
    "workers.tokenizer",
    "workers.model_store",
    # Names and files of LoRA adapters.
    "workers.adapters",
    "workers.engine.block_hash",
    # How every process of ours logs and exports: one implementation, so that both keep the same rules.
    "workers.log",
    "workers.plain",
    "workers.spans",
    "workers.span_sink",
    "workers.otlp",
    "workers.collector",
    "workers.telemetry",
)
TOOLS = ("gateway.cli", "gateway.bench", "gateway.simulate")
TELEMETRY = ("gateway.telemetry", "workers.telemetry")
METRICS = ("gateway.metrics", "gateway.gauges", "workers.metrics")


def inside(*packages: str) -> list[str]:
    """Our modules that are one of ``packages`` or inside one."""
    return [module for module in sorted(modules()) if any(within(module, package) for package in packages)]


def outside(*packages: str) -> list[str]:
    """All our other modules."""
    return sorted(set(modules()) - set(inside(*packages)))


def offenders(sources: Iterable[str], forbidden: tuple[str, ...], allowed: tuple[str, ...] = ()) -> list[str]:
    """``a -> b`` for each import, by a module of ``sources``, of something forbidden and not allowed."""
    return [
        f"{module} -> {target}"
        for module in sources
        for target in sorted(imports(module))
        if any(within(target, name) for name in forbidden) and not any(within(target, name) for name in allowed)
    ]


def test_the_walk_sees_the_packages() -> None:
    """Guards the other tests: an empty tree would pass them all."""
    assert {name.split(".")[0] for name in modules()} == set(PACKAGES)
    assert "pydantic" in imports("gateway.settings")
    assert "workers.config" in imports("gateway.settings")


def test_policies_import_neither_gateway_nor_workers() -> None:
    assert offenders(inside("policies"), ("gateway", "workers")) == []


def test_policies_use_only_the_allowed_libraries() -> None:
    allowed = {*sys.stdlib_module_names, "pydantic", "pluggy", "policies"}
    foreign = [
        f"{module} -> {target}"
        for module in inside("policies")
        for target in sorted(imports(module))
        if target.split(".")[0] not in allowed
        # PyJWT and the cryptography it verifies with.
        and not (within(module, "policies.auth") and target.split(".")[0] in {"jwt", "cryptography"})
        # The conformance kit is run by pytest and hypothesis.
        and not (module == "policies.testing" and target.split(".")[0] in {"pytest", "hypothesis"})
    ]
    assert foreign == []


def test_workers_do_not_import_the_gateway() -> None:
    assert offenders(inside("workers"), ("gateway",)) == []


def test_the_serving_path_sees_only_the_borders_of_a_worker() -> None:
    serving = set(inside("gateway")) - set(inside(*TOOLS))
    assert offenders(sorted(serving), ("workers",), SERVING_SEES) == []


def test_torch_only_under_the_model() -> None:
    assert offenders(outside("workers.model"), ("torch",)) == []


def test_opentelemetry_only_in_the_two_telemetry_modules() -> None:
    assert offenders(outside(*TELEMETRY), ("opentelemetry",)) == []


def test_prometheus_only_in_the_metrics_modules() -> None:
    assert offenders(outside(*METRICS), ("prometheus_client",)) == []


def test_the_core_never_imports_plugins() -> None:
    assert offenders(inside(*PACKAGES), ("plugins",)) == []


def loaded_by(statement: str) -> set[str]:
    """Top-level names of the modules that a fresh interpreter holds after ``statement``."""
    program = (
        f"{statement}\nimport json, sys\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("statement", ["import gateway.app", "import gateway.compose", "import gateway.cli"])
def test_a_fresh_interpreter_finds_no_torch(statement: str) -> None:
    """gateway E11: the gateway starts fast because nothing it imports loads the model's libraries."""
    assert loaded_by(statement) & {"torch", "transformers", "safetensors", "gguf"} == set()


def test_the_command_line_starts_light() -> None:
    """gateway E11: help and completion load neither the web stack nor the policies."""
    assert (
        loaded_by("import gateway.cli") & {"starlette", "uvicorn", "grpc", "pydantic", "opentelemetry", "jwt"} == set()
    )


def test_unpacking_a_model_loads_no_torch() -> None:
    """The gateway's process may unpack a model's files: it needs the tokenizer in them."""
    statement = (
        "import workers.model_store, workers.model.wheels, workers.model.gguf_unpack, workers.model.gguf_tokenizer"
    )
    assert "torch" not in loaded_by(statement)


def test_listing_policies_loads_no_torch() -> None:
    assert "torch" not in loaded_by("import policies.builtin")


PLUGINS_SEE = ("policies.spi", "policies.types", "policies.testing", "workers.protocol", "workers.rpc")


def test_plugins_see_only_what_is_made_for_them() -> None:
    """Each of ``plugins/`` is a distribution of its own: it may rely on these modules, and on nothing else of ours."""
    sources = [path for path in files() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] == "plugins"]
    assert {path.relative_to(ROOT).parts[1] for path in sources} >= {"example_policy", "openai_upstream"}
    wrong = [
        f"{path.relative_to(ROOT)} -> {name}"
        for path in sources
        for name in imported(path)
        if name.split(".")[0] in PACKAGES and not any(within(name, allowed) for allowed in PLUGINS_SEE)
    ]
    assert wrong == []


UNPICKLERS = re.compile(
    r"^\s*(?:import|from)\s+(?:_?pickle|pickletools|dill|cloudpickle|joblib|shelve|marshal|dbm)\b"
    r"|\b(?:torch|np|numpy)\.load\(|\byaml\.(?:load|unsafe_load|full_load)\(",
    re.MULTILINE,
)


def test_nothing_that_is_kept_or_sent_is_unpickled() -> None:
    """security 61: there is no Redis, and no cache, file or message is ever read by what runs code from bytes. What is
    read instead treats pickle's bytes as a miss: ``test_kept.py``, ``test_disk_tier.py``, ``test_shared.py``."""
    for text in ("import pickle\n", "    from shelve import open", "x = torch.load(f)", "yaml.load(text)"):
        assert UNPICKLERS.search(text)
    places = (*PACKAGES, "plugins")
    ours = [path for path in files() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in places]
    assert len(ours) > 300
    assert [str(path.relative_to(ROOT)) for path in ours if UNPICKLERS.search(path.read_text())] == []


def imported(path: Path) -> set[str]:
    """Modules that a file imports, anywhere in its text."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found
