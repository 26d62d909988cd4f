"""Closes connections that do not finish the header of a request: uvicorn waits for them without limit."""

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol


def protocol_with_timeout(seconds: float) -> type[asyncio.Protocol]:
    """Makes an HTTP protocol for `uvicorn.Config(http=...)`.

    The body of a request has a limit of its own (`ApiSettings.body_timeout`), and so has the time between two requests
    (uvicorn's `timeout_keep_alive`).

    Args:
        seconds: from the beginning of a connection, or from the first byte of a later request, to the header's end.

    Returns:
        The class.
    """

    class Protocol(AutoHTTPProtocol):
        # Those of uvicorn's protocols, of which there are two.
        loop: asyncio.AbstractEventLoop
        transport: asyncio.Transport
        cycle: Any

        _header_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._header_timer = self.loop.call_later(seconds, transport.close)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            has_header = self.cycle is not None and not self.cycle.response_complete
            if has_header:
                self._stop_timer()
            elif self._header_timer is None:
                self._header_timer = self.loop.call_later(seconds, self.transport.close)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _stop_timer(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

    return Protocol
