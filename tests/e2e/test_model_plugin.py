"""A model architecture that a plugin brings: registered at the gateway, built by its workers."""

from __future__ import annotations

import json
from pathlib import Path

from policies.spi import ModelSpec, hookimpl
from tests.gateway.harness import BASE, MODEL, running
from tests.workers import tiny_model


class ModelPlugin:
    """Registers one architecture, built from what is there."""

    @hookimpl
    def forebay_models(self) -> list[ModelSpec]:
        return [ModelSpec("PluginForCausalLM", "workers.model.moe:MoeDecoder", "A test's.")]


async def test_a_plugins_architecture_is_loaded_and_answers(tmp_path: Path) -> None:
    tiny_model.write(tmp_path / "tiny")
    path = tmp_path / "tiny" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": ["PluginForCausalLM"]}))
    engine = {"device": "cpu", "dtype": "float32", "blocks": 40, "max_running": 4, "threads": 1}
    pools = [{"name": "local", "launch": {"use": "local"}, "engine": engine}]
    models = [{"name": MODEL, "source": "tiny", "pools": pools}]
    assert BASE["models"] != models
    async with running(tmp_path, {"models": models}, plugins=[ModelPlugin()], ready=True) as site:
        client = site.client("alpha")
        answer = await client.completions.create(model=MODEL, prompt="the", max_tokens=3)
        assert answer.usage is not None
        assert answer.usage.completion_tokens in (1, 2, 3)
        (handle,) = site.dispatcher.workers
        assert handle.hello is not None
        assert handle.hello.versions["attention"] == "batched", "what is not Llama's decoder runs in torch"
