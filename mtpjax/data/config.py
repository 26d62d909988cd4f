"""Where training data comes from."""

import dataclasses
import math
from typing import Literal

from mtpjax.models.config import require, require_choice


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Where documents to train on come from.

    Attributes:
        path: a file, or a folder with its subfolders; None: the running interpreter's standard library.
        pattern: which files of a folder.
        kind: "text": each file is a document; "jsonl": each line is an object that holds one; "chat": each line's
            object holds a conversation, in OpenAI's form, of which only the answers are targets.
        field: where an object holds it; by default `text`, of conversations `messages`.
        weight: the source's share of the rows, beside the other sources' weights.
        most_skipped: how many documents may be of no use before reading stops with an error.
    """

    path: str | None = None
    pattern: str = "*"
    kind: Literal["text", "jsonl", "chat"] = "text"
    field: str = ""
    weight: float = 1.0
    most_skipped: int = 100

    def __post_init__(self):
        require_choice("kind", self.kind, ("text", "jsonl", "chat"))
        require(self.path is not None or self.kind == "text", f"a source of kind '{self.kind}' needs a path")
        require(0 < self.weight < math.inf, f"weight must be positive, not {self.weight}")
        require(self.most_skipped >= 0, f"most_skipped must not be negative, is {self.most_skipped}")
        if not self.field:
            object.__setattr__(self, "field", "messages" if self.kind == "chat" else "text")
