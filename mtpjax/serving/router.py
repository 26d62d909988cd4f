"""A streaming ASGI proxy that sends each request to the decode server with the fewest running requests."""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import logging
import time
from collections.abc import Sequence

import httpx
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from mtpjax.host import keepalive_options
from mtpjax.serving.api.errors import ApiError
from mtpjax.serving.api.http import error_response, read_bytes, run_while_connected, to_json

MAX_BODY_BYTES = 32 << 20
BODY_SECONDS = 30.0
CONNECT_SECONDS = 2.0
PREFIX_CHARACTERS = 256  # length of the prompt's prefix that decides between equally busy servers
PROMPT_FIELDS = ("messages", "prompt", "text", "input_ids")
# Headers that apply to one connection only, which a proxy does not forward (RFC 9110, 7.6.1).
HOP_HEADERS = frozenset(
    b"connection expect host keep-alive proxy-authenticate proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)
_log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class Upstream:
    """A decode server.

    Attributes:
        num_running: requests that this router has sent and that have not ended.
        is_ready: whether the last check or the last connection succeeded.
    """

    url: httpx.URL
    num_running: int = 0
    is_ready: bool = True


class Router:
    """The ASGI application. It answers `/health` itself, and forwards all other requests to a decode server.

    Raises:
        ValueError: an address is not the URL of an HTTP server, or no address is given.
    """

    def __init__(self, urls: Sequence[str], *, check_seconds: float = 1.0):
        self.upstreams = [Upstream(_check_url(url)) for url in urls]
        if not self.upstreams:
            raise ValueError("a router needs the address of at least one server")
        self._check_seconds = check_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._live(receive, send)
        if scope["type"] != "http":
            raise RuntimeError(f"the router forwards HTTP, not {scope['type']}")
        if scope["path"] == "/health":
            is_ready = any(upstream.is_ready for upstream in self.upstreams)
            return await (Response() if is_ready else error_response(_no_server()))(scope, receive, send)
        try:
            request = Request(scope, receive)
            body = await read_bytes(request, MAX_BODY_BYTES, BODY_SECONDS)
            # If the client disconnects, the connection to the server is closed too, so the server ends the request.
            await run_while_connected(request, self._try_all(scope, body, send))
        except ApiError as error:
            await error_response(error)(scope, receive, send)

    def order(self, body: bytes) -> list[Upstream]:
        """Returns the servers in the order in which a request tries them.

        Ready servers come first, then those with fewer requests. A hash of the prompt's prefix breaks ties, so that
        requests with a common prefix share one server's cache.
        """
        prefix = _prefix(body)
        rank = lambda upstream: hashlib.sha256(prefix + str(upstream.url).encode()).digest()
        return sorted(self.upstreams, key=lambda each: (not each.is_ready, each.num_running, rank(each)))

    async def drain(self, seconds: float) -> None:
        """Waits until the running requests have ended, for at most `seconds`."""
        end = time.monotonic() + seconds
        while any(upstream.num_running for upstream in self.upstreams) and time.monotonic() < end:
            await asyncio.sleep(0.02)

    async def _try_all(self, scope: Scope, body: bytes, send: Send) -> None:
        """Passes a request to the first server that accepts it."""
        for upstream in self.order(body):
            upstream.num_running += 1
            try:
                return await self._pass_on(scope, body, upstream, send)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                # Nothing was sent, so another server may take the request.
                self._mark(upstream, is_ready=False, reason=error)
            finally:
                upstream.num_running -= 1
        raise _no_server()

    async def _pass_on(self, scope: Scope, body: bytes, upstream: Upstream, send: Send) -> None:
        raw_path = scope.get("raw_path") or scope["path"].encode()
        if not raw_path.startswith(b"/"):
            raise ApiError("the path must start with /")
        if scope["query_string"]:
            raw_path += b"?" + scope["query_string"]
        # Only the path comes from the client, not the address.
        url = upstream.url.copy_with(raw_path=raw_path)
        headers = [(name, value) for name, value in scope["headers"] if name not in HOP_HEADERS | {b"content-length"}]
        if scope.get("client"):
            headers.append((b"x-forwarded-for", scope["client"][0].encode()))
        request = httpx.Request(scope["method"], url, headers=headers, content=body)
        try:
            response = await self._client.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise
        except httpx.HTTPError as error:
            raise _lost(upstream, error) from error
        is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
        try:
            kept = [(name.lower(), value) for name, value in response.headers.raw if name.lower() not in HOP_HEADERS]
            await send({"type": "http.response.start", "status": response.status_code, "headers": kept})
            async for chunk in response.aiter_raw():
                await send(_chunk(chunk))
        except httpx.HTTPError as error:
            # The status has already been sent. A stream ends with an error; anything else is cut off, so that no client
            # mistakes it for a complete response.
            if not is_stream:
                raise
            await send(_chunk(f"data: {to_json(_lost(upstream, error).body)}\n\n".encode()))
        finally:
            await response.aclose()
        await send({"type": "http.response.body", "body": b""})

    def _mark(self, upstream: Upstream, *, is_ready: bool, reason: object) -> None:
        if upstream.is_ready != is_ready:
            _log.warning("%s %s", upstream.url, "is ready" if is_ready else f"is not ready: {reason}")
        upstream.is_ready = is_ready

    # Startup and shutdown.

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        # Use a new connection per request. A reused one may be dead, and it would then be unknown what was sent.
        transport = httpx.AsyncHTTPTransport(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0), socket_options=keepalive_options()
        )
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        async with httpx.AsyncClient(transport=transport, timeout=timeout, trust_env=False) as self._client:
            checks = [asyncio.ensure_future(self._check(upstream)) for upstream in self.upstreams]
            await send({"type": "lifespan.startup.complete"})
            await receive()
            for check in checks:
                check.cancel()
            await asyncio.gather(*checks, return_exceptions=True)
        await send({"type": "lifespan.shutdown.complete"})

    async def _check(self, upstream: Upstream) -> None:
        """Checks periodically whether a server accepts requests."""
        while True:
            try:
                # With API keys, the response is 401, which also means that the server is alive.
                response = await self._client.get(upstream.url.copy_with(path="/ready"), timeout=CONNECT_SECONDS)
                self._mark(upstream, is_ready=response.status_code < 500, reason=f"status {response.status_code}")
            except httpx.HTTPError as error:
                self._mark(upstream, is_ready=False, reason=repr(error))
            await asyncio.sleep(self._check_seconds)


def _check_url(text: str) -> httpx.URL:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise ValueError(f"{text!r} is not an address: {error}") from error
    if url.scheme not in ("http", "https") or not url.host or url.raw_path not in (b"", b"/"):
        raise ValueError(f"{text!r} is not the address of a server, such as http://10.0.0.7:30000")
    return url


def _prefix(body: bytes) -> bytes:
    """Returns the start of a request's prompt, regardless of the fields before it."""
    with contextlib.suppress(ValueError, RecursionError):
        values = json.loads(body)
        if isinstance(values, dict):
            prompt = next((values[name] for name in PROMPT_FIELDS if values.get(name)), "")
            return json.dumps(prompt)[:PREFIX_CHARACTERS].encode()
    return body[:PREFIX_CHARACTERS]


def _chunk(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


def _no_server() -> ApiError:
    return ApiError("no server can accept requests at the moment", status=503, code="no_server", retry_after=1)


def _lost(upstream: Upstream, error: Exception) -> ApiError:
    """Logs that a server was lost while it processed a request, and returns the error for the client."""
    _log.error("%s was lost: %r", upstream.url, error)
    return ApiError("the server that was processing this request was lost", status=502, code="server_lost")
