"""Starts a server: loads the model, compiles, opens the port, and shuts down in order."""

import asyncio
import contextlib
import dataclasses
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import jax
import uvicorn

from mtpjax.decoding.config import KV_CACHE_DTYPES, DecodeConfig
from mtpjax.errors import MemoryTooSmall, printable
from mtpjax.models.cache import empty_cache
from mtpjax.models.config import ModelConfig
from mtpjax.serving.api.server import ApiSettings
from mtpjax.serving.app import make_app
from mtpjax.serving.engine import Engine
from mtpjax.serving.executor import EngineSettings
from mtpjax.serving.header_timeout import protocol_with_timeout
from mtpjax.serving.metrics import Metrics
from mtpjax.serving.watchdog import Watchdog

CPU_POOL_BYTES = 1 << 30  # of the default pool where no accelerator says how much memory it has

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of the process that serves.

    Attributes:
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        watchdog_seconds: a call that takes longer ends the process; None: no limit.
        drain_seconds: time that running requests get to end after SIGTERM.
        header_seconds: time in which a client must send the header of a request.
        warms_up: compile every program before the port opens.
        log_level: of the HTTP server's own log.
    """

    host: str = "127.0.0.1"
    port: int = 30000
    watchdog_seconds: float | None = 300.0
    drain_seconds: float = 30.0
    header_seconds: float = 30.0
    warms_up: bool = True
    log_level: str = "warning"


def page_bytes(config: ModelConfig, decode: DecodeConfig, page_size: int, dtype: Any) -> int:
    """Computes the bytes of one page in the caches of the trunk and of the modules.

    Args:
        config: the model's config.
        decode: settings, for the dtype of the caches.
        page_size: positions per page.
        dtype: dtype of the activations.

    Returns:
        Bytes on all devices together.
    """
    kinds = (*config.trunk_kinds, *[config.mtp_kind] * min(config.num_mtp_modules, decode.num_steps))
    kinds = tuple(kind for kind in kinds if kind.attention != "linear_attention")
    dtype_of_entries = KV_CACHE_DTYPES[decode.kv_cache_dtype]
    cache = jax.eval_shape(lambda: empty_cache(config, kinds, 1, 1, dtype, dtype_of_entries, (1, page_size)))
    return sum(leaf.size * leaf.dtype.itemsize for layer in cache.layers for leaf in jax.tree.leaves(layer))


def choose_num_pages(
    params: dict, config: ModelConfig, decode: DecodeConfig, settings: EngineSettings, memory_fraction: float
) -> int:
    """Chooses the size of the pool: what every slot can need, if the memory has room for it.

    Args:
        params: the model's parameters, on their devices.
        config: the model's config.
        decode: settings of the requests.
        settings: the engine's; slots and length.
        memory_fraction: share of the accelerator's memory that weights and pages may take.

    Returns:
        Pages.

    Raises:
        MemoryTooSmall: the memory that is left has no room for one text.
    """
    max_length = min(settings.max_length or config.max_position_embeddings, config.max_position_embeddings)
    per_row = -(-(max_length + 64) // settings.page_size)
    stats = [device.memory_stats() for device in params["embedding"].devices()]
    if all(stats):
        # Every device holds its part of the weights already, and its share of each page.
        room = sum(memory_fraction * each["bytes_limit"] - each["bytes_in_use"] for each in stats if each)
    else:
        room = CPU_POOL_BYTES
    num_pages = int(room // page_bytes(config, decode, settings.page_size, params["embedding"].dtype))
    if num_pages < per_row and all(stats):
        raise MemoryTooSmall(
            f"the memory has room for {max(num_pages, 0) * settings.page_size} tokens, but a text may have "
            f"{max_length}: lower --context-length, or raise --mem-fraction-static"
        )
    return max(min(num_pages, per_row * settings.num_slots), per_row)


@contextlib.contextmanager
def explain_full_memory(advice: str) -> Iterator[None]:
    """Turns JAX's error for full memory into one line with advice.

    Args:
        advice: what to change.

    Raises:
        MemoryTooSmall: memory was full.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # JAX's errors are RuntimeErrors
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise MemoryTooSmall(f"memory is too small: {advice} ({printable(error, 200)})") from error


