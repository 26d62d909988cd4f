"""Limits the time and size of request headers; uvicorn has no such limits."""

import asyncio
import re
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

MAX_HEADER_BYTES = 1 << 14  # as in Node; SGLang's and vLLM's clients send a few hundred bytes
_HEADER_END = re.compile(rb"\n\r?\n")
_TOO_LARGE = (
    b'{"error": {"message": "the header of a request may have at most %d bytes", "type": "invalid_request_error", '
    b'"param": null, "code": "header_too_large"}}' % MAX_HEADER_BYTES
)


class LimitedProtocol(AutoHTTPProtocol):
    """An HTTP protocol with header limits, based on httptools if it is installed and on h11 otherwise.

    A header of more than `MAX_HEADER_BYTES` is rejected with 431 before it is parsed. Bodies have their own limits
    (`ApiSettings.max_body_bytes`, `body_timeout`), and so does the time between two requests (uvicorn's
    `timeout_keep_alive`).

    Attributes:
        header_seconds: time from the start of a connection, or from the first byte of a later request, to the end of
            the header.
    """

    header_seconds: float

    # Attributes that both of uvicorn's protocols have.
    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    cycle: Any

    _header_timer: asyncio.TimerHandle | None = None
    _awaits_header = True  # with httptools: True between two requests and in a header
    _num_header_bytes = 0  # bytes received since the last header ended or the last body byte arrived
    _tail = b""  # the last bytes received, in which the end of the header may start

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._header_timer = self.loop.call_later(self.header_seconds, transport.close)

    def data_received(self, data: bytes) -> None:
        # 1. Stop before the parser keeps more than the limit.
        self._num_header_bytes += len(data)
        if self._num_header_bytes > MAX_HEADER_BYTES and self._is_in_header():
            room = MAX_HEADER_BYTES - self._num_header_bytes + len(data)
            if not _HEADER_END.search(self._tail + data[:room]):
                return self._reject()
        self._tail = data[-2:]
        # 2. Parse. With httptools, a callback resets the count; h11 limits trailers and chunks itself.
        super().data_received(data)
        if hasattr(self, "conn") and not self._is_in_header():
            self._num_header_bytes = 0
        if self._num_header_bytes > MAX_HEADER_BYTES and not self._is_in_header():
            self.transport.close()  # endless trailers, or endless chunk sizes
        # 3. The timer runs while a header is awaited.
        has_header = self.cycle is not None and not self.cycle.response_complete
        if has_header:
            self._stop_timer()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_seconds, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    # Callbacks of httptools, which h11 does not have.

    def on_headers_complete(self) -> None:
        self._awaits_header, self._num_header_bytes = False, 0
        super().on_headers_complete()  # type: ignore[misc]

    def on_body(self, body: bytes) -> None:
        self._num_header_bytes = 0
        super().on_body(body)  # type: ignore[misc]

    def on_message_complete(self) -> None:
        self._awaits_header, self._num_header_bytes = True, 0
        super().on_message_complete()  # type: ignore[misc]

    def _is_in_header(self) -> bool:
        connection = getattr(self, "conn", None)
        return self._awaits_header if connection is None else str(connection.their_state) == "IDLE"

    def _reject(self) -> None:
        """Sends 431 and closes the connection."""
        if self.cycle is None or self.cycle.response_complete:
            head = b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: application/json\r\n"
            head += b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(_TOO_LARGE)
            self.transport.write(head + _TOO_LARGE)
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


def limited_protocol(seconds: float) -> type[asyncio.Protocol]:
    """Makes a `LimitedProtocol` with this `header_seconds`, for `uvicorn.Config(http=...)`."""
    return type("Protocol", (LimitedProtocol,), {"header_seconds": seconds})
