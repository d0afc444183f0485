"""What ``make run`` prints: everything that a person needs next, and true."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import httpx
import yaml

from tests.arch.source import ROOT
from tests.e2e.harness import serving, until

DEMO = yaml.safe_load((ROOT / "config/demo.yaml").read_text())
ON_FREE_PORTS = {**DEMO, "listen": {**DEMO["listen"], "port": 0}, "admin": {**DEMO["admin"], "port": 0}}


def test_makefile_starts_the_demo_with_development_tokens() -> None:
    """Else the rest of this file is about something else."""
    makefile = (ROOT / "Makefile").read_text()
    assert "CONFIG ?= config/demo.yaml" in makefile
    assert re.search(r"^run: setup\n\t@exec \S+/forebay serve --dev \$\(CONFIG\)$", makefile, re.MULTILINE)


def test_the_banner_says_where_to_go_and_its_tokens_work(tmp_path: Path) -> None:
    """Base URL, console, a token per tenant, a curl to paste, where the traces are seen. One start for all of it."""
    fresh = {"FOREBAY_STATE": str(tmp_path / "state")}
    with serving(tmp_path, ON_FREE_PORTS, fresh, flags=["--dev"], jwt_key=None) as server:
        until(lambda: "http://127.0.0.1:16686" in server.log, "the whole banner")
        banner, url, admin_url = server.log, server.info["url"], server.info["admin_url"]
        assert f"Base URL   {url}/v1\n" in banner
        assert f"Console    {admin_url}/console\n" in banner
        assert f"Admin      {admin_url} " in banner
        assert "docker run --rm -p 16686:16686 -p 4317:4317 jaegertracing/jaeger" in banner
        assert "OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4317" in banner

        tokens = dict(re.findall(r"^    (\w+) +(eyJ\S+)$", banner, re.MULTILINE))
        assert list(tokens) == [tenant["id"] for tenant in DEMO["tenants"]]
        for token in tokens.values():
            models = httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {token}"}, timeout=30)
            assert [model["id"] for model in models.json()["data"]] == [DEMO["models"][0]["name"]]
        assert httpx.get(f"{admin_url}/console", follow_redirects=True, timeout=30).status_code == 200

        [command] = re.findall(r"^    (curl -s .*\\\n.*\\\n.*)$", banner, re.MULTILINE)
        curl, silent, target, *options = shlex.split(command.replace("\\\n", " "))
        assert (curl, silent, target) == ("curl", "-s", f"{url}/v1/chat/completions")
        assert options[0::2] == ["-H", "-H", "-d"]
        headers = dict(options[i].split(": ", 1) for i in (1, 3))
        assert headers["authorization"] == f"Bearer {next(iter(tokens.values()))}"
        server.wait_ready()
        answer = httpx.post(target, headers=headers, content=options[5], timeout=120)
        assert answer.status_code == 200, answer.text
        assert "Paris" in answer.json()["choices"][0]["message"]["content"]
        assert json.loads(options[5])["model"] == DEMO["models"][0]["name"]
