"""A tenant whose requests run with a LoRA adapter, from the file to the official client's answer, on a real engine."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import numpy as np
import openai
from safetensors.numpy import save_file

from tests.e2e.harness import Server, serving
from tests.workers import tiny_model
from workers.adapters import CONFIG_FILE, WEIGHTS_FILE

PROMPT = list(range(20, 60))


def write(folder: Path, seed: int, rank: int = 4) -> Path:
    """An adapter of the tiny model."""
    folder.mkdir()
    random = np.random.default_rng(seed)
    tensors = {}
    for module, out, inner in (
        ("self_attn.q_proj", tiny_model.HEADS * tiny_model.HEAD_DIM, tiny_model.HIDDEN),
        ("mlp.down_proj", tiny_model.HIDDEN, tiny_model.INNER),
    ):
        for half, shape in (("A", (rank, inner)), ("B", (out, rank))):
            name = f"base_model.model.model.layers.0.{module}.lora_{half}.weight"
            tensors[name] = random.standard_normal(shape).astype(np.float32)
    save_file(tensors, folder / WEIGHTS_FILE)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return folder


def answer(server: Server, tenant: str, model: str) -> tuple[str, str, int]:
    """Model, text and cached tokens."""
    client: openai.OpenAI = server.client(tenant)
    made = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
    )
    assert made.usage is not None
    details = made.usage.prompt_tokens_details
    return made.model, made.choices[0].text, (details.cached_tokens or 0) if details is not None else 0


def test_a_tenants_own_adapter_from_file_to_answer(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    tiny_model.write(tmp_path / "model")
    write(tmp_path / "sql", 1)
    write(tmp_path / "law", 2)
    engine = {"blocks": 64, "threads": 1, "dtype": "float32", "adapters": [{"name": "sql", "source": "sql"}]}
    changes = {
        "models": [{"name": "tiny", "source": "model", "pools": [{"name": "local", "engine": engine}]}],
        "tenants": [{"id": "search"}, {"id": "assist", "models": ["tiny"], "adapters": {"tiny": "sql"}}],
    }
    with serving(tmp_path, changes) as server:
        server.wait_ready()
        base, sql = answer(server, "search", "tiny"), answer(server, "search", "sql")
        assert (base[0], sql[0]) == ("tiny", "sql")
        assert base[1] != sql[1]
        assert (base[2], sql[2]) == (0, 0), "nothing of the model's cache is an adapter's"
        assert answer(server, "assist", "tiny") == ("sql", sql[1], 0), "its own tenant's cache, and the adapter"
        assert answer(server, "search", "tiny:sql") == ("sql", sql[1], 32)
        assert answer(server, "search", "tiny") == ("tiny", base[1], 32)

        url = server.info["admin_url"] + "/admin/adapters"
        made = httpx.post(url, json={"model": "tiny", "name": "law", "source": "law"}, timeout=30)
        assert made.status_code == 201, made.text
        law = answer(server, "search", "law")
        assert len({base[1], sql[1], law[1]}) == 3
        (tmp_path / "law" / WEIGHTS_FILE).write_bytes(b"\x08")
        broken = httpx.post(url, json={"model": "tiny", "name": "law", "source": "law"}, timeout=30)
        assert broken.status_code == 400
        assert "not a readable safetensors file" in broken.json()["error"]["message"]
        assert answer(server, "search", "law") == ("law", law[1], 32)
        assert httpx.delete(f"{url}/law", timeout=30).status_code == 200
        refused = server.post({"model": "law", "messages": [{"role": "user", "content": "x"}]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert "'law'" in refused.json()["error"]["message"]
