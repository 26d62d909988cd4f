"""Turns a server into a prefill server or a decode server."""

from fastapi import FastAPI

from mtpjax.serving.disaggregation.prefill_routes import prefill_router
from mtpjax.serving.disaggregation.protocol import DisaggregationSettings, Signer
from mtpjax.serving.disaggregation.remote_prefill import RemotePrefill
from mtpjax.serving.disaggregation.transfer import HttpTransfer, JaxTransfer, own_address
from mtpjax.serving.engine import Engine
from mtpjax.serving.metric_names import PREFILL_FALLBACKS, REMOTE_PREFILLS
from mtpjax.serving.metrics import Metrics


def set_up(app: FastAPI, engine: Engine, settings: DisaggregationSettings, metrics: Metrics | None = None) -> None:
    """Adds the prefill server's route to an application, or the decode server's step before each request.

    Args:
        app: from `make_app`.
        engine: the application's engine, with pages in host memory.
        settings: settings of a prefill server or of a decode server.
        metrics: receives the decode server's counters, if given.

    Raises:
        ValueError: the engine shares no pages, or the data plane cannot start.
    """
    if not engine.pages.is_supported:
        raise ValueError(
            "disaggregation needs a prefix cache with pages in host memory, which requires a single device and a model "
            "without linear attention"
        )
    # Messages are signed with the secret, and servers can exchange pages only if they have the same model.
    signer, model = Signer(settings.secret), engine.pages.digest()
    server = app.state.server
    is_jax = settings.backend == "jax"
    # A prefill server gets an additional route, which computes and offers pages.
    if settings.prefill_url is None:
        transfer = JaxTransfer(own_address(settings.host), settings.port) if is_jax else HttpTransfer()
        app.include_router(prefill_router(server, engine.pages, signer, model, transfer))
        return
    # A decode server fetches pages before a request enters the engine.
    remote = RemotePrefill(
        engine.pages,
        settings.prefill_url,
        signer=signer,
        model=model,
        transfer=JaxTransfer() if is_jax else HttpTransfer(),
        timeout=settings.timeout,
        max_concurrent=engine.settings.num_slots,
    )
    server.prepare = remote.prepare
    if metrics is not None:
        metrics.more_counters[REMOTE_PREFILLS] = lambda: remote.num_fetched
        metrics.more_counters[PREFILL_FALLBACKS] = lambda: remote.num_fallbacks
