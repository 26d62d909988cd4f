"""Connections to a server, opened before the measurement.

One `httpx` client with a pool for all requests would be simpler, but its pool looks at every connection for every
request, which adds to the time to first token when many requests run at once.
"""

import asyncio
import contextlib
import urllib.parse
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from mtpjax.errors import UsageError, install_extra

if TYPE_CHECKING:
    import httpx

CONNECT_SECONDS = 10.0
# Servers close idle connections after a few seconds (uvicorn after 5). Closing them earlier avoids failed requests.
IDLE_SECONDS = 3.0
MAX_OPENED = 256  # connections opened ahead of a run


class Connections:
    """Connections to one server, each for one request at a time."""

    def __init__(self, url: str, headers: dict[str, str] | None = None):
        """Opens no connection yet. Raises ValueError for an invalid URL, and UsageError if httpx is not installed."""
        try:
            import httpx
        except ImportError as error:
            raise UsageError(f"httpx, which sends the requests, is missing: {install_extra('serve')}") from error
        parts = urllib.parse.urlsplit(url)
        # Reading the port raises an error for a number that is not a port.
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError(f"the URL of a server must start with http:// or https:// and a host, got '{url}'")
        self.url, self._headers = url.rstrip("/"), headers
        # Loading certificates takes longer than a request, so all connections share them.
        self._certificates = httpx.create_ssl_context()
        self._all: list[httpx.AsyncClient] = []
        self._free: list[httpx.AsyncClient] = []

    @contextlib.asynccontextmanager
    async def use(self) -> "AsyncIterator[httpx.AsyncClient]":
        """Lends the free connection that was used last, or a new one if all are in use."""
        connection = self._free.pop() if self._free else self._make()
        try:
            yield connection
        finally:
            self._free.append(connection)

    async def open(self, count: int) -> None:
        """Opens connections, so that requests do not wait for them. Ignores failures, which requests will report."""
        import httpx

        async def ask() -> None:
            with contextlib.suppress(httpx.HTTPError):
                async with self.use() as connection:
                    await connection.get("/v1/models")

        await asyncio.gather(*(ask() for _ in range(min(count, MAX_OPENED))))

    async def close(self) -> None:
        await asyncio.gather(*(connection.aclose() for connection in self._all))

    def _make(self) -> "httpx.AsyncClient":
        import httpx

        connection = httpx.AsyncClient(
            base_url=self.url,
            headers=self._headers,
            verify=self._certificates,
            # Requests may queue for a long time.
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx.Limits(keepalive_expiry=IDLE_SECONDS),
            # A proxy named by the environment would add its own latency.
            trust_env=False,
        )
        self._all.append(connection)
        return connection
