"""Errors of the HTTP API, and checks of JSON values that raise them.

Errors have OpenAI's form, `{"error": {"message", "type", "param", "code"}}`. A `Field` declares how a value is checked,
and its JSON schema.
"""

import dataclasses
import json
import logging
import math
import uuid
from collections.abc import Mapping
from typing import Any

from mtpjax.errors import printable
from mtpjax.safe_open import check_json_depth

MAX_MESSAGE_CHARACTERS = 400
MAX_INTEGER = 2**31 - 1  # counts and ids are int32 on the device
MAX_DEPTH = 64
MAX_NAME_CHARACTERS = 512

Body = Mapping[str, Any]
LOGGER = logging.getLogger(__name__)

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
        headers: additional response headers.
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


def require(condition: object, message: str, *, param: str | None = None, code: str | None = None) -> None:
    """Raises a 400 `ApiError` with the message unless the condition holds."""
    if not condition:
        raise ApiError(message, param=param, code=code)


def unsupported(message: str, param: str) -> ApiError:
    return ApiError(message, param=param, code="unsupported_option")


def server_busy() -> ApiError:
    return ApiError("the server is busy; try again later", status=503, code="server_busy", retry_after=5)


def shutting_down() -> ApiError:
    return ApiError("the server is shutting down", status=503, code="shutting_down", retry_after=5)


def out_of_memory(limit: int) -> ApiError:
    message = f"the request takes more than {limit >> 20} MiB of memory to read: send a shorter one"
    return ApiError(message, code="request_too_large")


def log_fault(error: BaseException | str) -> ApiError:
    """Logs a server fault under a new id, and returns an error for the client that contains only the id."""
    error_id = uuid.uuid4().hex
    LOGGER.error("internal error %s: %s", error_id, error, exc_info=error if isinstance(error, BaseException) else None)
    return ApiError(f"internal error {error_id}", status=500, code="internal_error")


@dataclasses.dataclass(frozen=True)
class Field:
    """An optional field; null means that it is not set.

    Attributes:
        kind: "integer", "number", "boolean" or "string".
        maximum: maximum value; for a string, the maximum length in characters.
        is_above: whether the value must be above `minimum`, so that `minimum` itself is not allowed.
    """

    kind: str
    default: Any = None
    minimum: float = 0
    maximum: float = MAX_INTEGER
    is_above: bool = False

    def read(self, body: Body, name: str, prefix: str = "") -> Any:
        """Returns a field's checked value, or raises ApiError. In messages, `prefix` precedes the field's name."""
        value = body.get(name)
        return self.default if value is None else self.check(value, prefix + name)

    def check(self, value: Any, param: str) -> Any:
        """Returns the value, converted to this kind. Raises an ApiError that names `param`."""
        if self.kind == "string":
            return check_text(value, param, int(self.maximum))
        if self.kind == "boolean":
            require(isinstance(value, bool), f"{param} must be true or false", param=param)
            return value
        number = check_integer(value, param) if self.kind == "integer" else _check_number(value, param)
        if not (self.minimum < number if self.is_above else self.minimum <= number) or number > self.maximum:
            above = "above" if self.is_above else "at least"
            limits = f"{above} {self.minimum} and at most {self.maximum}"
            raise ApiError(f"{param} must be {limits}, got {short(value)}", param=param)
        return number

    @property
    def schema(self) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": [self.kind, "null"]}
        if self.default is not None:
            schema["default"] = self.default
        if self.kind == "string":
            schema["maxLength"] = self.maximum
        elif self.kind != "boolean":
            schema["exclusiveMinimum" if self.is_above else "minimum"] = self.minimum
            schema["maximum"] = self.maximum
        return schema


NAME = Field("string", maximum=MAX_NAME_CHARACTERS)
FLAG = Field("boolean", default=False)


def parse_body(raw: bytes) -> dict[str, Any]:
    """Parses a body into a JSON object, without NaN, Infinity or numbers above float64's range. Raises ApiError."""
    try:
        check_json_depth(raw, MAX_DEPTH)
        text = raw.decode("utf-8-sig")
        body = json.loads(text, parse_constant=_reject_constant, parse_float=_finite_float)
    except UnicodeDecodeError as error:
        raise ApiError(f"the body is not UTF-8 text at byte {error.start}", code="invalid_json") from error
    except json.JSONDecodeError as error:
        raise ApiError(f"the body is not JSON: {error.msg} at character {error.pos}", code="invalid_json") from error
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not valid JSON: {printable(error, 100)}", code="invalid_json") from error
    require(isinstance(body, dict), "the body must be a JSON object", code="invalid_json")
    return body


def read_fields(fields: Mapping[str, Field], body: Body, prefix: str = "") -> dict[str, Any]:
    return {name: field.read(body, name, prefix) for name, field in fields.items()}


def check_text(value: Any, param: str, max_characters: int) -> str:
    """Returns the value if it is a string that UTF-8 can encode. Raises ApiError otherwise."""
    require(isinstance(value, str), f"{param} must be a string", param=param)
    if len(value) > max_characters:
        raise ApiError(f"{param} has {len(value)} characters; at most {max_characters} are allowed", param=param)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ApiError(f"{param} contains a lone surrogate at character {error.start}", param=param) from error
    return value


def check_integer(value: Any, param: str) -> int:
    """Returns the value as an integer. Accepts 5.0, because JavaScript clients send it, but not true or "5"."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ApiError(f"{param} must be an integer, got {short(value)}", param=param)
    return value


def check_list(value: Any, param: str, max_items: int) -> list[Any]:
    require(isinstance(value, list), f"{param} must be a list", param=param)
    require(len(value) <= max_items, f"{param} has {len(value)} entries; at most {max_items} are allowed", param=param)
    return value


def check_tokens(values: list[Any], param: str, vocab_size: int) -> list[int]:
    # A body may contain millions of tokens, so the usual case takes only a few passes in C.
    if values and set(map(type, values)) == {int} and min(values) >= 0 and max(values) < vocab_size:
        return values
    return [check_token(value, param, vocab_size) for value in values]


def check_token(value: Any, param: str, vocab_size: int) -> int:
    is_integer = type(value) is int or (type(value) is float and value.is_integer())
    if not (is_integer and 0 <= value < vocab_size):
        message = f"{param} must contain token ids in 0..{vocab_size - 1}, got {short(value)}"
        raise ApiError(message, param=param, code="out_of_vocabulary")
    return int(value)


def short(value: Any) -> str:
    """Describes a value in a message. Shows only the type unless it is a number, because requests are confidential."""
    if isinstance(value, int | float):
        # Formatting a number with thousands of digits would be slow.
        return str(value) if abs(value) < 10**18 else "a number beyond 10^18"
    kinds = {str: "a string", list: "a list", dict: "an object", type(None): "null"}
    return kinds.get(type(value), "a value of a different type")


def _check_number(value: Any, param: str) -> float:
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.nan
    require(math.isfinite(number), f"{param} must be a finite number, got {short(value)}", param=param)
    return number


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number does not fit into float64")
    return number
