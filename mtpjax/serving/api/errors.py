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
    """An error that becomes the response to a request.

    Args:
        message: one sentence for the client, without paths or long parts of the request.
        status: HTTP status code.
        param: the invalid field, such as "messages[0].content".
        code: a machine-readable code, such as "model_not_found".
        headers: further headers of the response.
        retry_after: seconds after which the client may try again.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})
        if retry_after is not None:
            self.headers["Retry-After"] = str(retry_after)

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        message = printable(str(self), MAX_MESSAGE_CHARACTERS)
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}


def queue_full() -> ApiError:
    return ApiError("the server has too many requests; try again later", status=429, code="queue_full", retry_after=1)


def server_busy() -> ApiError:
    """The request has waited too long for work on the host."""
    return ApiError("the server is busy; try again later", status=503, code="server_busy", retry_after=5)


def shutting_down() -> ApiError:
    return ApiError("the server is shutting down", status=503, code="shutting_down", retry_after=5)


def internal_error(error_id: str) -> ApiError:
    """A server fault. The log has the details under the same id."""
    return ApiError(f"internal error {error_id}", status=500, code="internal_error")


def engine_restarted(error: ApiError) -> ApiError:
    """An engine error ended the request; `error` is the one that was logged."""
    return ApiError(f"{error}: the engine restarted; try again", status=503, code="engine_restarted", retry_after=1)
