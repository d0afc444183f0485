"""The admin API as commands call it: one request, its JSON, and every failure as a message with a remedy."""

from __future__ import annotations

import contextlib
import json
import os
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.cli.output import UserError

TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class AdminClient:
    """Where the admin listener is, and the token it may want."""

    url: str
    token: str | None = None
    certificate: Path | None = None
    """The listener's own, to be trusted besides the system's authorities."""

    @classmethod
    def of(cls, url: str | None, config: str | None) -> AdminClient:
        """From ``--url``, else from a configuration's ``admin:`` section; the token from the variable that names."""
        from gateway.cli.loading import load_config

        loaded = load_config(config)
        admin = loaded.settings.admin
        certificate = loaded.base_dir / Path(admin.tls.cert).expanduser() if admin.tls is not None else None
        token = os.environ.get(admin.token_env) if admin.token_env else None
        if url is None:
            if admin.port == 0:
                raise UserError("admin.port is 0, so only the gateway knows its port. Give --url.", code=2)
            host = f"[{admin.host}]" if ":" in admin.host else admin.host
            url = f"{'http' if admin.tls is None else 'https'}://{host}:{admin.port}"
        elif not url.startswith(("http://", "https://")):
            raise UserError(f"--url: {url!r} is not an http:// or https:// address.", code=2)
        return cls(url.rstrip("/"), token, certificate)

    def get(self, path: str) -> Any:
        """GET; the parsed answer. Raises UserError as ``post`` does."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: Any) -> Any:
        """POST JSON; the parsed answer. Raises UserError with what the gateway says, or why it cannot be reached."""
        return self._ask("POST", path, json.dumps(body).encode())

    def delete(self, path: str) -> Any:
        """DELETE; the parsed answer. Raises UserError as ``post`` does."""
        return self._ask("DELETE", path, None)

    def _ask(self, method: str, path: str, body: bytes | None) -> Any:
        headers = {} if body is None else {"content-type": "application/json"}
        if self.token:
            headers["authorization"] = f"Bearer {self.token}"
        request = urllib.request.Request(self.url + path, body, headers, method=method)  # noqa: S310 - checked above
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=self._tls()) as answer:  # noqa: S310
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise UserError(_said(error)) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            remedy = "Is it running, and is this its admin URL?"
            raise UserError(f"No gateway answers at {self.url} ({reason}). {remedy}") from None

    def _tls(self) -> ssl.SSLContext | None:
        if not self.url.startswith("https://"):
            return None
        context = ssl.create_default_context()
        if self.certificate is not None:
            with contextlib.suppress(OSError):  # not this machine's: the system's authorities have to do
                context.load_verify_locations(self.certificate)
        return context


def _said(error: urllib.error.HTTPError) -> str:
    """The message of an error answer."""
    with error:
        try:
            return str(json.load(error)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return f"The gateway answered {error.code}."
