"""The running gateway: what goes wrong in the background is said, and tried again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway import service as module
from gateway.compose import build
from gateway.settings import Settings
from tests.gateway.harness import BASE, KEY, merged, until, write_model


@pytest.mark.parametrize(
    ("unforeseen", "why"), [(False, "eos_token_id={} must be an id or a list of ids"), (True, "TypeError")]
)
async def test_model_files_that_are_malformed_in_whatever_way_are_named_and_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unforeseen: bool, why: str
) -> None:
    """What is looked for is told as it is; what nobody foresaw, by its kind. No file is known that does."""
    write_model(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    good = config.read_text()
    config.write_text(json.dumps({**json.loads(good), "eos_token_id": {}}))
    monkeypatch.setattr(module, "FIRST_RETRY_S", 0.05)
    load = module.load_model

    async def load_model(*args: Any) -> None:
        try:
            await load(*args)
        except ValueError as error:
            raise (TypeError("unhashable type") if unforeseen else error) from None

    monkeypatch.setattr(module, "load_model", load_model)
    pools = [{"name": "p", "launch": {"use": "static", "addresses": [f"unix:{tmp_path}/nobody.sock"]}}]
    models = [{"name": "m", "source": "model", "pools": pools}]
    gateway = build(
        Settings.model_validate(merged(BASE, {"models": models})), base_dir=tmp_path, env={"FOREBAY_JWT_KEY": KEY}
    )
    errors: list[str] = []
    monkeypatch.setattr(module._log, "error", lambda event, **fields: errors.append(f"{event} {fields}"))
    try:
        await gateway.start()
        await until(lambda: errors, "the failure is logged")
        assert "model_not_loaded" in errors[0]
        assert why in errors[0]
        config.write_text(good)
        await until(lambda: gateway.parts.models.handle("m").loaded, "the mended files are read")
    finally:
        await gateway.stop()
