"""Writes the output of a regeneration, a JSONL file that grows by whole windows of records, and its manifest.

The manifest `NAME.about.json` records the settings that the file is written with, the number of bytes in complete
windows, and the digest of those bytes. An interrupted run continues from the manifest.
"""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mtpjax.atomic import write_text
from mtpjax.data.jsonl_writer import JsonlWriter
from mtpjax.errors import printable
from mtpjax.messages import count_of
from mtpjax.safe_open import read_json_file

FORMAT = "mtpjax-regenerated"
SKIP_REASONS = ("corrupt", "empty", "too long", "unreadable")
MAX_MANIFEST_BYTES = 1 << 20


@dataclasses.dataclass
class Tally:
    """The counts of a regeneration so far. `rounds` and `accepted` are counted as in `DecodeStats`.

    Attributes:
        read: records read.
        regenerated: records written.
        cut: regenerated conversations whose last turns did not fit.
        skipped: skipped records by reason.
        finished: answers by finish reason.
        changed: answers whose text training will not tokenize into the decoded tokens.
        tokens: decoded tokens.
        rounds: verification passes.
        accepted: accepted draft tokens.
        seconds: time spent on reading, compiling and decoding.
    """

    read: int = 0
    regenerated: int = 0
    cut: int = 0
    skipped: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(SKIP_REASONS, 0))
    finished: dict[str, int] = dataclasses.field(default_factory=lambda: {"stop": 0, "length": 0})
    changed: int = 0
    tokens: int = 0
    rounds: int = 0
    accepted: int = 0
    seconds: float = 0.0

    @property
    def accept_length(self) -> float:
        """Mean tokens per round, including the bonus token."""
        return 1 + self.accepted / self.rounds if self.rounds else float("nan")

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else float("nan")

    def __str__(self) -> str:
        skipped = ", ".join(f"{count} {reason}" for reason, count in self.skipped.items() if count)
        answers = ", ".join(f"{count} ended by {reason}" for reason, count in self.finished.items())
        return (
            f"{count_of(self.read, 'record')}: {self.regenerated} regenerated"
            + (f" ({self.cut} of them cut)" if self.cut else "")
            + f", {sum(self.skipped.values())} skipped"
            + (f" ({skipped})" if skipped else "")
            + f"; {sum(self.finished.values())} answers ({answers})"
            + (f", {self.changed} tokenized differently by training" if self.changed else "")
            + f"; accept length {self.accept_length:.2f}, {self.tokens} tokens, {self.tokens_per_second:.0f} tokens/s"
        )


def manifest_path(path: pathlib.Path) -> pathlib.Path:
    """Returns the path of the manifest, which is next to the records at `path`."""
    return path.with_name(f"{path.name}.about.json")


class RegenerationOutput:
    """The records at `path` and their manifest.

    Attributes:
        settings: the settings as JSON values, so that they compare equal to stored ones.
        kind: "chat" or "jsonl", the `Source.kind` with which training reads the records.
        digest: sha256 of the bytes written so far.
    """

    def __init__(self, writer: JsonlWriter, settings: Mapping[str, Any], kind: str):
        self.path, self.manifest_path, self.writer = writer.path, manifest_path(writer.path), writer
        self.settings, self.kind, self.tally = json.loads(json.dumps(dict(settings))), kind, Tally()
        self.digest = hashlib.sha256()

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Appends a window of records.

        If the process is killed during the call, the next run cuts off the bytes that the manifest does not count.
        """
        # Write the records before the manifest that counts them. `resume` cuts off uncounted records.
        self.digest.update(self.writer.append(records))
        self.write_manifest()

    def write_manifest(self) -> None:
        """Writes the settings, the counts, the number of bytes in complete windows, and the digest of those bytes."""
        written = {"bytes": self.writer.size, "sha256": self.digest.hexdigest()}
        manifest = {"format": FORMAT, "source": {"path": self.path.name, "kind": self.kind}, "written": written}
        manifest |= {"tally": dataclasses.asdict(self.tally), "settings": self.settings}
        write_text(self.manifest_path, json.dumps(manifest, indent=1) + "\n")

    def resume(self) -> None:
        """Continues from the manifest. Reads its counts, and cuts off the bytes that were written after it."""
        # Read the manifest. Any failure means that it cannot be trusted.
        advice = f"remove it and {self.manifest_path.name}, or choose a different output"
        try:
            stored = read_json_file(self.manifest_path, max_bytes=MAX_MANIFEST_BYTES)
            stored_settings, tally, written = dict(stored["settings"]), Tally(**stored["tally"]), stored["written"]
            size, digest = int(written["bytes"]), written["sha256"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.manifest_path} is damaged: {error}") from error
        # Records made with different settings must not be mixed. While there are no records, settings may change.
        changed = [
            f"{name} was {printable(repr(before), 80)}, is {printable(repr(now), 80)}"
            for name in sorted({*stored_settings, *self.settings})
            if (before := stored_settings.get(name)) != (now := self.settings.get(name))
        ]
        if changed and tally.read:
            raise ValueError(
                f"{self.path} was written with different settings: {'; '.join(changed)}. To start over, {advice}"
            )
        # Check that the bytes that the manifest counts are unchanged, because another program may have edited them.
        num_left = size
        with self.path.open("rb") as file:
            while part := file.read(min(num_left, 1 << 20)):
                self.digest.update(part)
                num_left -= len(part)
        if self.digest.hexdigest() != digest:
            raise ValueError(f"{self.path} was changed after it was written: {advice}")
        # Drop a window that was written after the manifest, and continue with the manifest's counts.
        self.writer.truncate(size)
        self.tally = tally


@contextlib.contextmanager
def open_output(path, settings: Mapping[str, Any], kind: str) -> Iterator[RegenerationOutput]:
    """Opens the records at `path`. Starts a new file, or continues an existing one after its last complete window."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with JsonlWriter(path) as writer:
        output = RegenerationOutput(writer, settings, kind)
        # Continue if there is a manifest; reject records without a manifest; otherwise start a new file.
        if output.manifest_path.exists():
            output.resume()
        elif writer.size:
            raise ValueError(
                f"{path} exists without its manifest {output.manifest_path.name}: choose a different output"
            )
        else:
            output.write_manifest()
        yield output
