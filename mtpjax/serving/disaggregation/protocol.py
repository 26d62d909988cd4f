"""The protocol between a decode server and a prefill server, which signs messages and sends pages as bytes."""

import dataclasses
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import msgpack
import numpy as np

from mtpjax.serving.host_pages import Entries, page_bytes

PATH = "/disaggregation/prefill"
MAX_AGE = 60.0  # seconds by which the clocks of two machines may differ
MESSAGE_BYTES = 1 << 12  # maximum size of a message, excluding tokens and pages
TIME, NONCE, SIGNATURE = "mtpjax-time", "mtpjax-nonce", "mtpjax-signature"  # headers


class Forged(Exception):
    """A message that was not sent recently by a holder of the secret."""


class Signer:
    """Signs and checks messages with a shared secret of at least 16 bytes; a shorter one raises ValueError."""

    def __init__(self, secret: bytes):
        if len(secret) < 16:
            raise ValueError(f"the secret must have at least 16 bytes, got {len(secret)}")
        self._secret = secret
        self._nonces: dict[str, float] = {}  # nonces of accepted requests, with their times, oldest first

    def sign(self, body: bytes) -> dict[str, str]:
        now, nonce = repr(time.time()), secrets.token_hex(16)
        return {TIME: now, NONCE: nonce, SIGNATURE: self._mac("request", now, nonce, body)}

    def check(self, headers: Mapping[str, str], body: bytes) -> None:
        """Checks a request; not thread-safe. Raises Forged for a wrong signature, an old request or a repeated one."""
        sent, nonce = headers.get(TIME, ""), headers.get(NONCE, "")
        self._compare(self._mac("request", sent, nonce, body), headers)
        now = time.time()
        if abs(now - float(sent)) > MAX_AGE:
            raise Forged("the request's time differs too much from this machine's")
        # A request that was captured on the network must not work a second time.
        if nonce in self._nonces:
            raise Forged("the request was received before")
        self._nonces[nonce] = now
        while now - next(iter(self._nonces.values())) > 2 * MAX_AGE:
            del self._nonces[next(iter(self._nonces))]

    def sign_answer(self, request_headers: Mapping[str, str], body: bytes) -> dict[str, str]:
        return {SIGNATURE: self._mac("answer", request_headers[TIME], request_headers[NONCE], body)}

    def check_answer(self, request_headers: Mapping[str, str], headers: Mapping[str, str], body: bytes) -> None:
        """Raises `Forged` if the answer to a request is not signed."""
        self._compare(self._mac("answer", request_headers[TIME], request_headers[NONCE], body), headers)

    def _mac(self, kind: str, sent: str, nonce: str, body: bytes) -> str:
        head = json.dumps([kind, sent, nonce]).encode()
        return hmac.new(self._secret, head + hashlib.sha256(body).digest(), hashlib.sha256).hexdigest()

    def _compare(self, expected: str, headers: Mapping[str, str]) -> None:
        if not hmac.compare_digest(expected.encode(), headers.get(SIGNATURE, "").encode()):
            raise Forged("the signature is wrong")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DisaggregationSettings:
    """Settings of a prefill server or a decode server.

    Attributes:
        prefill_url: address of the prefill server; None if this is the prefill server.
        secret: shared by both servers, at least 16 bytes; a shorter secret raises ValueError.
        backend: how pages are sent: "jax" or "http".
        host: address on which the data plane listens.
        port: the prefill server's port for pages; 0 means any free port.
        timeout: seconds that a request waits for its pages.
    """

    prefill_url: str | None
    secret: bytes = dataclasses.field(repr=False)
    backend: str = "jax"
    host: str = "127.0.0.1"
    port: int = 0
    timeout: float = 30.0

    def __post_init__(self):
        Signer(self.secret)


def pack(message: dict[str, Any]) -> bytes:
    return msgpack.Packer().pack(message)


def unpack(body: bytes, fields: Mapping[str, type]) -> dict[str, Any]:
    """Decodes a message. Raises ValueError unless it has exactly these fields, of these types."""
    message = msgpack.unpackb(body)  # raises ValueError, also for lengths beyond the end of the body
    if not isinstance(message, dict) or {name: type(value) for name, value in message.items()} != dict(fields):
        raise ValueError("the message has unexpected fields; do both servers run the same version?")
    return message


def pages_to_bytes(pages: Sequence[Entries]) -> np.ndarray:
    """Returns the entries of consecutive pages as `[bytes]` uint8."""
    arrays = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for page in pages for array in page]
    return np.concatenate([np.zeros(0, np.uint8), *arrays])


def checksum(data: np.ndarray) -> bytes:
    return hashlib.sha256(memoryview(data)).digest()  # type: ignore[arg-type]  # arrays are buffers


def pages_from_bytes(data: np.ndarray, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[Entries]:
    """Inverts `pages_to_bytes`, given the shapes and dtypes of a page's entries."""
    begin, pages = 0, []
    while begin < len(data):
        page = []
        for each in shapes:
            end = begin + page_bytes([each])
            # Copy, so that a page does not keep the bytes of all other pages in memory.
            page.append(data[begin:end].copy().view(each.dtype).reshape(each.shape))
            begin = end
        pages.append(page)
    return pages
