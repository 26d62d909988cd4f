"""The HTTP layer below the routes, with API keys, body limits, disconnects, event streams and error responses."""

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import json
import time
import urllib.parse
from collections.abc import AsyncGenerator, Callable, Coroutine, Hashable
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mtpjax.serving.api.errors import ApiError, log_fault, require
from mtpjax.serving.api.settings import ApiSettings
from mtpjax.serving.request import QueueFull

PART_BYTES = 1 << 16  # minimum size of the parts in which a body is kept
CHECKS_PER_TIMEOUT = 4  # number of checks of a stream's write within its timeout
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
T = TypeVar("T")


class RequestGuard:
    """Middleware that checks framing and keys for all routes, and converts unexpected exceptions to 500 responses.

    - Requests with an ambiguous length get 400, because a proxy may read the same bytes as a different request.
    - Requests without a valid key get 401, before anything else reads them.
    - After an exception, the connection stays open. A handler for `Exception` would close it, because Starlette raises
      the exception again after its response, and uvicorn then closes the connection, which may already carry the
      client's next request.
    """

    def __init__(self, app: ASGIApp, settings: ApiSettings):
        self._app, self._open_paths = app, settings.open_paths
        digests = lambda keys: [hashlib.sha256(key.encode()).digest() for key in keys]
        self._digests, self._admin_digests = digests(settings.api_keys), digests(settings.admin_api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        has_started = False

        async def send_on(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            rejection = self._check(scope)
            await (self._app if rejection is None else error_response(rejection))(scope, receive, send_on)
        except Exception as error:
            # A response that has started cannot be completed, so the connection ends.
            if has_started:
                raise
            await error_response(log_fault(error))(scope, receive, send)

    def _check(self, scope: Scope) -> ApiError | None:
        """Returns the error if a request is rejected, else None. Adds the client's key and rights to the scope."""
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
            message = "a request must not have both Content-Length and Transfer-Encoding"
            return ApiError(message, code="ambiguous_length", headers={"Connection": "close"})
        if not (self._digests or self._admin_digests):
            return None
        digest = _bearer_digest(scope)
        # Compare with every key, so that the response time reveals nothing about any key.
        is_one_of = lambda digests: sum(hmac.compare_digest(digest, known) for known in digests) > 0
        is_user, is_admin = is_one_of(self._digests), is_one_of(self._admin_digests)
        is_known = is_user or is_admin
        if self._digests and not is_known and scope["path"] not in self._open_paths:
            return _invalid_key("API key")
        scope["has_key"], scope["is_admin"] = is_known, is_admin
        # Clients with different keys must not share prompts in the prefix cache.
        scope["prefix_salt"] = digest if is_known else b""
        return None


def owner_of(request: Request) -> bytes:
    """Returns a digest of the client's key; b"" without a key."""
    return request.scope.get("prefix_salt", b"")


def client_of(request: Request) -> Hashable:
    """Identifies the client for fair scheduling by its key, or by its address if it sends no key."""
    return owner_of(request) or (request.client and request.client.host)


def check_admin(request: Request, settings: ApiSettings) -> None:
    """Raises ApiError if the server has admin keys and the request sends none (403 with an ordinary key, else 401)."""
    if not settings.admin_api_keys or request.scope["is_admin"]:
        return
    if not request.scope["has_key"]:
        raise _invalid_key("admin API key")
    raise ApiError("this request needs the admin API key", status=403, code="admin_api_key_needed")


def check_origin(request: Request) -> None:
    """Rejects requests from other sites' web pages to routes without a body; on other routes, browsers do so.

    A different site can use a host name that resolves to this machine, so a page without a key passes only if its
    origin names this server by IP address or as localhost. Raises ApiError with 403.
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
    """Returns the digest of a request's key, or b"" if it sends no key or several."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    scheme, _, key = values[0].strip().partition(b" ") if len(values) == 1 else (b"", b"", b"")
    return hashlib.sha256(key.strip()).digest() if scheme.lower() == b"bearer" and key.strip() else b""


async def read_json(request: Request, settings: ApiSettings) -> list[bytes]:
    """Reads the bytes of a JSON body in parts, without parsing them. Raises ApiError, as `read_parts` does."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        error = f"the body has Content-Encoding {encoding[:32]}: send it uncompressed"
        headers = {"Accept-Encoding": "identity"}
        raise ApiError(error, status=415, code="unsupported_content_encoding", headers=headers)
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
    too_large = ApiError(f"the body has more than {max_bytes} bytes", status=413, code="body_too_large")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 15 or int(length) > max_bytes):
        raise too_large
    # A chunked body does not declare its length, so count its bytes. Its chunks may be tiny, so join them.
    parts: list[bytes] = []
    tail, num_bytes = bytearray(), 0
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                num_bytes += len(chunk)
                if num_bytes > max_bytes:
                    raise too_large
                tail += chunk
                if len(tail) >= PART_BYTES:
                    parts.append(bytes(tail))
                    tail.clear()
    except TimeoutError as error:
        message = f"the body did not arrive within {seconds:g} seconds"
        raise ApiError(message, status=408, code="body_timeout", headers={"Connection": "close"}) from error
    except ClientDisconnect as error:
        raise ApiError("the client disconnected") from error
    return [*parts, bytes(tail)]


async def run_while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine until it ends. Cancels it and raises ApiError if the client disconnects first."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        require(task.done(), "the client disconnected")
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
        self._write_started: float | None = None  # when the write of the current event started

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.ensure_future(self._write(send))
        watcher = asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            # A timer per event would cost more than the event, so check at intervals.
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
        started = self._write_started
        return started is not None and time.monotonic() - started > self._write_timeout

    async def _write(self, send: Send) -> None:
        async def write(body: bytes, *, more_body: bool) -> None:
            self._write_started = time.monotonic()
            await send({"type": "http.response.body", "body": body, "more_body": more_body})
            self._write_started = None

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        with contextlib.suppress(OSError):  # the client disconnected
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
    """Converts an exception that a route raises on purpose into a response."""
    if isinstance(error, ApiError):
        return error_response(error)
    if isinstance(error, QueueFull):
        message = "the server has too many requests; try again later"
        return error_response(ApiError(message, status=429, code="queue_full", retry_after=1))
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
