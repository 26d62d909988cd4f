"""The load of an engine, and its counts since the start."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class EngineStatus:
    """The engine's load and its counts since the start.

    Attributes:
        num_running: requests in slots, including prefill.
        num_waiting: requests in the queue.
        num_slots: maximum number of running requests.
        num_used_pages: pages of running requests.
        page_size: positions per page.
        num_prompt_tokens: tokens of prompts that were prefilled or found in the prefix cache.
        num_cached_tokens: prompt tokens that were found in the prefix cache.
        num_new_tokens: tokens delivered.
        num_requests: requests that ended.
        num_aborted: requests that were aborted or timed out.
        num_failed: requests that ended with an error.
        num_nan_logits: requests that ended because the model computed NaN.
        num_preempted: times that a request gave up its pages and waited again.
        num_received_pages: pages of the prefix cache that came from a prefill server.
        num_ticks: scheduler iterations that called the device.
        num_steps: verification passes of all rows.
        proposed: for each draft level, the number of passes that drafted it.
        accepted: for each draft level, the number of passes that accepted it.
        num_compilations: programs compiled since the engine was ready.
        compile_seconds: time spent compiling, at the start and later.
        num_programs_left: programs that a thread has yet to compile while requests run.
        num_compile_waits: requests that have waited for a program.
        num_rebalancings: times that experts moved.
        expert_imbalance: as in `ExpertRebalancer.imbalance`; also nan if the server never moves experts.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_slots: int = 0
    num_pages: int = 0
    num_used_pages: int = 0
    page_size: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_new_tokens: int = 0
    num_requests: int = 0
    num_aborted: int = 0
    num_failed: int = 0
    num_nan_logits: int = 0
    num_preempted: int = 0
    num_received_pages: int = 0
    num_ticks: int = 0
    num_steps: int = 0
    proposed: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    num_compilations: int = 0
    compile_seconds: float = 0.0
    num_programs_left: int = 0
    num_compile_waits: int = 0
    num_rebalancings: int = 0
    expert_imbalance: tuple[float, float] = (math.nan, math.nan)

    @property
    def accept_length(self) -> float:
        """Mean tokens per verification pass, including the bonus token; nan if there were no passes."""
        return 1 + self.num_accepted / self.num_steps if self.num_steps else float("nan")

    @property
    def token_usage(self) -> float:
        """Share of the pages in use, 0 to 1."""
        return self.num_used_pages / self.num_pages if self.num_pages else 0.0

    @property
    def num_used_tokens(self) -> int:
        return self.num_used_pages * self.page_size

    @property
    def num_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def num_proposed(self) -> int:
        return sum(self.proposed)

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted)

    @property
    def accept_rate(self) -> float:
        """Accepted drafts per proposed draft; nan if there were no drafts."""
        return self.num_accepted / (self.num_proposed or math.nan)

    @property
    def imbalance_before(self) -> float:
        return self.expert_imbalance[0]

    @property
    def imbalance_after(self) -> float:
        return self.expert_imbalance[1]
