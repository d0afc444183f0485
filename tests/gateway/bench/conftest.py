"""A tiny model on disk, the configuration that serves it, and its engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from gateway.bench.engine import BenchEngine, open_engine
from tests.gateway.harness import AUTH
from tests.workers import tiny_model
from workers.config import EngineConfig

ENGINE = {"dtype": "float32", "blocks": 96, "block_size": 16, "max_running": 8, "max_step_tokens": 64, "threads": 1}


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of one layer, context 512."""
    return tiny_model.write(tmp_path_factory.mktemp("bench-model"))


@pytest.fixture(scope="session")
def config_file(model_dir: Path) -> Path:
    """A configuration beside it."""
    path = model_dir.parent / "bench.yaml"
    models = [{"name": "tiny", "source": str(model_dir), "pools": [{"name": "local", "engine": ENGINE}]}]
    path.write_text(yaml.safe_dump({"policies": {"auth": AUTH}, "tenants": [{"id": "a"}], "models": models}))
    return path


@pytest.fixture
def engine(model_dir: Path) -> Iterator[BenchEngine]:
    """Its engine, in this process."""
    made = open_engine(str(model_dir), EngineConfig.model_validate(ENGINE))
    yield made
    made.close()
