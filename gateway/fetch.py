"""The HTTP GET that policies are lent (a JWKS document, say): JSON, bounded in size and time, in a thread.

Only http and https, redirects within them and at most the library's ten; certificates are verified as the system does.
"""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any

TIMEOUT_S = 4.0
MAX_BYTES = 2**20


async def fetch_json(url: str) -> Any:
    """The parsed document. Raises OSError when it cannot be had, ValueError when it is no JSON or too large."""
    return await asyncio.to_thread(_get, url)


def _get(url: str) -> Any:
    if not url.startswith(("http://", "https://")):
        raise ValueError("only http and https URLs are fetched")
    request = urllib.request.Request(url, headers={"accept": "application/json", "user-agent": "forebay"})  # noqa: S310
    try:
        with _OPENER.open(request, timeout=TIMEOUT_S) as answer:
            body = answer.read(MAX_BYTES + 1)
    except urllib.error.HTTPError as error:
        with error:  # it holds the connection
            raise OSError(f"answered with status {error.code}") from None
    if len(body) > MAX_BYTES:
        raise ValueError(f"the document is larger than {MAX_BYTES} bytes")
    return json.loads(body)


_OPENER = urllib.request.OpenerDirector()
for _handler in (
    urllib.request.ProxyHandler(),
    urllib.request.HTTPHandler(),
    urllib.request.HTTPSHandler(),
    urllib.request.HTTPRedirectHandler(),
    urllib.request.HTTPErrorProcessor(),
    urllib.request.HTTPDefaultErrorHandler(),
):
    _OPENER.add_handler(_handler)
