"""HTTP below the routes: keys, bodies with limits, clients that disconnect, event streams, and errors."""

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import json
import time
import urllib.parse
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mtpjax.serving.api.errors import ApiError, log_fault, queue_full
from mtpjax.serving.api.settings import ApiSettings
from mtpjax.serving.request import QueueFull

PART_BYTES = 1 << 16  # of a body that is kept in parts
CHECKS_PER_TIMEOUT = 4  # of a stream's writes
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
T = TypeVar("T")


class FramingCheck:
    """Rejects requests with an ambiguous end with 400: a proxy may read the same bytes as a different request."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope["headers"]} if scope["type"] == "http" else set()
        if {b"content-length", b"transfer-encoding"} <= names:
            message = "a request must not have both Content-Length and Transfer-Encoding"
            error = ApiError(message, code="ambiguous_length", headers={"Connection": "close"})
            return await error_response(error)(scope, receive, send)
        await self._app(scope, receive, send)


class FaultHandler:
    """Converts an unexpected exception to a 500 response and keeps the connection.

    A handler of `Exception` would not: Starlette raises the exception again after its response, and uvicorn then closes
    the connection, which may already carry the client's next request.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def send_on(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        except Exception as error:
            # A response that has started cannot be completed, so the connection ends.
            if has_begun or scope["type"] != "http":
                raise
            await error_response(log_fault(error))(scope, receive, send)


