"""Connects process 0 to the other processes over TCP, exchanges frames of bytes, and detects lost connections.

Process 0 listens on a free port. The port, its addresses and a secret for this run are sent over JAX's collectives, so
there is nothing to configure. Frames are not encrypted, and neither are JAX's collectives.
"""

import contextlib
import queue
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator

import jax

from mtpjax import distributed
from mtpjax.errors import LostProcess, printable
from mtpjax.host import keepalive_options
from mtpjax.serving.disaggregation import protocol
from mtpjax.serving.disaggregation.protocol import NONCE, SIGNATURE, TIME, Forged, Signer
from mtpjax.serving.disaggregation.transfer import own_address

EXIT_CODE = 75  # exit code of a process that has lost another process; see `LostProcess`
MEETING_SECONDS = 60.0  # time for all processes to connect
HELLO_SECONDS = 5.0  # time for a connection to identify itself
STOP_SECONDS = 5.0  # time for a follower process to close its connection at shutdown
MAX_BYTES = 1 << 30  # maximum size of a frame
HELLO = {"rank": int, TIME: str, NONCE: str, SIGNATURE: str}
STOP, DRAIN, CALL = b"s", b"d", b"c"  # first byte of a frame


class Followers:
    """Connections from process 0 to the other processes, by rank.

    Attributes:
        before_exit: called with a message when a follower process is lost, before this process ends.
        should_drain: set when a follower process has received a stop signal.
    """

    def __init__(self, connections: dict[int, socket.socket]):
        self._connections = connections
        self.before_exit: Callable[[str], None] = lambda message: None
        self.should_drain = threading.Event()
        self._has_ended = threading.Lock()  # acquired once
        self._threads = [
            threading.Thread(target=self._watch, args=(rank,), name=f"mtpjax-process-{rank}", daemon=True)
            for rank in connections
        ]
        for thread in self._threads:
            thread.start()

    def send(self, body: bytes) -> None:
        """Sends a call to all processes. Raises LostProcess."""
        for rank, connection in self._connections.items():
            try:
                _send(connection, CALL + body)
            except OSError as error:
                raise LostProcess(f"process {rank} cannot be reached: {error.strerror or error}") from error

    def stop(self, problem: str = "") -> None:
        """Tells the other processes to end. `problem` is the error that ends this process, if any."""
        if self._has_ended.acquire(blocking=False):
            for connection in self._connections.values():
                with contextlib.suppress(OSError):
                    _send(connection, STOP + problem.encode())
                    connection.shutdown(socket.SHUT_WR)
            # A connection that is closed before the other side has closed it may lose the last frame.
            for thread in self._threads:
                thread.join(timeout=STOP_SECONDS)

    def end_process(self, message: str) -> None:
        """Ends this process because a follower is lost; returns if this process is already ending."""
        if self._has_ended.acquire(blocking=False):
            _end_process(message, self.before_exit)

    def _watch(self, rank: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            while _receive(self._connections[rank], len(DRAIN)) == DRAIN:
                self.should_drain.set()
        self.end_process(f"process {rank} of this server has ended or cannot be reached")


class Leader:
    """The connection of a follower process to process 0."""

    def __init__(self, connection: socket.socket):
        self._connection, self._is_closed = connection, False
        self._frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        # A separate thread notices the loss of process 0 while this process waits for a device.
        threading.Thread(target=self._read, name="mtpjax-process-0", daemon=True).start()

    def receive(self) -> bytes | None:
        """Waits for the next call. Returns None when process 0 stops; raises ValueError if it stops with an error."""
        frame = self._frames.get()
        if frame[:1] == STOP and len(frame) > 1:
            raise ValueError(f"process 0 has ended: {printable(frame[1:].decode(errors='replace'))}")
        return frame[1:] if frame[:1] == CALL else None

    def close(self) -> None:
        """Closes the connection. Afterwards, this process does not end when process 0 ends."""
        self._is_closed = True
        self._connection.close()

    def ask_to_drain(self) -> None:
        """Tells process 0 that this process has received a stop signal."""
        with contextlib.suppress(OSError):
            _send(self._connection, DRAIN)

    def _read(self) -> None:
        try:
            while (frame := _receive(self._connection, MAX_BYTES))[:1] == CALL:
                self._frames.put(frame)
            self._frames.put(frame)
        except (OSError, ValueError):
            if not self._is_closed:
                _end_process("process 0 of this server has ended or cannot be reached", lambda message: None)


@contextlib.contextmanager
def connect_processes(address: str | None) -> Iterator[Followers | Leader]:
    """Connects process 0 to the other processes. All processes must call this function.

    On exit, process 0 stops the others, and sends the reason if the block raises.

    Args:
        address: "host:port" at which JAX reaches process 0; the other processes connect to the same host. If None, they
            connect to an address of the machine.

    Yields:
        `Followers` in process 0, `Leader` in the others.

    Raises:
        LostProcess: a process did not connect.
    """
    is_main, num_others = distributed.is_main_process(), jax.process_count() - 1
    with contextlib.ExitStack() as stack:
        # 1. Process 0 opens a port. It sends its host names, the port number and a new secret to the other processes.
        meeting = None
        if is_main:
            listener = stack.enter_context(_listen())
            hosts = [address.rpartition(":")[0].strip("[]")] if address else _own_hosts()
            meeting = {"hosts": hosts, "port": listener.getsockname()[1], "secret": secrets.token_hex(32)}
        meeting = distributed.from_main_process(meeting)
        signer = Signer(bytes.fromhex(meeting["secret"]))
        # 2. The other processes connect, and both sides prove that they know the secret.
        if not is_main:
            leader = Leader(_join(meeting["hosts"], meeting["port"], signer))
            stack.callback(leader.close)
            yield leader
            return
        connections = _accept(listener, num_others, signer)
        for connection in connections.values():
            stack.enter_context(connection)
        followers = Followers(connections)
        try:
            yield followers
        except BaseException as error:
            followers.stop(printable(error) or type(error).__name__)
            raise
        followers.stop()


def _end_process(message: str, before_exit: Callable[[str], None]) -> None:
    print(f"mtpjax serve: {message}", file=sys.stderr, flush=True)
    with contextlib.suppress(Exception):
        before_exit(message)
    # JAX's shutdown would wait for the lost process.
    distributed.exit_without_shutdown(EXIT_CODE)


def _listen() -> socket.socket:
    """Opens a free port on all addresses of the machine."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _own_hosts() -> list[str]:
    """Returns host names at which other machines may reach this machine, the most likely one first."""
    with contextlib.suppress(ValueError):
        return [own_address(""), socket.gethostname()]
    return [socket.gethostname()]


def _accept(listener: socket.socket, count: int, signer: Signer) -> dict[int, socket.socket]:
    """Waits for the processes 1 .. `count`, and closes other connections."""
    connections: dict[int, socket.socket] = {}
    deadline = time.monotonic() + MEETING_SECONDS
    while len(connections) < count:
        listener.settimeout(max(deadline - time.monotonic(), 0.01))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            missing = sorted({*range(1, count + 1)} - {*connections})
            raise LostProcess(f"processes {missing} did not connect within {MEETING_SECONDS:.0f} s") from None
        try:
            connection.settimeout(HELLO_SECONDS)
            hello = protocol.unpack(_receive(connection, protocol.MESSAGE_BYTES), HELLO)
            rank = hello["rank"]
            signer.check(hello, str(rank).encode())
            if not 1 <= rank <= count or rank in connections:
                raise Forged("this process is connected already")
            _send(connection, signer.sign_answer(hello, b"")[SIGNATURE].encode())
            connections[rank] = _prepared(connection)
        except (OSError, ValueError, Forged):
            connection.close()
    return connections


def _join(hosts: list[str], port: int, signer: Signer) -> socket.socket:
    rank, problem = jax.process_index(), ""
    headers = signer.sign(str(rank).encode())
    for host in hosts:
        try:
            connection = socket.create_connection((host, port), timeout=HELLO_SECONDS)
        except OSError as error:
            problem = f"{host}:{port}: {error}"
            continue
        try:
            _send(connection, protocol.pack({"rank": rank, **headers}))
            answer = {SIGNATURE: _receive(connection, protocol.MESSAGE_BYTES).decode()}
            signer.check_answer(headers, answer, b"")
            return _prepared(connection)
        except (OSError, ValueError, Forged) as error:
            connection.close()
            problem = f"{host}:{port}: {error}"
    raise LostProcess(f"process {rank} cannot reach process 0 at {problem}")


def _prepared(connection: socket.socket) -> socket.socket:
    """Makes a connection send without delay, and break within half a minute when the other host is lost."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in keepalive_options(TCP_USER_TIMEOUT=25_000):
        connection.setsockopt(*option)
    return connection


def _send(connection: socket.socket, body: bytes) -> None:
    connection.sendall(struct.pack(">I", len(body)) + body)


def _receive(connection: socket.socket, max_bytes: int) -> bytes:
    """Reads a frame. Raises OSError, or ValueError if it is longer than `max_bytes`."""
    [size] = struct.unpack(">I", _read_exactly(connection, 4))
    if size > max_bytes:
        raise ValueError(f"a frame has {size} bytes, more than {max_bytes}")
    return _read_exactly(connection, size)


def _read_exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise OSError("the connection is closed")
        view = view[count:]
    return bytes(data)
