"""Any OpenAI-compatible server as a worker: ``launch: {use: openai_upstream, with: {url: …}}``.

config.py    the ``with:`` block
launcher.py  starts workers: one socket of ours and one ``Upstream`` each, inside the gateway's process
worker.py    speaks the worker protocol: Generate, Cancel, Purge in; Hello and outputs back
call.py      one request at the server: what comes back, and how it may end
http.py      connections: timeouts by phase, stale sockets, headers
sse.py       bytes of a stream → events
answer.py    the server's JSON → text, ends and figures
refusals.py  what a server means that will not run a request
"""

from __future__ import annotations

from forebay_openai_upstream.config import UpstreamConfig
from policies.spi import LauncherSpec, hookimpl


@hookimpl
def forebay_launchers() -> list[LauncherSpec]:
    """The launcher ``openai_upstream``."""
    return [
        LauncherSpec(
            "openai_upstream",
            "forebay_openai_upstream.launcher:UpstreamLauncher",
            "Any OpenAI-compatible server: vLLM, SGLang, TGI, llama-server, a provider.",
            config=UpstreamConfig,
            upstream=True,
        )
    ]