class KeyCheck:
    """Rejects requests without a valid key with 401, before anything else reads them."""

    def __init__(self, app: ASGIApp, settings: ApiSettings):
        self._app, self._open_paths = app, settings.open_paths
        self._digests, self._admin_digests = (
            [hashlib.sha256(key.encode()).digest() for key in keys]
            for keys in (settings.api_keys, settings.admin_api_keys)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not (self._digests or self._admin_digests):
            return await self._app(scope, receive, send)
        digest = _bearer_digest(scope)
        # Compare with every key, so that the time reveals nothing about any of them.
        is_user, is_admin = (
            sum(hmac.compare_digest(digest, known) for known in digests) > 0
            for digests in (self._digests, self._admin_digests)
        )
        is_known = is_user or is_admin
        if self._digests and not is_known and scope["path"] not in self._open_paths:
            return await error_response(_invalid_key("API key"))(scope, receive, send)
        scope["has_key"], scope["is_admin"] = is_known, is_admin
        # Clients with different keys must not share prompts in the prefix cache.
        scope["prefix_salt"] = digest if is_known else b""
        await self._app(scope, receive, send)


def check_admin(request: Request, settings: ApiSettings) -> None:
    """Raises ApiError if there are admin keys and the request has none: 403 with an ordinary key, else 401."""
    if not settings.admin_api_keys or request.scope["is_admin"]:
        return
    if not request.scope["has_key"]:
        raise _invalid_key("admin API key")
    raise ApiError("this request needs the admin API key", status=403, code="admin_api_key_needed")


def check_origin(request: Request) -> None:
    """Rejects requests from web pages of other sites, for routes without a body, which browsers allow.

    A page of another site can use a host name that resolves to this machine, so a page without a key passes only if its
    origin is this server by IP address or as localhost. Raises ApiError with 403.
    """
    origin = request.headers.get("origin")
    if origin is None or request.scope.get("has_key"):
        return
    own = urllib.parse.urlsplit(f"//{request.headers.get('host', '')}")
    if urllib.parse.urlsplit(origin).netloc != own.netloc or not _is_address(own.hostname or ""):
        raise ApiError("requests from web pages of other sites are not allowed", status=403, code="other_origin")


def _is_address(host: str) -> bool:
    try:
        return host == "localhost" or bool(ipaddress.ip_address(host))
    except ValueError:
        return False


def _invalid_key(kind: str) -> ApiError:
    message = f"a valid {kind} is needed: Authorization: Bearer KEY"
    return ApiError(message, status=401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _bearer_digest(scope: Scope) -> bytes:
    """Returns the digest of a request's key, or b"" if it gives none or several."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    scheme, _, key = values[0].strip().partition(b" ") if len(values) == 1 else (b"", b"", b"")
    return hashlib.sha256(key.strip()).digest() if scheme.lower() == b"bearer" and key.strip() else b""


async def read_json(request: Request, settings: ApiSettings) -> list[bytes]:
    """Reads the bytes of a JSON body in parts, without parsing them. Raises ApiError, as `read_parts` does."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        message = f"the body has Content-Encoding {encoding[:32]}: send it uncompressed"
        headers = {"Accept-Encoding": "identity"}
        raise ApiError(message, status=415, param=None, code="unsupported_content_encoding", headers=headers)
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        message = "the body must be JSON, with Content-Type: application/json"
        raise ApiError(message, status=415, code="unsupported_media_type")
    return await read_parts(request, settings.max_body_bytes, settings.body_timeout)


async def read_bytes(request: Request, max_bytes: int, seconds: float) -> bytes:
    return b"".join(await read_parts(request, max_bytes, seconds))


async def read_parts(request: Request, max_bytes: int, seconds: float) -> list[bytes]:
    """Reads a body in parts of at least `PART_BYTES`, because copying a large body would block the event loop.

    Raises:
        ApiError: the body exceeds `max_bytes` or `seconds`, or the client disconnects.
    """
    try:
        async with asyncio.timeout(seconds):
            return await _read_body(request, max_bytes)
    except TimeoutError as error:
        message = f"the body did not arrive within {seconds:g} seconds"
        raise ApiError(message, status=408, code="body_timeout", headers={"Connection": "close"}) from error
    except ClientDisconnect as error:
        raise ApiError("the client left") from error


async def _read_body(request: Request, max_bytes: int) -> list[bytes]:
    too_large = ApiError(f"the body has more than {max_bytes} bytes", status=413, code="body_too_large")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 15 or int(length) > max_bytes):
        raise too_large
    # A chunked body has no length: count. Its chunks may be of one byte each, and are then joined.
    parts: list[bytes] = []
    tail, num_bytes = bytearray(), 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise too_large
        tail += chunk
        if len(tail) >= PART_BYTES:
            parts.append(bytes(tail))
            tail.clear()
    return [*parts, bytes(tail)]


async def run_while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine until it ends. Cancels it and raises ApiError if the client disconnects first."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError("the client left")
        return task.result()
    finally:
        await _cancel(task, watcher)


class EventStream(Response):
    """Server-sent events. Closes the generator when the client disconnects or stops reading.

    Args:
        events: JSON values, or texts that are sent unchanged.
        write_timeout: seconds that one event may wait for the client to read.
        on_close: called at the end, even if the client disconnects before the first event.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[Any, None], *, write_timeout: float, on_close: Callable[[], None]):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._write_timeout, self._on_close = events, write_timeout, on_close
        self._write_began: float | None = None  # time at which the event that is being written began

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.ensure_future(self._write(send))
        watcher = asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            # A timer per event would cost more than the event, so look from time to time.
            while not (writer.done() or watcher.done() or self._is_late()):
                tasks, interval = {writer, watcher}, self._write_timeout / CHECKS_PER_TIMEOUT
                await asyncio.wait(tasks, timeout=interval, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
        finally:
            self._on_close()
            await _cancel(writer, watcher)
            await self._events.aclose()

    def _is_late(self) -> bool:
        began = self._write_began
        return began is not None and time.monotonic() - began > self._write_timeout

    async def _write(self, send: Send) -> None:
        async def write(body: bytes, *, more_body: bool) -> None:
            self._write_began = time.monotonic()
            await send({"type": "http.response.body", "body": body, "more_body": more_body})
            self._write_began = None

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        with contextlib.suppress(OSError):  # the client left
            is_open = True
            while is_open:
                try:
                    event = await anext(self._events)
                except StopAsyncIteration:
                    break
                # An error during a stream becomes the last event, because the status has already been sent.
                except ApiError as error:
                    event, is_open = error.body, False
                except Exception as error:
                    event, is_open = log_fault(error).body, False
                text = event if isinstance(event, str) else to_json(event)
                await write(f"data: {text}\n\n".encode(), more_body=True)
            await write(b"", more_body=False)


async def error_handler(request: Request, error: Exception) -> Response:
    """Converts an exception that a route raises on purpose."""
    if isinstance(error, ApiError):
        return error_response(error)
    if isinstance(error, QueueFull):
        return error_response(queue_full())
    if isinstance(error, HTTPException):
        known = {
            404: ("the path does not exist", "not_found"),
            405: ("the path does not support this method", "method_not_allowed"),
        }
        message, code = known.get(error.status_code, (str(error.detail), None))
        headers = dict(error.headers or {})
        return error_response(ApiError(message, status=error.status_code, code=code, headers=headers))
    raise error


def error_response(error: ApiError) -> Response:
    return JSONResponse(error.body, status_code=error.status, headers=error.headers)


def to_json(value: Any) -> str:
    """Returns compact JSON. NaN raises ValueError."""
    return _ENCODER.encode(value)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
