"""What a caller may be told: one exception per refusal, with status, OpenAI error body and Retry-After.

Messages name the field, the value's shape and the remedy; never prompt text, credentials, paths or class names.
"""

from __future__ import annotations

import math
from typing import Any, Literal

Outcome = Literal["ok", "cancelled", "throttled", "shed", "timeout", "error"]


class ApiError(Exception):
    """Ends a request with a status and an OpenAI-style body.

    ``outcome`` is the request's ``forebay.outcome``; ``reason`` its machine-readable cause
    (``forebay.shed.reason`` and the label of ``forebay_shed_total``).
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str,  # noqa: A002 - the API's word
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        outcome: Outcome = "error",
        reason: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.outcome: Outcome = outcome
        self.reason = reason or code

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """``retry-after`` in whole seconds, rounded up so that a caller who waits so long passes; a 401's scheme."""
        headers = {"www-authenticate": "Bearer"} if self.status == 401 else {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        return headers


def bad_request(message: str, param: str | None = None, code: str = "invalid_request", status: int = 400) -> ApiError:
    """400 (or 422): the request itself is wrong; the same request will never pass."""
    return ApiError(status, message, type="invalid_request_error", code=code, param=param)


def unauthenticated() -> ApiError:
    """401, always with the same body: which check failed is nobody's business."""
    return ApiError(
        401,
        "Missing or invalid credential. Send 'Authorization: Bearer <token>'.",
        type="authentication_error",
        code="invalid_credential",
    )


def forbidden(message: str, code: str = "forbidden", param: str | None = None) -> ApiError:
    """403: verified, but not allowed."""
    return ApiError(403, message, type="permission_error", code=code, param=param)


def model_not_found(model: str) -> ApiError:
    """404 with the model's name, shortened."""
    return ApiError(
        404,
        f"The model {model[:128]!r} does not exist or you have no access to it. GET /v1/models lists yours.",
        type="invalid_request_error",
        code="model_not_found",
        param="model",
    )


def adapter_not_found(adapter: str, model: str) -> ApiError:
    """404: what the operator set for this tenant is not loaded (any more)."""
    return ApiError(
        404,
        f"The adapter {adapter[:128]!r}, with which your requests to the model {model[:128]!r} run, is not loaded.",
        type="invalid_request_error",
        code="adapter_not_found",
        param="model",
    )


def too_large(limit: int) -> ApiError:
    """413 before anything is parsed."""
    return ApiError(
        413, f"The request body is larger than {limit} bytes.", type="invalid_request_error", code="body_too_large"
    )


def throttled(message: str, code: str, retry_after_s: float | None) -> ApiError:
    """429: this tenant is over one of its own limits."""
    return ApiError(
        429, message, type="rate_limit_error", code=code, retry_after_s=retry_after_s or 1.0, outcome="throttled"
    )


def shed(message: str, reason: str, retry_after_s: float | None) -> ApiError:
    """429: healthy workers, but its queue is full or its wait ran out."""
    return ApiError(
        429, message, type="rate_limit_error", code=reason, retry_after_s=retry_after_s or 1.0, outcome="shed"
    )


def waited_out(retry_after_s: float | None) -> ApiError:
    """429: it waited as long as its class allows, beside healthy workers."""
    message = "The request waited in the queue as long as its service class allows. Retry later."
    return shed(message, "queue_timeout", retry_after_s)


def unavailable(message: str, code: str, retry_after_s: float = 1.0) -> ApiError:
    """503: no worker, or a dependency is down."""
    return ApiError(503, message, type="service_unavailable", code=code, retry_after_s=retry_after_s)


def timed_out(message: str, code: str) -> ApiError:
    """504: it ran longer than ``timeouts`` allow."""
    return ApiError(504, message, type="timeout_error", code=code, retry_after_s=1.0, outcome="timeout")


def slow_reader(message: str) -> ApiError:
    """The caller does not take its stream. Only ever told in-band: the answer has begun."""
    return ApiError(408, message, type="timeout_error", code="slow_reader", outcome="cancelled", reason="slow_reader")


def internal() -> ApiError:
    """500 without detail; the log has the request id."""
    return ApiError(
        500, "Internal error. Quote the x-request-id to your operator.", type="server_error", code="internal"
    )


def shutting_down() -> ApiError:
    """503: this gateway is going away."""
    return unavailable("The gateway is shutting down. Retry against another one.", "shutting_down")


def revoked() -> ApiError:
    """403: the operator ended it. Not a 5xx, or clients would send it again by themselves."""
    return ApiError(
        403,
        "The operator ended this request.",
        type="permission_error",
        code="cancelled_by_operator",
        outcome="cancelled",
    )


def no_worker(model: str) -> ApiError:
    """503: nobody is there to run it."""
    return unavailable(f"No worker of the model {model[:128]!r} is ready.", "no_worker", retry_after_s=5.0)
