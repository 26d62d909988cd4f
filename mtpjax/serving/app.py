"""The HTTP application, which serves OpenAI's and SGLang's routes and a web page from one engine."""

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.responses import Response

from mtpjax.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from mtpjax.serving.api import schemas
from mtpjax.serving.api.admin_routes import admin_router
from mtpjax.serving.api.engine_client import Engine
from mtpjax.serving.api.errors import ApiError
from mtpjax.serving.api.health_routes import health_router
from mtpjax.serving.api.http import RequestGuard, error_handler
from mtpjax.serving.api.openai_routes import openai_router
from mtpjax.serving.api.page_routes import page_router
from mtpjax.serving.api.readers import Readers
from mtpjax.serving.api.reading import BodyReader
from mtpjax.serving.api.server import ApiServer
from mtpjax.serving.api.settings import ApiSettings
from mtpjax.serving.api.sglang_routes import generate_router
from mtpjax.serving.metrics import Metrics
from mtpjax.serving.request import QueueFull
from mtpjax.version import __version__


def make_app(engine: Engine, tokenizer: Tokenizer, settings: ApiSettings, metrics: Metrics | None = None) -> FastAPI:
    """Makes the ASGI application.

    If there are API keys, every path except those in `settings.open_paths` requires one. `app.state.server` is the
    `ApiServer`, whose `drain` method rejects new requests and waits for running ones.

    Args:
        engine: generates the tokens.
        tokenizer: the model's tokenizer.
        settings: settings of the API.
        metrics: the metrics served at `/metrics`; if None, that path does not exist.
    """
    server = ApiServer(engine, tokenizer, settings)
    # A reader process may be unable to import the class of another tokenizer, so threads read the bodies then.
    num_readers = settings.num_readers if type(tokenizer) in (ByteTokenizer, HuggingFaceTokenizer) else 0
    server.readers = Readers(BodyReader(tokenizer, server.limits, settings.strict_fields), num_readers)

    # FastAPI's documentation pages would load scripts from other sites, so only the schema is served.
    app = FastAPI(
        title="mtpjax",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=schemas.ERRORS,
        exception_handlers={each: error_handler for each in (ApiError, QueueFull, HTTPException)},
    )
    app.state.server = server
    for make_router in (openai_router, generate_router, admin_router, health_router, page_router):
        app.include_router(make_router(server))
    if metrics is not None:

        @app.get("/metrics", response_class=Response)
        def read_metrics() -> Response:
            """Returns the metrics, for Prometheus."""
            body, content_type = metrics.render()
            return Response(body, media_type=content_type)

    app.add_middleware(RequestGuard, settings=settings)
    return app
