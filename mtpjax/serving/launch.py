"""Starts a server: loads the model, compiles, opens the port, and shuts down in order."""

import contextlib
import gc
import logging
import socket
import sys
import time
from collections.abc import Callable, Iterator

from fastapi import FastAPI

from mtpjax.messages import count_of
from mtpjax.serving.api.server import ApiServer
from mtpjax.serving.engine import Engine
from mtpjax.serving.http_server import address_of, run_app, tell
from mtpjax.serving.memory import explain_full_memory
from mtpjax.serving.metric_names import WATCHDOG
from mtpjax.serving.metrics import Metrics
from mtpjax.serving.multihost.connection import Followers
from mtpjax.serving.server_settings import ServerSettings
from mtpjax.serving.watchdog import Watchdog

ERROR_SECONDS = 1.0  # time for clients to receive their errors before the process ends

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def running_engine(
    make_engine: Callable[..., Engine],
    *,
    server: ServerSettings,
    model_name: str,
    followers: Followers | None = None,
    report: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Iterator[tuple[Engine, Metrics]]:
    """Starts an engine and its metrics. On exit, waits up to `drain_seconds` for requests, and stops the engine.

    If one of `followers` is lost, running requests end with an error, and this process ends. `make_engine` is called
    with `Engine`'s arguments `observe` and `followers`. `report` is called with the current stage and its progress.
    """
    with explain_full_memory("lower --max-total-tokens, --max-running-requests or --chunked-prefill-size"):
        engine = make_engine(observe=lambda *end: metrics.observe(*end), followers=followers)
        metrics = Metrics(engine.status, model_name=model_name)
        begin, num_programs = time.perf_counter(), 0

        def progress(done: int, total: int) -> None:
            nonlocal num_programs
            num_programs = total
            report("compiling", done, total)

        engine.warm_up(progress, server.warm_up)
        if num_programs:
            tell(f"mtpjax serve: {num_programs} programs in {time.perf_counter() - begin:.0f} s", sys.stderr)
    # Everything loaded now lives as long as the server. Garbage collection stops all threads, so it should not scan
    # these objects.
    gc.collect()
    gc.freeze()
    engine.start()
    if followers is not None:

        def fail(message: str) -> None:
            engine.fail(message)
            time.sleep(ERROR_SECONDS)

        followers.before_exit = fail
    watchdog = None
    if server.watchdog_seconds is not None:
        watchdog = Watchdog(lambda: engine.busy_since, server.watchdog_seconds)
        metrics.more_counters[WATCHDOG] = lambda: watchdog.num_slow
    try:
        yield engine, metrics
    finally:
        if not engine.close(timeout=server.drain_seconds):
            _log.warning("requests were still running after %.0f s and were aborted", server.drain_seconds)
        if watchdog is not None:
            watchdog.stop()


def serve(
    app: FastAPI, engine: Engine, server: ServerSettings, *, listener: socket.socket, loading: contextlib.ExitStack
) -> None:
    """Serves requests until SIGTERM or Ctrl-C, or until a process of `engine.followers` requests a shutdown.

    Args:
        app: from `make_app`.
        engine: the application's engine, which has been started.
        server: settings of the process.
        listener: the open port.
        loading: closed just before the application takes over the port from `open_port`.
    """
    state: ApiServer = app.state.server
    drafter = state.settings.server_info.get("speculative_algorithm")
    line = (
        f"mtpjax serve: {state.settings.model_name} is ready at {address_of(listener)}: "
        f"{count_of(engine.settings.num_slots, 'slot')} of up to {engine.max_length} tokens, "
        f"{count_of(engine.status().num_pages, 'page')} of {engine.settings.page_size}, "
        f"{f'drafts by {drafter}' if drafter else 'no drafts'}"
    )
    loading.close()
    run_app(
        app,
        listener,
        line,
        lambda: state.drain(server.drain_seconds),
        state.client.abort,
        header_seconds=server.header_seconds,
        should_stop=None if engine.followers is None else engine.followers.should_drain,
    )
