"""The server's web page, which shows the live state and a chat, and the JSON that the page reads."""

import collections
import dataclasses
import importlib.resources
import math
import time
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from mtpjax.serving.api.server import ApiServer

RATE_SECONDS = 3.0  # over which tokens per second are measured
SAMPLE_SECONDS = 0.5  # shortest time between two samples
FILES = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
HEADERS = {
    # Allows only this server's scripts, styles and requests, and nothing inline, so a model's text never becomes code.
    "Content-Security-Policy": "default-src 'self'; img-src data:; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class TokenRate:
    """Tokens per second over the last `RATE_SECONDS`, the same for any number of readers."""

    def __init__(self) -> None:
        self._samples: collections.deque[tuple[float, int]] = collections.deque()

    def read(self, now: float, num_tokens: int) -> float | None:
        """Records a token count at time `now`. Returns the rate, or None until two samples are far enough apart."""
        while self._samples and self._samples[0][0] < now - RATE_SECONDS:
            self._samples.popleft()
        if not self._samples:
            self._samples.append((now, num_tokens))
            return None
        if now - self._samples[-1][0] >= SAMPLE_SECONDS:
            self._samples.append((now, num_tokens))
        then, num_before = self._samples[0]
        return (num_tokens - num_before) / (now - then) if now - then >= SAMPLE_SECONDS else None


def page_router(server: ApiServer) -> APIRouter:
    """Makes the routes of the page. The page and its files need no key, but its data does."""
    router, rate = APIRouter(), TokenRate()

    @router.get("/status.json")
    async def status() -> dict[str, Any]:
        """Returns the load and the counts since the start, named as in `EngineStatus`, and tokens per second."""
        status = server.engine.status()
        length = status.accept_length
        return {
            "model": server.settings.model_name,
            **dataclasses.asdict(status),
            "accept_length": None if math.isnan(length) else length,
            "tokens_per_second": rate.read(time.monotonic(), status.num_new_tokens),
        }

    for path, (name, media_type) in FILES.items():
        body = importlib.resources.files("mtpjax.serving").joinpath("page", name).read_bytes()
        router.add_api_route(path, _file_route(body, media_type), include_in_schema=False)
    return router


def _file_route(body: bytes, media_type: str) -> Callable[[], Any]:
    async def read_file() -> Response:
        return Response(body, media_type=media_type, headers=HEADERS)

    return read_file
