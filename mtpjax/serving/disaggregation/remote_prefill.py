"""The decode server's side, which requests pages from the prefill server, and runs prefill itself if that fails."""

import asyncio
import concurrent.futures
import hashlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import httpx
import numpy as np

from mtpjax.errors import printable
from mtpjax.serving.disaggregation import protocol
from mtpjax.serving.disaggregation.protocol import PATH, Forged, Signer
from mtpjax.serving.disaggregation.transfer import Transfer
from mtpjax.serving.host_pages import page_bytes
from mtpjax.serving.page_exchange import PageExchange
from mtpjax.serving.page_pool import page_digests
from mtpjax.serving.request import Request

CONNECT_SECONDS = 2.0
PAUSE_SECONDS = 5.0  # time after a failure during which no request uses the prefill server
_log = logging.getLogger(__name__)


class RemotePrefill:
    """Fetches pages from a prefill server into an engine's prefix cache.

    Args:
        pages: the engine's pages, including those in host memory.
        url: address of the prefill server.
        signer: signs the requests.
        model: the hash that `PageExchange.digest` returns.
        transfer: fetches the pages.
        timeout: seconds that a request waits for its pages.
        max_concurrent: maximum number of prompts sent to the prefill server at the same time.

    Attributes:
        num_fetched: prompts whose pages arrived.
        num_fallbacks: prompts that this server prefilled itself, because the prefill server failed, had just failed, or
            was busy.
    """

    def __init__(
        self,
        pages: PageExchange,
        url: str,
        *,
        signer: Signer,
        model: bytes,
        transfer: Transfer,
        timeout: float = 30.0,
        max_concurrent: int = 8,
    ):
        self._pages, self._signer, self._model, self._transfer = pages, signer, model, transfer
        self._url, self._host = url.rstrip("/") + PATH, urlsplit(url).hostname or ""
        self._timeout, self._max_concurrent = timeout, max_concurrent
        limits = httpx.Timeout(timeout, connect=min(CONNECT_SECONDS, timeout))
        self._client = httpx.Client(timeout=limits, trust_env=False)  # no proxies
        self._num_running = 0
        self._paused_until = 0.0
        self.num_fetched = self.num_fallbacks = 0

    async def prepare(self, requests: Sequence[Request]) -> None:
        """Fetches the prompts' pages before requests enter the engine. Never fails, as the engine can run prefill."""
        prompts = {(request.prompt, request.salt) for request in requests}
        await asyncio.gather(*(self._prepare(*prompt) for prompt in prompts))

    async def _prepare(self, prompt: tuple[int, ...], salt: bytes) -> None:
        # Only full pages are shared, and a prompt that is too long is rejected later.
        if not self._pages.page_size < len(prompt) < self._pages.max_length:
            return
        if self._num_running >= self._max_concurrent or time.monotonic() < self._paused_until:
            self.num_fallbacks += 1
            return
        self._num_running += 1
        fetch = asyncio.wrap_future(_run_in_thread(lambda: self._fetch(prompt, salt)))
        fetch.add_done_callback(self._release)
        try:
            # A thread cannot be stopped, so it continues within the timeouts of its connections.
            self.num_fetched += await asyncio.wait_for(asyncio.shield(fetch), self._timeout)
        except Exception as error:
            self.num_fallbacks += 1
            self._paused_until = time.monotonic() + PAUSE_SECONDS
            reason = printable(f"{type(error).__name__}: {error}", 400)
            _log.error("the prefill server sent no pages; this server prefills the prompt itself: %s", reason)

    def _release(self, fetch: asyncio.Future) -> None:
        self._num_running -= 1
        if not fetch.cancelled():
            fetch.exception()  # asyncio logs exceptions that are never read

    def _fetch(self, prompt: tuple[int, ...], salt: bytes) -> bool:
        """Fetches the pages of a prompt that the engine lacks; returns whether there were any."""
        deadline, shapes = time.monotonic() + self._timeout, self._pages.shapes
        # The engine processes the last token itself.
        digests = list(page_digests(prompt[:-1], self._pages.page_size, salt=salt))
        num_known = self._pages.count_known(prompt[:-1], salt)
        if num_known == len(digests):
            return False
        # 1. Send the request.
        # The salt may be the hash of a client's key, which must not be visible on the network.
        salt = hashlib.sha256(salt).digest()
        message = {"model": self._model, "tokens": np.array(prompt, "<i4").tobytes(), "salt": salt}
        body = protocol.pack({**message, "num_known": num_known})
        headers = self._signer.sign(body)
        max_bytes = (len(digests) - num_known) * page_bytes(shapes)
        answer = self._post(body, headers, max_bytes + protocol.MESSAGE_BYTES, deadline)
        fields = {"size": int, "checksum": bytes, **self._transfer.fields}
        values = protocol.unpack(answer, fields)
        # 2. Fetch.
        num_bytes = values["size"]
        if not 0 < num_bytes <= max_bytes or num_bytes % page_bytes(shapes):
            raise ValueError(f"expected pages of at most {max_bytes} bytes, got {num_bytes}")
        data = self._transfer.receive(values, num_bytes, self._host, max(deadline - time.monotonic(), 0.1))
        if len(data) != num_bytes or protocol.checksum(data) != values["checksum"]:
            raise ValueError("the pages were corrupted in transit")
        # 3. Keep.
        pages = protocol.pages_from_bytes(data, shapes)
        self._pages.put(list(zip(itertools.islice(digests, num_known, None), pages, strict=False)))
        return True

    def _post(self, body: bytes, headers: dict[str, str], max_bytes: int, deadline: float) -> bytes:
        """Returns the signed answer to a message."""
        with self._client.stream("POST", self._url, content=body, headers=headers) as response:
            answer = bytearray()
            for chunk in response.iter_bytes():
                answer += chunk
                if len(answer) > max_bytes:
                    raise ValueError(f"the answer has more than {max_bytes} bytes")
                if time.monotonic() > deadline:
                    raise TimeoutError("the answer took too long")
        if response.status_code != 200:
            raise ValueError(f"status {response.status_code}: {bytes(answer[:400]).decode(errors='replace')}")
        try:
            self._signer.check_answer(headers, response.headers, bytes(answer))
        except Forged as error:
            raise ValueError("the answer is not signed: do both servers have the same secret?") from error
        return bytes(answer)


def _run_in_thread(function: Callable[[], bool]) -> concurrent.futures.Future[bool]:
    """Runs a function in a thread that does not keep the process alive if it hangs."""
    future: concurrent.futures.Future[bool] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="mtpjax-remote-prefill", daemon=True).start()
    return future