@contextlib.contextmanager
def running_engine(
    params: dict,
    *,
    model: Any,
    config: DecodeConfig,
    settings: EngineSettings,
    server: ServerSettings,
    model_name: str,
) -> Iterator[tuple[Engine, Metrics]]:
    """Starts an engine and its metrics; on exit lets its requests end, for at most `drain_seconds`, and stops it."""
    with explain_full_memory("lower --max-total-tokens, --max-running-requests or --chunked-prefill-size"):
        engine = Engine(
            params, model=model, config=config, settings=settings, observe=lambda *end: metrics.observe(*end)
        )
        metrics = Metrics(engine.status, model_name=model_name)
        if server.warms_up:
            with _progress() as progress:
                engine.warm_up(progress)
    engine.start()
    watchdog = None
    if server.watchdog_seconds is not None:
        watchdog = Watchdog(lambda: engine.busy_since, server.watchdog_seconds)
    try:
        yield engine, metrics
    finally:
        if not engine.close(timeout=server.drain_seconds):
            _log.warning("requests still ran after %.0f s and were aborted", server.drain_seconds)
        if watchdog is not None:
            watchdog.stop()


def serve(
    engine: Engine, tokenizer: Any, api: ApiSettings, server: ServerSettings, metrics: Metrics | None = None
) -> None:
    """Serves requests until SIGTERM or Ctrl-C.

    Args:
        engine: a running engine.
        tokenizer: the model's.
        api: settings of the API.
        server: settings of the process.
        metrics: what `/metrics` answers; None: nothing.

    Raises:
        OSError: the port cannot be opened.
    """
    app = make_app(engine, tokenizer, api, metrics)
    # Open the port first, so that an address in use is an error in one line, and port 0 is known.
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((server.host, server.port))
        except OSError as error:
            raise OSError(f"cannot listen on {server.host}:{server.port}: {error.strerror or error}") from error
        host, port = listener.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        line = (
            f"mtpjax serve: {api.model_name} is ready at {address}: {engine.settings.num_slots} slots of up to "
            f"{engine.max_length} tokens, {engine.status().num_pages} pages of {engine.settings.page_size}"
        )

        class Server(uvicorn.Server):
            """Prints the ready line when the port accepts connections."""

            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                if self.started:
                    _tell(line, sys.stdout)

            async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
                # Streams go on while the server drains, and new requests get 503. A second Ctrl-C ends them.
                draining = asyncio.ensure_future(app.state.server.drain(server.drain_seconds))
                while not draining.done() and not self.force_exit:
                    await asyncio.sleep(0.02)
                if draining.cancel():
                    app.state.server.abort()
                await super().shutdown(sockets)

        config = uvicorn.Config(
            app,
            http=protocol_with_timeout(server.header_seconds),
            log_level=server.log_level,
            access_log=False,
            server_header=False,
            lifespan="off",  # the application has no events of its own, and uvicorn logs their end at a second Ctrl-C
            timeout_graceful_shutdown=5,  # after the drain: clients that do not read the rest
            timeout_keep_alive=30,
        )
        with _expected_sigterm():
            Server(config).run(sockets=[listener])


@contextlib.contextmanager
def _expected_sigterm() -> Iterator[None]:
    """Lets the process go on after uvicorn has shut down: it sends itself the signal again, which would kill it."""
    if threading.current_thread() is not threading.main_thread():  # where uvicorn takes no signals
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Shows how many programs are compiled: a bar on a terminal, elsewhere a line at the end."""
    import rich.console
    from rich.progress import Progress

    console, begin, done = rich.console.Console(stderr=True), time.perf_counter(), [0]
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("compiling")

        def show(count: int, total: int) -> None:
            done[0] = count
            bar.update(task, completed=count, total=total)

        yield show
    _tell(f"mtpjax serve: {done[0]} programs in {time.perf_counter() - begin:.0f} s", sys.stderr)


def _tell(line: str, stream: TextIO) -> None:
    """Prints a line. A full disk, or a reader that is gone, must not stop the server."""
    with contextlib.suppress(OSError):
        print(line, file=stream, flush=True)
