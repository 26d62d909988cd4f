"""The HTTP application: OpenAI's and SGLang's routes over one engine."""

from fastapi import FastAPI
from starlette.exceptions import HTTPException

from mtpjax.data.tokenizer import Tokenizer
from mtpjax.serving.admin_routes import admin_router
from mtpjax.serving.api_errors import ApiError
from mtpjax.serving.api_server import ApiServer, ApiSettings, Engine, Observer
from mtpjax.serving.http import KeyCheck, error_handler
from mtpjax.serving.openai_routes import openai_router
from mtpjax.serving.sglang_routes import generate_router
from mtpjax.version import __version__


def make_app(engine: Engine, tokenizer: Tokenizer, settings: ApiSettings, observer: Observer | None = None) -> FastAPI:
    """Makes the application.

    Every path but `settings.open_paths` needs a key if there are keys. `app.state.server` is the `ApiServer`, through
    which the caller stops new requests and reports an engine that fails.

    Args:
        engine: makes the tokens.
        tokenizer: the model's.
        settings: of the API.
        observer: takes measurements, for metrics.

    Returns:
        An ASGI application, for uvicorn.
    """
    server = ApiServer(engine, tokenizer, settings, observer)

    # Pages of documentation would load scripts from elsewhere; the schema alone does not.
    app = FastAPI(
        title="mtpjax",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={each: error_handler for each in (ApiError, HTTPException, Exception)},
    )
    app.state.server = server
    for router in (openai_router(server), generate_router(server), admin_router(server)):
        app.include_router(router)
    app.add_middleware(KeyCheck, settings=settings)
    return app
