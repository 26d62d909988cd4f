"""Compiles an engine's programs before and while requests run. Requests wait until their programs are compiled."""

import contextlib
from collections.abc import Callable

from mtpjax.serving.background import BackgroundCompiler
from mtpjax.serving.inbox import Inbox
from mtpjax.serving.program_set import ProgramKey, split_rows
from mtpjax.serving.programs import Programs
from mtpjax.serving.request import QueueFull, Sequence
from mtpjax.serving.server_settings import WarmUp


class Compilation:
    """Compiles an engine's programs, and tracks the requests that wait for them.

    Args:
        enter: called in the engine's thread with a request and an error message. The message is "" once the request's
            programs are ready, and says what went wrong if they cannot be compiled.

    Attributes:
        held: requests that wait for a program, by id.
        num_held: number of requests that have waited for a program since the start.
    """

    def __init__(self, programs: Programs, inbox: Inbox, enter: Callable[[Sequence, str], None]):
        self._programs, self._inbox, self._enter = programs, inbox, enter
        self.held: dict[int, Sequence] = {}
        self.num_held = 0
        self._later: list[ProgramKey] = []
        self._errors: dict[ProgramKey, Exception] = {}
        self._compiler: BackgroundCompiler | None = None

    @property
    def num_left(self) -> int:
        """Number of programs that the thread has not compiled yet."""
        return 0 if self._compiler is None else self._compiler.num_left

    def warm_up(self, progress: Callable[[int, int], None], programs: WarmUp) -> None:
        """Compiles programs before requests run; see `Engine.warm_up`."""
        session = self._programs.session
        settings = session.settings
        is_measured = settings.adapts_depth and settings.depth_costs is None
        has_thread = session.announce is None and settings.rebalance_experts_every is None and not is_measured
        if has_thread and programs != "all":
            first = self._programs.first() if programs == "first" else []
            self._programs.warm_up(progress, first)
            self._programs.available.ready = set(first)
            self._programs.available.on_missing = self._want
            if programs == "first":
                self._later = [key for key in self._programs.all() if key not in first]
                session.planned = set(self._later)
        elif programs != "none":
            self._programs.warm_up(progress)

    def start(self) -> None:
        """Starts the thread that compiles the remaining programs, if there are any."""
        if self._programs.available.ready is not None:
            self._compiler = BackgroundCompiler(self._later, self._compile, self._end_compiling)

    def stop(self) -> None:
        if self._compiler is not None:
            self._compiler.stop()

    # In the engine's thread.

    def add(self, sequence: Sequence) -> None:
        """Passes a request to `enter` once the programs that it needs to run alone are compiled."""
        if self._enter_if_ready(sequence):
            return
        self.held[sequence.id] = sequence
        self.num_held += 1
        for key in self._missing(sequence):
            self._want(key)

    def split(self, kind: str, rows: list[Sequence], depth: int = 0) -> list[list[Sequence]]:
        """Splits the rows of a call if no compiled program has enough rows."""
        if not rows or self._programs.available.ready is None:
            return [rows] if rows else []
        return split_rows(rows, self._programs.choose(kind, rows, depth).size, lambda row: row.shard)

    def has_depth(self, depth: int) -> bool:
        """Returns whether a program for this number of draft levels is ready; if not, it is compiled next."""
        available, sizes = self._programs.available, self._programs.session.sizes
        if available.ready is None or depth == sizes.depths[0]:
            return True
        size, width = sizes.batch_sizes[0], sizes.table_widths[-1]
        kinds = ("advance", "masked round") if self._programs.grammars is not None else ("advance",)
        missing = available.missing([ProgramKey(kind, size, width, False, depth) for kind in kinds])
        for key in missing:
            self._want(key)
        return not missing

    def _enter_if_ready(self, sequence: Sequence) -> bool:
        missing = self._missing(sequence)
        errors = [self._errors[key] for key in missing if key in self._errors]
        if missing and not errors:
            return False
        self._enter(sequence, f"the request's program does not compile: {errors[0]}" if errors else "")
        return True

    def _missing(self, sequence: Sequence) -> list[ProgramKey]:
        return self._programs.available.missing(self._programs.needed(sequence))

    def _want(self, key: ProgramKey) -> None:
        if self._compiler is not None:
            self._compiler.want(key)

    # In the compiler's thread.

    def _compile(self, key: ProgramKey) -> None:
        """Compiles a program. Its first call runs between ticks."""
        self._programs.compile(key, self._inbox.ask)

    def _end_compiling(self, key: ProgramKey, error: Exception | None) -> None:
        """Lets requests that wait for a program continue."""

        def end() -> None:
            available = self._programs.available
            if error is not None:
                self._errors[key] = error
            elif available.ready is not None:
                available.ready.add(key)
                # Once all programs are compiled, calls no longer need to check.
                if available.ready.issuperset(self._programs.all()):
                    available.ready = None
            for sequence in list(self.held.values()):
                if self._enter_if_ready(sequence):
                    self.held.pop(sequence.id, None)

        with contextlib.suppress(QueueFull):
            self._inbox.post(end)
