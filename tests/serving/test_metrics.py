"""Metrics: a Prometheus parser reads them back, the aliases agree with our names, and the dashboard names only them."""

import json
import math
import pathlib
import re
import threading
import time

import pytest

pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families

from mtpjax.serving import metric_names
from mtpjax.serving import metrics as metrics_module
from mtpjax.serving.metrics import Metrics, RequestTimes
from mtpjax.serving.request import Finish
from mtpjax.serving.status import EngineStatus
from mtpjax.serving.watchdog import Watchdog

STATUS = EngineStatus(
    num_running=3,
    num_waiting=2,
    num_slots=8,
    num_pages=100,
    num_used_pages=25,
    page_size=16,
    num_prompt_tokens=1000,
    num_cached_tokens=400,
    num_new_tokens=330,
    num_requests=7,
    num_aborted=1,
    num_failed=1,
    num_nan_logits=1,
    compile_seconds=12.5,
    num_rebalancings=3,
    expert_imbalance=(1.8, 1.1),
    num_steps=200,
    proposed=(200, 180),
    accepted=(100, 30),
)
DASHBOARD = pathlib.Path(__file__).parents[2] / "docs" / "grafana_dashboard.json"


def read_back(metrics):
    """Returns value by (name, labels without model_name) as a Prometheus server reads them."""
    samples = {}
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny"
            rest = tuple(value for name, value in sorted(sample.labels.items()) if name != "model_name")
            assert (sample.name, rest) not in samples, "a sample is exported twice"
            samples[sample.name, rest] = sample.value
    return samples


@pytest.fixture
def metrics():
    return Metrics(lambda: STATUS, model_name="tiny")


def test_status_is_read_at_scrape_time():
    status = [EngineStatus()]
    metrics = Metrics(lambda: status[0], model_name="tiny")
    before = read_back(metrics)
    assert before["mtpjax:generation_tokens_total", ()] == 0
    assert ("mtpjax:spec_accept_length", ()) not in before  # undefined before the first pass
    status[0] = STATUS
    after = read_back(metrics)
    assert after["mtpjax:spec_accept_length", ()] == STATUS.accept_length == 1.65
    assert after["mtpjax:spec_accept_rate", ()] == pytest.approx(130 / 380)
    assert after["mtpjax:generation_tokens_total", ()] == 330
    assert after["mtpjax:token_usage", ()] == 0.25 and after["mtpjax:kv_used_tokens", ()] == 400


def test_placements_of_experts_are_counted(metrics):
    samples = read_back(metrics)
    assert samples["mtpjax:num_rebalancings_total", ()] == 3
    assert (samples["mtpjax:expert_imbalance_before", ()], samples["mtpjax:expert_imbalance", ()]) == (1.8, 1.1)
    assert ("mtpjax:expert_imbalance", ()) not in read_back(Metrics(EngineStatus, model_name="tiny"))


def test_faults_and_compiling_are_counted(metrics):
    samples = read_back(metrics)
    assert samples["mtpjax:nan_logits_total", ()] == 1 and samples["mtpjax:compile_seconds_total", ()] == 12.5
    assert samples["mtpjax:watchdog_total", ()] == 0
    begin, hung = time.monotonic() - 1.0, threading.Event()
    watchdog = Watchdog(lambda: begin, 0.1, lambda seconds: hung.set())
    metrics.more_counters[metric_names.WATCHDOG] = lambda: watchdog.num_slow
    assert hung.wait(10)
    watchdog.stop()
    assert read_back(metrics)["mtpjax:watchdog_total", ()] == 1


def test_vllm_counters_give_the_accept_length(metrics):
    samples = read_back(metrics)
    drafts, accepted = (samples[f"vllm:spec_decode_num_{name}_total", ()] for name in ("drafts", "accepted_tokens"))
    assert 1 + accepted / drafts == STATUS.accept_length
    positions = [samples["vllm:spec_decode_num_accepted_tokens_per_pos_total", (str(place),)] for place in (0, 1)]
    assert positions == [100, 30]


