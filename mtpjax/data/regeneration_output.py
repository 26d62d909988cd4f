"""What a regeneration leaves: a JSONL file that grows by whole windows, and beside it what it is and how far it is."""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mtpjax.atomic import write_text
from mtpjax.data.jsonl_writer import JsonlWriter
from mtpjax.data.regeneration_tasks import REASONS

FORMAT = "mtpjax-regenerated"


@dataclasses.dataclass
class Tally:
    """What was done so far. `seconds` are those of reading, compiling and decoding; steps as in `DecodeStats`."""

    read: int = 0  # records
    regenerated: int = 0
    cut: int = 0  # of them, conversations whose last turns had no room
    skipped: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    finished: dict[str, int] = dataclasses.field(default_factory=lambda: {"stop": 0, "length": 0})  # answers
    changed: int = 0  # of them, those that training will read as other tokens than were decoded
    tokens: int = 0
    steps: int = 0
    accepted: int = 0
    seconds: float = 0.0

    @property
    def accept_length(self) -> float:
        return 1 + self.accepted / self.steps if self.steps else float("nan")

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else float("nan")

    def __str__(self) -> str:
        skipped = ", ".join(f"{count} {reason}" for reason, count in self.skipped.items() if count)
        answers = ", ".join(f"{count} by {reason}" for reason, count in self.finished.items())
        return (
            f"{self.read} records: {self.regenerated} regenerated"
            + (f" ({self.cut} of them cut)" if self.cut else "")
            + f", {sum(self.skipped.values())} skipped"
            + (f" ({skipped})" if skipped else "")
            + f"; {sum(self.finished.values())} answers, ended {answers}"
            + (f", {self.changed} read as other tokens by training" if self.changed else "")
            + f"; accept length {self.accept_length:.2f}, {self.tokens} tokens, {self.tokens_per_second:.0f} tokens/s"
        )


def about_path(path: pathlib.Path) -> pathlib.Path:
    """The file beside the records at `path`."""
    return path.with_name(f"{path.name}.about.json")


class Output:
    """Records in the file at `path`; `tally` is how far they are."""

    def __init__(self, writer: JsonlWriter, settings: Mapping[str, Any], kind: str):
        self.path, self.about_path, self.writer = writer.path, about_path(writer.path), writer
        self.settings, self.kind, self.tally = json.loads(json.dumps(dict(settings))), kind, Tally()
        self.digest = hashlib.sha256()

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Adds a window; a process that ends on the way leaves what the next one cuts off. Raises `OSError`."""
        # The records reach the disk before the note that counts them: `go_on` cuts off what the note does not count.
        self.digest.update(self.writer.append(records))
        self.note()

    def note(self) -> None:
        """Writes down what the file is, and how far."""
        written = {"bytes": self.writer.size, "sha256": self.digest.hexdigest()}
        about = {"format": FORMAT, "source": {"path": self.path.name, "kind": self.kind}, "written": written}
        about |= {"tally": dataclasses.asdict(self.tally), "settings": self.settings}
        write_text(self.about_path, json.dumps(about, indent=1) + "\n")

    def go_on(self) -> None:
        """Takes up what `note` wrote, and cuts off what came behind. Raises `ValueError`, see `open_output`."""
        advice = f"remove it and {self.about_path.name}, or choose another output"
        try:
            stored = json.loads(self.about_path.read_bytes())
            before, tally, written = dict(stored["settings"]), Tally(**stored["tally"]), stored["written"]
            size = left = int(written["bytes"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.about_path} is damaged: {error}") from error
        changed = [
            f"{name} was {_short(before.get(name))}, is {_short(self.settings.get(name))}"
            for name in sorted({*before, *self.settings})
            if before.get(name) != self.settings.get(name)
        ]
        if changed and tally.read:
            raise ValueError(f"{self.path} was begun otherwise: {'; '.join(changed)}. To begin anew, {advice}")
        # The bytes that the note counts must be those that were written; another program may have edited them.
        with self.path.open("rb") as file:
            while part := file.read(min(left, 1 << 20)):
                self.digest.update(part)
                left -= len(part)
        if self.digest.hexdigest() != written["sha256"]:
            raise ValueError(f"{self.path} is not what was written to it: {advice}")
        self.writer.truncate(size)
        self.tally = tally


@contextlib.contextmanager
def open_output(path, settings: Mapping[str, Any], kind: str) -> Iterator[Output]:
    """Begins the file at `path`, or goes on with it where its last window ended.

    Raises `ValueError` where it is something else, was begun with other settings or data (each is named), has been
    changed since, or is being written to by another process.
    """
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with JsonlWriter(path) as writer:
        output = Output(writer, settings, kind)
        if output.about_path.exists():
            output.go_on()
        elif writer.size:
            raise ValueError(f"{path} exists, and no {output.about_path.name} beside it: choose another output")
        else:
            output.note()
        yield output


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
