"""The ``with:`` block of ``launch: {use: openai_upstream}``. All times are seconds."""

from __future__ import annotations

import re
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from policies.spi import PolicyConfig

_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_OURS = frozenset(
    {
        # made here
        "authorization", "accept", "content-type", "content-length", "host", "traceparent", "tracestate",
        # credentials: they come from the environment (``api_key_env``), never from the file
        "api-key", "x-api-key", "x-goog-api-key", "cookie",
        # hop by hop
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade", "expect",
    }
)  # fmt: skip
_OWN_FIELDS = frozenset({"model", "messages", "prompt", "input", "stream", "stream_options", "n", "cache_salt"})


class UpstreamConfig(PolicyConfig):
    """One server."""

    url: str
    """Its base URL, e.g. ``https://api.example.com/v1``; ``/chat/completions`` and the like are added."""
    model: str | None = Field(None, min_length=1, max_length=256)
    """What it calls the model; null: as here."""
    api_key_env: str | None = None
    """Variable with the key it wants; sent as ``Authorization: Bearer``."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Sent with every request; for what is no secret (an organisation, a project)."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Fields added to every request body; they win over what the caller asked for."""
    endpoints: tuple[Literal["chat", "completions", "embeddings"], ...] = Field(("chat", "completions"), min_length=1)
    """What it offers."""
    max_running: int = Field(64, ge=1, le=65536)
    """Most choices that run there at once; what is beyond waits in the gateway, in the scheduler's order."""
    max_context: int = Field(32768, ge=1)
    """Longest prompt and output in tokens."""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """Under which name it takes the output limit in a chat."""
    connect_s: float = Field(5.0, gt=0)
    """Until the connection stands, TLS included."""
    first_token_s: float = Field(60.0, gt=0)
    """From then on until the first output."""
    between_chunks_s: float = Field(30.0, gt=0)
    """Between two pieces of output."""
    keepalive_s: float = Field(4.0, ge=0)
    """How long an idle connection is kept; below the server's own limit (often 5)."""
    usage: bool = True
    """Ask for the figures at the end of a stream. false: for servers that refuse ``stream_options``; output is then
    counted by pieces, the prompt as the gateway did."""
    cache_salt: bool = False
    """Send the request's cache scope as ``cache_salt`` (vLLM, SGLang): nobody else's cached prefixes are hit there."""
    forward_trace: bool = False
    """Send ``traceparent``, for a server whose spans go to the same collector."""
    probe: bool = True
    """Ready only when ``GET /models`` answers; false: at once."""
    ca_file: str | None = None
    """Certificates to trust for ``https``, instead of the system's; a path (absolute, or from the process's folder)."""

    @field_validator("url")
    @classmethod
    def _base_url(cls, value: str) -> str:
        try:
            parts = urlsplit(value)
            port_ok = parts.port is None or parts.port > 0
        except ValueError as error:
            raise ValueError(f"is no URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or not port_ok:
            raise ValueError("must be an http:// or https:// URL, e.g. http://10.0.0.5:8000/v1")
        if parts.username or parts.password:
            raise ValueError("holds a credential; put the key into a variable and name it in api_key_env")
        if parts.query or parts.fragment:
            raise ValueError("must end with a path; leave out what follows ? or #")
        return value.rstrip("/")

    @field_validator("headers")
    @classmethod
    def _plain_headers(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if not _HEADER.fullmatch(name) or not text.isascii() or not (text == "" or text.isprintable()):
                raise ValueError(f"{name!r} is no header: names are tokens, values are printable ASCII")
            if name.lower() in _OURS:
                raise ValueError(f"{name!r} cannot be set: it is made here, a credential (api_key_env), or hop-by-hop")
        return value

    @field_validator("extra_body")
    @classmethod
    def _no_own_fields(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(_OWN_FIELDS & value.keys()):
            raise ValueError(f"{taken[0]!r} cannot be set: it is the request's own")
        return value
