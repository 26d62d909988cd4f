"""The configuration of training data."""

import dataclasses
import math
from typing import Literal

from mtpjax.field_types import check_range, check_scalar_fields
from mtpjax.messages import require


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A source of training documents.

    Attributes:
        path: a file, a folder with its subfolders, or None for the running interpreter's standard library.
        pattern: glob pattern for the files in a folder. Hidden and binary files are left out and counted
            (`mtpjax.data.data_files`).
        kind: the contents of the files. "auto": the suffix decides. `.jsonl`, `.jsonl.gz`, `.json` (a list) and
            `.parquet` (with pyarrow) contain records, each a conversation or a text, and any other file is a document.
            "text": each file is a document. "jsonl": each record has a text. "chat": each record has a conversation in
            OpenAI, ShareGPT or Alpaca format, and its answers are the targets. "formatted": each record has a
            conversation that is already formatted by the chat template, and its answers are the targets.
        field: the record's field that contains the text or the conversation. "" means `text` for texts, and `messages`,
            `conversations` or `instruction` for conversations.
        weight: the source's share of the rows, relative to the other sources' weights.
        max_skipped: maximum number of unusable documents; with more, reading stops with an error.

    Raises:
        ValueError: the kind is unknown, the path is missing, a value is out of range, or a setting is unused.
    """

    path: str | None = None
    pattern: str = "*"
    kind: Literal["auto", "text", "jsonl", "chat", "formatted"] = "auto"
    field: str = ""
    weight: float = 1.0
    max_skipped: int = 100

    def __post_init__(self):
        check_scalar_fields(self)
        require(self.path is not None or self.kind in ("auto", "text"), f"a source of kind '{self.kind}' needs a path")
        require(0 < self.weight < math.inf, f"weight must be positive, not {self.weight}")
        check_range("max_skipped", self.max_skipped, 0)
        require(self.path is not None or self.pattern == "*", f"pattern '{self.pattern}' is unused: it needs a path")
        require(
            self.field in ("", "text") or self.kind != "text",
            f"field '{self.field}' is unused: kind 'text' has no records",
        )
        if not self.field and self.kind != "auto":
            object.__setattr__(self, "field", "messages" if self.kind == "chat" else "text")
