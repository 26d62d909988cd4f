"""mtpjax's, SGLang's and vLLM's names for the server's metrics."""

import dataclasses
from collections.abc import Iterator

PREFIX, ALIASES = "mtpjax", ("sglang", "vllm")


@dataclasses.dataclass(frozen=True)
class Names:
    """The names of one metric, without prefix. A name is empty if that engine has no such metric.

    Attributes:
        attribute: the `EngineStatus` attribute with the value; empty if the value comes from elsewhere.
    """

    attribute: str
    ours: str
    sglang: str
    vllm: str
    help: str

    def full(self, aliases: tuple[str, ...]) -> Iterator[str]:
        """Yields the names with prefix."""
        yield f"{PREFIX}:{self.ours}"
        yield from (f"{prefix}:{name}" for prefix in aliases if (name := getattr(self, prefix)))


def _one_name(name: str, help: str) -> Names:
    return Names("", name, name, name, help)


# Read from `EngineStatus` at scrape time. Prometheus adds "_total" to the names of counters.
GAUGES = (
    Names("num_running", "num_running_reqs", "num_running_reqs", "num_requests_running", "Requests in slots."),
    Names("num_waiting", "num_queue_reqs", "num_queue_reqs", "num_requests_waiting", "Requests in the queue."),
    Names("num_slots", "max_running_reqs", "", "", "Slots: maximum number of running requests."),
    Names("token_usage", "token_usage", "token_usage", "kv_cache_usage_perc", "Share of pages in use, 0 to 1."),
    Names("num_used_tokens", "kv_used_tokens", "num_used_tokens", "", "Positions in KV cache pages that are in use."),
    Names("num_tokens", "max_total_num_tokens", "max_total_num_tokens", "", "Positions in all KV cache pages."),
    Names("accept_length", "spec_accept_length", "spec_accept_length", "", "Mean tokens per verification pass."),
    Names("accept_rate", "spec_accept_rate", "spec_accept_rate", "", "Accepted drafts per proposed draft."),
    Names("num_programs_left", "programs_left", "", "", "Programs not compiled yet; they compile while requests run."),
    Names("imbalance_before", "expert_imbalance_before", "", "", "expert_imbalance before the last placement."),
    Names("imbalance_after", "expert_imbalance", "", "", "Expert load of the busiest device, divided by the mean."),
)
COUNTERS = (
    Names("num_prompt_tokens", "prompt_tokens", "prompt_tokens", "prompt_tokens", "Prompt tokens, cached or not."),
    Names(
        "num_cached_tokens", "cached_tokens", "cached_tokens", "prefix_cache_hits", "Prompt tokens found in the cache."
    ),
    Names("num_prompt_tokens", "prefix_cache_queries", "", "prefix_cache_queries", "Prompt tokens looked up."),
    Names("num_new_tokens", "generation_tokens", "generation_tokens", "generation_tokens", "Tokens delivered."),
    Names("num_requests", "num_requests", "num_requests", "", "Requests that ended."),
    Names("num_aborted", "num_aborted_requests", "num_aborted_requests", "", "Requests aborted or timed out."),
    Names("num_failed", "num_failed_requests", "", "", "Requests that ended with an error."),
    Names("num_nan_logits", "nan_logits", "", "", "Requests that ended because the model computed NaN."),
    Names("num_preempted", "num_preemptions", "", "num_preemptions", "Times that a request gave up its pages."),
    Names("num_received_pages", "received_pages", "", "", "Pages of the prefix cache that came from a prefill server."),
    Names("num_rebalancings", "num_rebalancings", "", "", "Times that the experts were moved."),
    Names("num_ticks", "num_ticks", "", "", "Scheduler iterations that called the device."),
    Names("num_compilations", "compile", "", "", "Programs compiled since the engine was ready."),
    Names("compile_seconds", "compile_seconds", "", "", "Seconds spent compiling programs, at the start and later."),
    Names("num_compile_waits", "compile_waits", "", "", "Requests that waited for a program."),
    Names("num_steps", "spec_verify_calls", "spec_verify_calls", "", "Verification passes of all rows."),
    Names("num_steps", "spec_decode_num_drafts", "", "spec_decode_num_drafts", "Verification passes of all rows."),
    Names("num_proposed", "spec_decode_num_draft_tokens", "", "spec_decode_num_draft_tokens", "Proposed drafts."),
    Names("num_accepted", "spec_decode_num_accepted_tokens", "", "spec_decode_num_accepted_tokens", "Accepted drafts."),
)
# Counter of the watchdog.
WATCHDOG = Names("", "watchdog", "", "", "Scheduler iterations longer than half the watchdog's timeout.")
# Counters of a decode server, read from its `RemotePrefill`.
REMOTE_PREFILLS = Names("", "remote_prefills", "", "", "Prompts whose pages came from the prefill server.")
PREFILL_FALLBACKS = Names("", "prefill_fallbacks", "", "", "Prompts prefilled here because the prefill server failed.")
_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
ACCEPTED_PER_POSITION = Names("", _PER_POSITION, "", _PER_POSITION, "Accepted drafts, by draft level.")
THROUGHPUT = Names("", "gen_throughput", "gen_throughput", "", "Tokens delivered per second since the previous scrape.")
FINISHED = Names("", "request_finished", "", "request_success", "Requests that ended, by reason.")

# Buckets in seconds and in tokens; Prometheus interpolates percentiles between their bounds.
TOKEN_SECONDS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.2, 0.5, 1.0, 5.0)
REQUEST_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0)
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
TIME_TO_FIRST_TOKEN = _one_name("time_to_first_token_seconds", "Time from arrival to the first token.")
INTER_TOKEN_LATENCY = _one_name(
    "inter_token_latency_seconds", "Seconds per token after the first; tokens in one delivery share its time."
)
E2E_LATENCY = _one_name("e2e_request_latency_seconds", "Time from arrival to the last token.")
QUEUE_TIME = Names(
    "", "queue_time_seconds", "queue_time_seconds", "request_queue_time_seconds", "Time from arrival to first prefill."
)
PROMPT_TOKENS = Names("", "request_prompt_tokens", "", "request_prompt_tokens", "Prompt tokens of a request.")
NEW_TOKENS = Names("", "request_generation_tokens", "", "request_generation_tokens", "Tokens delivered to a request.")
