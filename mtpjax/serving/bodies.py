"""Steps that all routes with a body share."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from mtpjax.serving.api_errors import ApiError, shutting_down
from mtpjax.serving.api_server import ApiServer
from mtpjax.serving.fields import Field
from mtpjax.serving.http import read_json
from mtpjax.serving.protocol import Limits, reject_unknown, reject_unsupported


async def read_body(server: ApiServer, request: Request, fields: Mapping[str, Field]) -> dict[str, Any]:
    """Reads the body of a request that makes text.

    Args:
        server: state of the API.
        request: the request.
        fields: the table of its fields.

    Returns:
        The JSON object.

    Raises:
        ApiError: the server stops, the body is not acceptable, or it asks for an unsupported option.
    """
    if server.is_stopping:
        raise shutting_down()
    body = await read_json(request, server.settings)
    reject_unsupported(body)
    if server.settings.strict_fields:
        reject_unknown(body, fields)
    return body


def limits_of(server: ApiServer) -> Limits:
    """Returns what the engine's model allows."""
    return Limits(
        max_length=server.engine.max_length,
        vocab_size=server.engine.vocab_size,
        eos_token_ids=tuple(server.tokenizer.eos_token_ids),
        max_prompt_characters=server.max_prompt_characters,
        max_requests=server.settings.max_requests,
    )


def check_model(server: ApiServer, name: str | None) -> None:
    """Raises ApiError if a request names another model. No name means the one that is served."""
    settings = server.settings
    if name is not None and name not in (settings.model_name, *settings.model_aliases):
        raise ApiError("there is no model of this name", status=404, param="model", code="model_not_found")


def prefix_salt(request: Request, cache_salt: str | None) -> bytes:
    """Returns what a prompt's pages depend on besides its tokens: the client's key, and the salt that it gives."""
    return request.scope.get("prefix_salt", b"") + (cache_salt or "").encode()
