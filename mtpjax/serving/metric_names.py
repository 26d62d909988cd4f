"""The names of the server's metrics, ours beside SGLang's and vLLM's, and how `EngineStatus` gives each."""

import dataclasses
import math
from collections.abc import Callable, Iterator

from mtpjax.serving.request import EngineStatus

ALIASES = ("sglang", "vllm")


@dataclasses.dataclass(frozen=True)
class Names:
    """The names of one metric without prefix: ours, SGLang's and vLLM's. Empty: they have no such metric."""

    ours: str
    sglang: str
    vllm: str
    help: str

    def full(self, aliases: tuple[str, ...]) -> Iterator[str]:
        yield f"mtpjax:{self.ours}"
        yield from (f"{prefix}:{name}" for prefix in aliases if (name := getattr(self, prefix)))


# Read from `EngineStatus` at scrape time. Prometheus adds "_total" to the names of counters.
GAUGES: dict[Names, Callable[[EngineStatus], float]] = {
    Names("num_running_reqs", "num_running_reqs", "num_requests_running", "Requests in slots, prefill included."): (
        lambda status: status.num_running
    ),
    Names("num_queue_reqs", "num_queue_reqs", "num_requests_waiting", "Requests in the queue."): (
        lambda status: status.num_waiting
    ),
    Names("max_running_reqs", "", "", "Slots: most requests that run at the same time."): (
        lambda status: status.num_slots
    ),
    Names("token_usage", "token_usage", "kv_cache_usage_perc", "Share of the KV cache's pages in use, 0 to 1."): (
        lambda status: status.num_used_pages / status.num_pages if status.num_pages else 0.0
    ),
    Names("kv_used_tokens", "num_used_tokens", "", "Positions of the KV cache's pages in use."): (
        lambda status: status.num_used_pages * status.page_size
    ),
    Names("max_total_num_tokens", "max_total_num_tokens", "", "Positions of all pages of the KV cache."): (
        lambda status: status.num_pages * status.page_size
    ),
    Names("spec_accept_length", "spec_accept_length", "", "Mean tokens per verification pass, bonus token included."): (
        lambda status: status.accept_length
    ),
    Names("spec_accept_rate", "spec_accept_rate", "", "Accepted drafts per proposed draft."): (
        lambda status: sum(status.accepted) / sum(status.proposed) if sum(status.proposed) else math.nan
    ),
    Names("programs_left", "", "", "Programs that are still to be compiled while requests run."): (
        lambda status: status.num_programs_left
    ),
    Names(
        "expert_imbalance_before", "", "", "Busiest device's expert load over the mean, before the last placement."
    ): (lambda status: status.expert_imbalance[0]),
    Names("expert_imbalance", "", "", "Busiest device's expert load over the mean, with the last placement."): (
        lambda status: status.expert_imbalance[1]
    ),
}
COUNTERS: dict[Names, Callable[[EngineStatus], float]] = {
    Names("prompt_tokens", "prompt_tokens", "prompt_tokens", "Tokens of prompts, prefilled or found in the cache."): (
        lambda status: status.num_prompt_tokens
    ),
    Names("cached_tokens", "cached_tokens", "prefix_cache_hits", "Tokens of prompts found in the prefix cache."): (
        lambda status: status.num_cached_tokens
    ),
    Names("prefix_cache_queries", "", "prefix_cache_queries", "Tokens of prompts looked up in the prefix cache."): (
        lambda status: status.num_prompt_tokens
    ),
    Names("generation_tokens", "generation_tokens", "generation_tokens", "Tokens delivered."): (
        lambda status: status.num_new_tokens
    ),
    Names("num_requests", "num_requests", "", "Requests that ended."): lambda status: status.num_requests,
    Names("num_aborted_requests", "num_aborted_requests", "", "Requests aborted by client or time limit."): (
        lambda status: status.num_aborted
    ),
    Names("num_failed_requests", "", "", "Requests that ended with an error."): lambda status: status.num_failed,
    Names("nan_logits", "", "", "Requests that ended because the model computed NaN."): (
        lambda status: status.num_nan_logits
    ),
    Names("num_preemptions", "", "num_preemptions", "Times that a request gave up its pages and waited again."): (
        lambda status: status.num_preempted
    ),
    Names("received_pages", "", "", "Pages of the prefix cache that came from a prefill server."): (
        lambda status: status.num_received_pages
    ),
    Names("num_rebalancings", "", "", "Times that the experts were moved."): (lambda status: status.num_rebalancings),
    Names("num_ticks", "", "", "Iterations of the scheduler that called the device."): lambda status: status.num_ticks,
    Names("compile", "", "", "Programs compiled since the engine was ready."): lambda status: status.num_compilations,
    Names("compile_seconds", "", "", "Seconds of compiling programs, at the start and since."): (
        lambda status: status.compile_seconds
    ),
    Names("compile_waits", "", "", "Requests that waited for a program."): lambda status: status.num_compile_waits,
    Names("spec_verify_calls", "spec_verify_calls", "", "Verification passes of all rows."): (
        lambda status: status.num_steps
    ),
    # vLLM's accept length is 1 + accepted tokens / drafts, so each pass counts as a draft.
    Names("spec_decode_num_drafts", "", "spec_decode_num_drafts", "Verification passes of all rows."): (
        lambda status: status.num_steps
    ),
    Names("spec_decode_num_draft_tokens", "", "spec_decode_num_draft_tokens", "Proposed drafts."): (
        lambda status: sum(status.proposed)
    ),
    Names("spec_decode_num_accepted_tokens", "", "spec_decode_num_accepted_tokens", "Accepted drafts."): (
        lambda status: sum(status.accepted)
    ),
}
# Counter of the watchdog.
WATCHDOG = Names("watchdog", "", "", "Iterations of the scheduler longer than half of the watchdog's timeout.")
# Counters of a decode server, read from its `RemotePrefill`.
REMOTE_PREFILLS = Names("remote_prefills", "", "", "Prompts whose pages came from the prefill server.")
PREFILL_FALLBACKS = Names("prefill_fallbacks", "", "", "Prompts prefilled here because the prefill server failed.")
ACCEPTED_PER_POSITION = Names(
    "spec_decode_num_accepted_tokens_per_pos",
    "",
    "spec_decode_num_accepted_tokens_per_pos",
    "Accepted drafts, by draft level.",
)
THROUGHPUT = Names("gen_throughput", "gen_throughput", "", "Tokens delivered per second since the previous scrape.")
FINISHED = Names("request_finished", "", "request_success", "Requests that ended, by reason.")

# Buckets in seconds and in tokens; Prometheus interpolates percentiles between their bounds.
TOKEN_SECONDS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.5, 1.0, 5.0)
REQUEST_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0)
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
TIME_TO_FIRST_TOKEN = Names(
    "time_to_first_token_seconds",
    "time_to_first_token_seconds",
    "time_to_first_token_seconds",
    "Arrival to first token.",
)
INTER_TOKEN_LATENCY = Names(
    "inter_token_latency_seconds",
    "inter_token_latency_seconds",
    "inter_token_latency_seconds",
    "Seconds per token after the first; tokens of one delivery share its time.",
)
E2E_LATENCY = Names(
    "e2e_request_latency_seconds",
    "e2e_request_latency_seconds",
    "e2e_request_latency_seconds",
    "Arrival to last token.",
)
QUEUE_TIME = Names(
    "queue_time_seconds", "queue_time_seconds", "request_queue_time_seconds", "Arrival to first prefill."
)
PROMPT_TOKENS = Names("request_prompt_tokens", "", "request_prompt_tokens", "Tokens of a request's prompt.")
NEW_TOKENS = Names("request_generation_tokens", "", "request_generation_tokens", "Tokens delivered to a request.")
