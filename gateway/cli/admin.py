"""The admin API as commands call it: one request, its JSON, and every failure as a message with a remedy."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from gateway.cli.output import UserError

TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class AdminClient:
    """Where the admin listener is, and the token it may want."""

    url: str
    token: str | None = None

    @classmethod
    def of(cls, url: str | None, config: str | None) -> AdminClient:
        """From ``--url``, else from a configuration's ``admin:`` section; the token from the variable that names."""
        from gateway.cli.loading import load_config

        admin = load_config(config).settings.admin
        token = os.environ.get(admin.token_env) if admin.token_env else None
        if url is None:
            if admin.port == 0:
                raise UserError("admin.port is 0, so only the gateway knows its port. Give --url.", code=2)
            host = f"[{admin.host}]" if ":" in admin.host else admin.host
            url = f"http://{host}:{admin.port}"
        elif not url.startswith(("http://", "https://")):
            raise UserError(f"--url: {url!r} is not an http:// or https:// address.", code=2)
        return cls(url.rstrip("/"), token)

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
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise UserError(_said(error)) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            remedy = "Is it running, and is this its admin URL?"
            raise UserError(f"No gateway answers at {self.url} ({reason}). {remedy}") from None


def _said(error: urllib.error.HTTPError) -> str:
    """The message of an error answer."""
    with error:
        try:
            return str(json.load(error)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return f"The gateway answered {error.code}."
