"""Where the collector is: YAML and the standard ``OTEL_*`` variables resolved to one address. Imports no OpenTelemetry.

Both processes resolve here. The gateway hands its workers the result as ``OTEL_*`` variables (``worker_environment``),
so a worker started by hand needs nothing but these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

Protocol = Literal["grpc", "http/protobuf"]
_TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_TRACES_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"


@dataclass(frozen=True, slots=True)
class Target:
    """Where to export. ``endpoint`` is what the exporter takes: a full URL for http/protobuf, a base URL for grpc."""

    endpoint: str
    protocol: Protocol


def target(env: Mapping[str, str], endpoint: str | None = None, protocol: str | None = None) -> Target | None:
    """Resolve the collector: the given base URL and protocol win, ``OTEL_*`` in ``env`` fill what they leave open.

    None when there is no endpoint anywhere, or ``OTEL_SDK_DISABLED=true`` or ``OTEL_TRACES_EXPORTER=none`` says so and
    no endpoint was given. Raises ValueError for a protocol we do not speak or a URL that is none.
    """
    source = "telemetry.otlp_protocol"
    if protocol is None:
        for source in (_TRACES_PROTOCOL, "OTEL_EXPORTER_OTLP_PROTOCOL"):
            if protocol := env.get(source):
                break
        else:
            protocol = "grpc"
    if endpoint is None:
        off = env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        if off or env.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower() == "none":
            return None
        full = env.get(_TRACES_ENDPOINT)
        endpoint = full or env.get("OTEL_EXPORTER_OTLP_ENDPOINT")
        if not endpoint:
            return None
    else:
        full = None
    if protocol not in ("grpc", "http/protobuf"):
        raise ValueError(f"{source}: {protocol!r} is not supported; use grpc or http/protobuf")
    endpoint = url(endpoint)
    if protocol == "grpc":
        return Target(endpoint, "grpc")
    if full is None and not endpoint.rstrip("/").endswith("/v1/traces"):
        endpoint = f"{endpoint.rstrip('/')}/v1/traces"
    return Target(endpoint, "http/protobuf")


def url(endpoint: str) -> str:
    """``endpoint`` with its scheme. Raises ValueError for what is no http(s) URL with a host."""
    full = endpoint if "://" in endpoint else f"http://{endpoint}"
    try:
        parts = urlsplit(full)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port
        usable = False
    if not usable or any(character.isspace() for character in full):
        raise ValueError(f"the OTLP endpoint {endpoint!r} is no http(s) URL; write e.g. http://localhost:4317")
    return full


def worker_environment(where: Target | None) -> dict[str, str]:
    """What to add to a local worker's environment so that it exports to the same collector, or to none."""
    if where is None:
        return {"OTEL_TRACES_EXPORTER": "none"}
    return {
        _TRACES_ENDPOINT: where.endpoint,
        _TRACES_PROTOCOL: where.protocol,
        "OTEL_TRACES_EXPORTER": "otlp",
        "OTEL_SDK_DISABLED": "false",
        # An operator's OTEL_SERVICE_NAME names the gateway; without this the worker would inherit it.
        "OTEL_SERVICE_NAME": "forebay-worker",
    }
