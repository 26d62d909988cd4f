"""The result of reading a body, which a separate process returns as JSON."""

import base64
import dataclasses
from array import array
from typing import Any


@dataclasses.dataclass(frozen=True)
class Reading:
    """The part of a checked body that the event loop needs.

    Attributes:
        body: the JSON object without prompts, messages and tools. Its size is limited.
        prompts: token ids of each prompt.
        texts: the prompts' texts if the response repeats them, or the complete body of the response.
        param: name of the field with the prompts.
        is_batch: whether the prompts were given as a list, even if the list has only one entry.
    """

    body: dict[str, Any]
    prompts: tuple[tuple[int, ...], ...] = ()
    texts: tuple[str, ...] = ()
    param: str = ""
    is_batch: bool = False

    def to_json(self) -> dict[str, Any]:
        prompts = [base64.b64encode(array("i", prompt).tobytes()).decode() for prompt in self.prompts]
        return vars(self) | {"prompts": prompts}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Reading":
        prompts = tuple(tuple(array("i", base64.b64decode(prompt))) for prompt in values["prompts"])
        return cls(**{**values, "prompts": prompts, "texts": tuple(values["texts"])})
