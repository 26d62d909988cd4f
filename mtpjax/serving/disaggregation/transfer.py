"""The data plane, which sends the bytes of pages from one process to another.

`jax` sends them from host memory to host memory with `jax.experimental.transfer`, over additional parallel connections.
`http` puts them into the response, which works everywhere.
"""

import datetime
import secrets
import socket
from typing import Any, ClassVar, Protocol

import jax
import numpy as np

BACKENDS = ("jax", "http")
PUBLIC_ADDRESS = "192.0.2.1"  # reserved for documentation (RFC 5737), so the default route leads to it
OFFER_SECONDS = 60.0  # time after which bytes that were not fetched are dropped


class Transfer(Protocol):
    """Sends bytes from a prefill server to a decode server.

    Attributes:
        fields: names and types of the fields that `send` adds to an answer.
    """

    fields: ClassVar[dict[str, type]]

    def send(self, data: np.ndarray) -> dict[str, Any]:
        """Offers bytes `[n]` uint8; returns the fields of the answer that `receive` needs."""
        ...

    def receive(self, answer: dict[str, Any], size: int, host: str, seconds: float) -> np.ndarray:
        """Fetches `[size]` uint8 from `host` within `seconds`; `answer` contains the fields that `send` returned."""
        ...


class HttpTransfer:
    """Sends bytes within the answer."""

    fields: ClassVar[dict[str, type]] = {"data": bytes}

    def send(self, data: np.ndarray) -> dict[str, Any]:
        return {"data": data.tobytes()}

    def receive(self, answer: dict[str, Any], size: int, host: str, seconds: float) -> np.ndarray:
        return np.frombuffer(answer["data"], np.uint8)


class JaxTransfer:
    """Sends bytes with `jax.experimental.transfer` between host memories, for any accelerator.

    Its connections are neither encrypted nor authenticated. A random number identifies each offer, and the signed
    response contains the bytes' checksum.

    Args:
        host: name or address that the other side connects to, if this side sends; not a wildcard address such as
            0.0.0.0.
        port: port to listen on; 0 means any free port.

    Raises:
        ValueError: this JAX, or this platform, has no transfer server, or the port is in use.
    """

    fields: ClassVar[dict[str, type]] = {"uuid": int, "port": int}

    def __init__(self, host: str = "127.0.0.1", port: int = 0):
        # The other side connects to the address on which this side listens, so it must not be a wildcard.
        host = _resolve(host)
        try:
            from jax.experimental import transfer

            self._device = jax.devices("cpu")[0]
            self._server = transfer.start_transfer_server(self._device.client, f"{host}:{port}", [f"{host}:0"])
        except (ImportError, NotImplementedError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"jax.experimental.transfer does not start ({str(error).splitlines()[0]}): set JAX_PLATFORMS so that "
                "it includes cpu, choose another --disaggregation-bootstrap-port, or use "
                "--disaggregation-transfer-backend http"
            ) from error
        self._port = int(self._server.address().rpartition(":")[2])
        self._connections: dict[str, Any] = {}

    def send(self, data: np.ndarray) -> dict[str, Any]:
        """Offers the bytes, which can be fetched once."""
        uuid = secrets.randbits(62)
        self._server.await_pull(uuid, [jax.device_put(data, self._device)], timeout=_after(OFFER_SECONDS))
        return {"uuid": uuid, "port": self._port}

    def receive(self, answer: dict[str, Any], size: int, host: str, seconds: float) -> np.ndarray:
        address = f"{_resolve(host)}:{answer['port']}"
        connection = self._connections.pop(address, None) or self._server.connect(address)
        sharding = jax.sharding.SingleDeviceSharding(self._device)
        shape = jax.ShapeDtypeStruct((size,), np.uint8, sharding=sharding)
        [data] = connection.pull(answer["uuid"], [shape], timeout=_after(seconds))
        data = np.asarray(data)
        # A failed connection is not reused.
        self._connections[address] = connection
        return data


def own_address(host: str) -> str:
    """Returns `host`; for a wildcard, the default route's address. Raises ValueError if there is no such route."""
    if host not in ("", "0.0.0.0", "::"):
        return host
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((PUBLIC_ADDRESS, 9))  # a datagram socket sends nothing when it connects
            return probe.getsockname()[0]
    except OSError as error:
        raise ValueError(f"this machine has no default route ({error.strerror}): set --host to an address") from error


def _resolve(host: str) -> str:
    """Returns the address of a host name, in URL form, because JAX connects only to addresses."""
    addresses = [each[4][0] for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    address = min(addresses, key=lambda each: ":" in str(each))  # IPv4 first
    return f"[{address}]" if ":" in str(address) else str(address)


def _after(seconds: float) -> datetime.datetime:
    return datetime.datetime.now() + datetime.timedelta(seconds=seconds)
