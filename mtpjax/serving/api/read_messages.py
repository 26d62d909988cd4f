"""Messages to and from a process that reads bodies."""

import base64
import dataclasses
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from mtpjax.serving.api.errors import ApiError


@dataclasses.dataclass(frozen=True)
class Reading:
    """The part of a checked body that the event loop needs.

    Attributes:
        body: the JSON object without prompts, messages and tools. Its size is limited.
        prompts: token ids of each prompt.
        texts: of the prompts, if the response repeats them; or the body of the response.
        param: the field that gave the prompts.
        is_batch: there may be several prompts.
    """

    body: dict[str, Any]
    prompts: tuple[tuple[int, ...], ...] = ()
    texts: tuple[str, ...] = ()
    param: str = ""
    is_batch: bool = False


def out_of_memory(limit: int) -> ApiError:
    message = f"the request takes more than {limit >> 20} MiB of memory to read: send a shorter one"
    return ApiError(message, code="request_too_large")


def to_request(kind: str, parts: Sequence[bytes]) -> list[bytes]:
    return [b"%s %d\n" % (kind.encode(), sum(map(len, parts))), *parts]


def to_answer(read: Callable[[], Reading]) -> dict[str, Any]:
    """Reads a body, and returns the outcome as a JSON object."""
    try:
        reading = read()
    except ApiError as error:
        return {"error": [str(error), error.status, error.param, error.code, error.headers]}
    prompts = [base64.b64encode(array("i", prompt).tobytes()).decode() for prompt in reading.prompts]
    return vars(reading) | {"prompts": prompts}


def from_answer(answer: dict[str, Any]) -> Reading:
    if "error" in answer:
        message, status, param, code, headers = answer["error"]
        raise ApiError(message, status=status, param=param, code=code, headers=headers)
    if "fault" in answer:
        raise RuntimeError(f"a process that reads requests failed:\n{answer['fault']}")
    prompts = tuple(tuple(array("i", base64.b64decode(prompt))) for prompt in answer["prompts"])
    return Reading(**{**answer, "prompts": prompts, "texts": tuple(answer["texts"])})
