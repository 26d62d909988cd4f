"""Makes a server a prefill server or a decode server."""

import dataclasses
from urllib.parse import urlsplit

from fastapi import FastAPI

from mtpjax.serving.disaggregation.prefill_routes import PrefillService, prefill_router
from mtpjax.serving.disaggregation.protocol import Signer
from mtpjax.serving.disaggregation.remote_prefill import RemotePrefill
from mtpjax.serving.disaggregation.transfer import HttpTransfer, JaxTransfer, Transfer, own_address
from mtpjax.serving.engine import Engine
from mtpjax.serving.metric_names import PREFILL_FALLBACKS, REMOTE_PREFILLS
from mtpjax.serving.metrics import Metrics

PUBLIC_ADDRESS = "192.0.2.1"  # of no machine (RFC 5737): the way there is the default route


@dataclasses.dataclass(frozen=True, kw_only=True)
class DisaggregationSettings:
    """Settings of a prefill server or a decode server.

    Attributes:
        prefill_url: address of the prefill server, for a decode server; None: this is the prefill server.
        secret: what both servers share, at least 16 bytes.
        backend: how pages travel: "jax" or "http".
        host: address that the data plane listens on.
        port: the prefill server's port for pages; 0: a free one.
        timeout: seconds that a request waits for its pages.

    Raises:
        ValueError: the secret is too short.
    """

    prefill_url: str | None
    secret: bytes = dataclasses.field(repr=False)
    backend: str = "jax"
    host: str = "127.0.0.1"
    port: int = 0
    timeout: float = 30.0

    def __post_init__(self):
        Signer(self.secret)


def set_up(app: FastAPI, engine: Engine, settings: DisaggregationSettings, metrics: Metrics | None = None) -> None:
    """Adds the prefill server's route to an application, or the decode server's step before each request.

    Args:
        app: from `make_app`.
        engine: its engine, with pages in host memory.
        settings: which server this is.
        metrics: gets the decode server's counters; None: nothing counts.

    Raises:
        ValueError: the engine shares no pages, or the data plane does not start.
    """
    if not engine.shares_pages or not engine.settings.host_bytes:
        raise ValueError(
            "disaggregation needs a prefix cache with pages in host memory: one device, and a model without linear "
            "attention"
        )
    signer, model = Signer(settings.secret), engine.model_digest()
    server = app.state.server
    if settings.prefill_url is None:
        transfer = _make_transfer(settings, own_address(settings.host, PUBLIC_ADDRESS), settings.port)
        app.include_router(prefill_router(server, PrefillService(engine, signer, model, transfer)))
        return
    # Where clients reach this server may not be where the prefill server does.
    prefill_host = urlsplit(settings.prefill_url).hostname or ""
    transfer = _make_transfer(settings, own_address("", prefill_host), 0)
    remote = RemotePrefill(
        engine,
        settings.prefill_url,
        signer=signer,
        model=model,
        transfer=transfer,
        timeout=settings.timeout,
        max_concurrent=engine.settings.num_slots,
    )
    server.prepare = remote.prepare
    if metrics is not None:
        metrics.more_counters[REMOTE_PREFILLS] = lambda: remote.num_fetched
        metrics.more_counters[PREFILL_FALLBACKS] = lambda: remote.num_fallbacks


def _make_transfer(settings: DisaggregationSettings, host: str, port: int) -> Transfer:
    return JaxTransfer(host, port) if settings.backend == "jax" else HttpTransfer()
