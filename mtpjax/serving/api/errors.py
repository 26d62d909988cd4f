"""Errors of the HTTP API, in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`."""

from typing import Any

from mtpjax.errors import printable

MAX_MESSAGE_CHARACTERS = 400

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """An error that answers a request.

    Args:
        message: one sentence for the client, without paths or long parts of the request.
        status: HTTP status code.
        param: the invalid field, such as "messages[0].content".
        code: a machine-readable code, such as "model_not_found".
        headers: further headers of the response.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers or {}

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        message = printable(str(self), MAX_MESSAGE_CHARACTERS)
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}


def queue_full() -> ApiError:
    message = "the server has too many requests; try again later"
    return ApiError(message, status=429, code="queue_full", headers={"Retry-After": "1"})


def server_busy() -> ApiError:
    """The request has waited too long for work on the host."""
    message = "the server is busy; try again later"
    return ApiError(message, status=503, code="server_busy", headers={"Retry-After": "5"})


def shutting_down() -> ApiError:
    message = "the server is shutting down"
    return ApiError(message, status=503, code="shutting_down", headers={"Retry-After": "5"})


def internal_error(error_id: str) -> ApiError:
    """A server fault. The log has the details under the same id."""
    return ApiError(f"internal error {error_id}", status=500, code="internal_error")


def engine_restarted(error: ApiError) -> ApiError:
    """A fault of the engine ended the request; `error` is the one that was logged."""
    message = f"{error}: the engine had to start anew; try again"
    return ApiError(message, status=503, code="engine_restarted", headers={"Retry-After": "1"})
