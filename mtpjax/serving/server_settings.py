"""The settings of a server process. `EngineSettings` has those of its engine."""

import dataclasses
from typing import Literal

WarmUp = Literal["all", "first", "none"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of the server process.

    Attributes:
        watchdog_seconds: maximum duration of a call, after which the process ends; None means no limit.
        drain_seconds: time that running requests have to finish after SIGTERM.
        header_seconds: time within which a client must send the header of a request.
        warm_up: programs that are compiled before the server is ready; see `Engine.warm_up`.
    """

    watchdog_seconds: float | None = 300.0
    drain_seconds: float = 30.0
    header_seconds: float = 30.0
    warm_up: WarmUp = "first"