def test_latencies_count_tokens_and_not_deliveries(metrics):
    times = RequestTimes(arrived=10.0, started=10.3, deliveries=[(10.5, 1), (10.53, 3), (10.55, 1)])
    metrics.observe(Finish("stop", num_prompt_tokens=20, num_new_tokens=5), times)
    metrics.observe(Finish("abort", num_prompt_tokens=9), RequestTimes(arrived=11.0))  # never left the queue
    samples = read_back(metrics)
    for name, count, total in (
        ("time_to_first_token_seconds", 1, 0.5),
        ("inter_token_latency_seconds", 4, 0.05),
        ("e2e_request_latency_seconds", 1, 0.55),
        ("queue_time_seconds", 1, 0.3),
        ("request_prompt_tokens", 2, 29),
    ):
        assert samples[f"mtpjax:{name}_count", ()] == count
        assert samples[f"mtpjax:{name}_sum", ()] == pytest.approx(total)
        assert samples[f"mtpjax:{name}_bucket", ("+Inf",)] == count
    # Three tokens took 10 ms each, one 20 ms.
    below = {
        bound: samples["mtpjax:inter_token_latency_seconds_bucket", (bound,)] for bound in ("0.008", "0.015", "0.03")
    }
    assert below == {"0.008": 0, "0.015": 3, "0.03": 4}
    assert samples["mtpjax:request_finished_total", ("stop",)] == samples["vllm:request_success_total", ("abort",)] == 1


def all_names():
    single = [each for each in vars(metric_names).values() if isinstance(each, metric_names.Names)]
    return [*single, *metric_names.GAUGES, *metric_names.COUNTERS]


def test_aliases_agree_with_our_names_and_can_be_off(metrics):
    metrics.observe(Finish("stop", num_prompt_tokens=1, num_new_tokens=1), RequestTimes(0.0, 0.1, [(0.2, 1)]))
    samples = read_back(metrics)
    compared = 0
    for names in all_names():
        ours, *others = names.full(("sglang", "vllm"))
        for other in others:
            # A sample's name is the metric's, with a suffix such as "_total".
            pattern = re.compile(rf"{other}(_total|_bucket|_sum|_count)?")
            for (name, labels), value in samples.items():
                if pattern.fullmatch(name):
                    assert samples[name.replace(other, ours, 1), labels] == value
                    compared += 1
    assert compared > 100
    only_ours = read_back(Metrics(lambda: STATUS, model_name="tiny", aliases=()))
    assert {name.partition(":")[0] for name, _ in only_ours} == {"mtpjax"}
    with pytest.raises(ValueError, match="unknown metric aliases: tgi"):
        Metrics(lambda: STATUS, model_name="tiny", aliases=("tgi",))


def test_names_that_clients_read_are_exported(metrics):
    metrics.observe(Finish("stop", num_prompt_tokens=1, num_new_tokens=1), RequestTimes(0.0, 0.1, [(0.2, 1)]))
    exported = {name for name, _ in read_back(metrics)}
    assert exported >= {
        "sglang:spec_accept_length",
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        "sglang:token_usage",
        "sglang:gen_throughput",
        "sglang:time_to_first_token_seconds_bucket",
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "vllm:num_requests_running",
        "vllm:kv_cache_usage_perc",
        "vllm:e2e_request_latency_seconds_sum",
    }
    assert not [name for name in exported if name.endswith("_created")]


def test_throughput_covers_the_time_since_the_last_scrape(monkeypatch):
    now, tokens = [100.0], [0]
    monkeypatch.setattr(metrics_module.time, "monotonic", lambda: now[0])
    metrics = Metrics(lambda: EngineStatus(num_new_tokens=tokens[0]), model_name="tiny")
    for seconds, count, expected in ((2.0, 50, 25.0), (0.1, 500, 25.0), (1.9, 50, 275.0), (2.0, 0, 0.0)):
        now[0], tokens[0] = now[0] + seconds, tokens[0] + count
        assert math.isclose(read_back(metrics)["mtpjax:gen_throughput", ()], expected)


def test_dashboard_names_only_exported_metrics(metrics):
    metrics.observe(Finish("stop", num_prompt_tokens=1, num_new_tokens=1), RequestTimes(0.0, 0.1, [(0.2, 1)]))
    exported = {name for name, _ in read_back(metrics)}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    named = {name for query in queries for name in re.findall(r"\w+:\w+", query)}
    assert len(named) >= 15 and named <= exported
