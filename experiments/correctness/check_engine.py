"""Compares random requests that join, leave and preempt each other in the engine with the same requests alone.

    python -m experiments.correctness.check_engine --requests 1000 --seed 0 [--quick] [--output FILE]

A family consists of one small model in float32, one draft
shape and one engine. Several threads submit its requests at random times; one request in ten is aborted at a random
time. The page pool is small, so requests are preempted, and half of the requests start with a common text, so they
share pages. Requests differ in length, sampling options, penalties, stop sequences, log-probabilities and speculation.

The reference is `speculative_generate` with contiguous caches. A request that ends by itself must have the same tokens,
log-probabilities (to 1e-4) and finish reason; the tokens of an aborted request must be a prefix. If the depth of a
chain is fixed, its passes and accepted drafts must be the same too, which reveals wrong entries in the drafter's cache
even if the text is right. Afterwards no page may be in use, no request may wait, and no program may have been compiled
since the start. The exit code is 4 if anything differs. Families whose experts move between devices need several
devices: JAX_NUM_CPU_DEVICES=4.
"""

import argparse
import collections
import dataclasses
import pathlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console

from experiments.common.results import about, write
from mtpjax import DecodeConfig, MTPModel, SamplingParams, speculative_generate
from mtpjax.compat import make_mesh
from mtpjax.console import narrow_table
from mtpjax.models.expert_placement import place_all_layers
from mtpjax.models.params import shard_for_decoding
from mtpjax.serving.engine import Engine
from mtpjax.serving.request import Delta, Finish, Request
from mtpjax.serving.sizes import EngineSettings
from mtpjax.serving.status import EngineStatus
from tests.helpers.small_models import constructed_drafter, constructed_params, small_config

MAX_LENGTH = 96
NUM_PAGES = 24  # pages of 8 positions; one text needs up to 14, so requests are preempted
NUM_THREADS = 4  # threads that submit requests
ABORTED_SHARE = 0.1
MEAN_PAUSE = 0.004  # seconds between two requests of a thread
LOGPROB_TOLERANCE = 1e-4  # float32 sums in a different order
REFERENCE_ROWS = 32  # requests per call of the reference
TIMEOUT = 600  # seconds for all requests of a family
TICKS_PER_PLACEMENT = 10  # with experts that move between devices
NUM_EXPERT_COPIES = 4

NEW_TOKENS = (1, 2, 9, 30, 60)
# Each choice has a sequence of several tokens, so that calls of the reference share a compiled program. The first
# sequence never ends a text in practice.
STOPS: tuple[dict[str, Any], ...] = (
    {"stop_sequences": ((1, 2, 3, 4, 5, 6, 7, 8),)},
    {"stop_sequences": ((7, 7), (33,)), "stop_token_ids": (5,)},
)
GREEDY: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"logit_bias": {7: 2.0, 9: -3.0}},
    {"banned_tokens": (3, 4, 5), "min_new_tokens": 6},
)
SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8},
    {"temperature": 0.7, "top_k": 9, "frequency_penalty": 0.5},
    {"temperature": 1.1, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 1.0, "allowed_tokens": tuple(range(2, 40)), "repetition_penalty": 1.1},
    {"temperature": 0.9, "logit_bias": {33: 4.0}, "presence_penalty": -0.5},
)
# Pads the reference's batches. It uses every option, so that all batches run the same compiled program.
FILLER = SamplingParams(
    temperature=1.0,
    top_k=9,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    presence_penalty=0.1,
    min_new_tokens=1,
    logit_bias={1: 0.5},
    seed=0,
)


@dataclasses.dataclass(frozen=True)
class Family:
    """One model, one draft shape, one engine.

    Attributes:
        name: its name in the table.
        attention: attention kind of the small model.
        draft: fields of `DecodeConfig`.
        num_mtp_modules: number of MTP modules in the model.
        drafter: kind of a drafter with its own parameters, as for `constructed_drafter`; None: MTP modules or lookup.
        disable_drafts_at: as in `EngineSettings`.
        is_quick: part of the quick run.
        drafter_changes: fields of `drafter` to change.
        expert_devices: number of devices that share the experts, with copies, which are rebalanced while the engine
            runs; 1: the engine has one device.
    """

    name: str
    attention: str
    draft: dict[str, Any]
    num_mtp_modules: int = 1
    drafter: str | None = None
    disable_drafts_at: int | None = None
    is_quick: bool = False
    drafter_changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    expert_devices: int = 1

    @property
    def config(self) -> DecodeConfig:
        """The settings of the engine and of the reference."""
        return DecodeConfig(**{"num_steps": 2, "prefill_chunk": 8, "max_length": MAX_LENGTH, **self.draft})

    @property
    def has_fixed_rounds(self) -> bool:
        """Whether a request takes the same rounds regardless of other requests.

        A tree has a different shape next to sampled rows, and the load may disable drafts.
        """
        return self.config.topk == 1 and self.disable_drafts_at is None


TREE = {"topk": 2, "num_draft_tokens": 5}
FAMILIES = (
    Family("grouped chain", "grouped", {}),
    Family("grouped tree", "grouped", TREE, is_quick=True),
    Family("grouped, rule token", "grouped", {"acceptance": "token"}),
    Family("grouped tree, traversal", "grouped", {**TREE, "acceptance": "traversal"}),
    Family("grouped, lookup", "grouped", {"drafter": "lookup"}),
    Family("grouped, no drafts", "grouped", {"num_steps": 0}),
    Family("grouped by load, sample", "grouped", {"acceptance": "sample"}, disable_drafts_at=4, is_quick=True),
    Family("grouped by load, greedy", "grouped", {"acceptance": "greedy"}, disable_drafts_at=4),
    Family("latent chain", "latent", {"num_steps": 3}, num_mtp_modules=2, is_quick=True),
    Family("latent tree", "latent", TREE),
    Family("latent, experts move", "latent", {}, expert_devices=4),
    Family("latent tree, experts move", "latent", TREE, expert_devices=4),
    Family("sparse chain", "sparse", {}),
    Family("sparse tree", "sparse", TREE),
    Family("hybrid chain", "hybrid", {}),
    Family("EAGLE-3 chain", "grouped", {"num_steps": 3}, num_mtp_modules=0, drafter="eagle3"),
    Family("EAGLE-3 tree", "grouped", TREE, num_mtp_modules=0, drafter="eagle3"),
    Family("EAGLE-3 by load", "grouped", {"acceptance": "sample"}, 2, "eagle3", disable_drafts_at=4),
    Family("EAGLE-3 for a hybrid", "hybrid", {}, drafter="eagle3"),
    Family("Medusa chain", "grouped", {"num_steps": 3}, num_mtp_modules=0, drafter="medusa"),
    Family("Medusa tree", "grouped", TREE, num_mtp_modules=0, drafter="medusa"),
    Family("DFlash", "grouped", {"num_steps": 3}, num_mtp_modules=0, drafter="dflash"),
    Family("DFlash by load", "grouped", {"acceptance": "sample"}, 0, "dflash", disable_drafts_at=4),
    Family("DFlash for a hybrid", "hybrid", {"num_steps": 3}, drafter="dflash"),
    Family("DSpark", "grouped", {"num_steps": 3}, num_mtp_modules=0, drafter="dspark"),
    Family(
        "DSpark by confidence", "grouped", {"num_steps": 3}, 0, "dspark", drafter_changes={"confidence_threshold": 0.5}
    ),
)


class Receiver:
    """Collects the events of one request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finish: Finish | None = None
        self.has_ended = threading.Event()

    def __call__(self, event: Delta | Finish) -> None:
        assert self.finish is None, "an event after the end"
        if isinstance(event, Finish):
            self.finish = event
            self.has_ended.set()
        else:
            assert event.tokens, "a delta without tokens"
            self.tokens += event.tokens
            self.logprobs += event.logprobs or []


def random_requests(rng: np.random.Generator, count: int, vocab_size: int, *, is_greedy: bool) -> Iterator[Request]:
    """Draws requests of all kinds; half of them start with one of three texts."""
    beginnings = [rng.integers(0, vocab_size, size).tolist() for size in (9, 16, 27)]
    for number in range(count):
        prompt = rng.integers(0, vocab_size, rng.integers(1, 24)).tolist()
        if number % 2:
            prompt = beginnings[rng.integers(len(beginnings))] + prompt
        options = GREEDY if is_greedy or rng.random() < 0.4 else SAMPLED
        yield Request(
            prompt=tuple(prompt),
            max_new_tokens=int(rng.choice(NEW_TOKENS)),
            sampling=SamplingParams(seed=number, **options[rng.integers(len(options))]),
            logprobs=bool(rng.random() < 0.5),
            speculative=bool(rng.random() < 0.85),
            **STOPS[rng.integers(len(STOPS))],
        )


def run_requests(engine: Engine, requests: Sequence[Request], seed: int) -> list[Receiver]:
    """Submits all requests from several threads, aborts some, and waits until all have ended."""
    receivers = [Receiver() for _ in requests]
    failures: list[Exception] = []

    def submit(thread: int) -> None:
        rng = np.random.default_rng([seed, thread])
        try:
            for request, receiver in list(zip(requests, receivers, strict=True))[thread::NUM_THREADS]:
                time.sleep(rng.exponential(MEAN_PAUSE))
                request_id = engine.submit(request, receiver)
                if rng.random() < ABORTED_SHARE:
                    # Some requests are aborted while they wait and some while they run; others have already ended.
                    threading.Timer(rng.exponential(20 * MEAN_PAUSE), engine.abort, [request_id]).start()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=submit, args=[thread]) for thread in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    deadline = time.monotonic() + TIMEOUT
    for receiver in receivers:
        if not receiver.has_ended.wait(max(deadline - time.monotonic(), 0)):
            raise TimeoutError(f"requests of the engine have not ended after {TIMEOUT} s: {engine.status()}")
    return receivers


@dataclasses.dataclass(frozen=True)
class Expected:
    """A request's text from the reference, with its passes and accepted drafts per level."""

    tokens: list[int]
    logprobs: list[float]
    reason: str
    num_steps: int
    accepted: tuple[int, ...]


def run_alone(
    params: dict,
    model: MTPModel,
    config: DecodeConfig,
    requests: Sequence[Request],
    *,
    is_greedy: bool,
    draft_params: Any = None,
) -> list[Expected]:
    """Decodes every request with `speculative_generate`; requests with equal static settings share a call.

    The rows in a call do not affect each other, because the depth is fixed.
    """
    groups: dict[tuple, list[int]] = collections.defaultdict(list)
    for number, request in enumerate(requests):
        is_plain = dataclasses.replace(request.sampling, seed=None) == SamplingParams()
        key = (is_plain, request.speculative, request.max_new_tokens, request.stop_sequences, request.stop_token_ids)
        groups[key].append(number)
    expected: dict[int, Expected] = {}
    for (is_plain, speculative, max_new_tokens, stop_sequences, stop_token_ids), numbers in groups.items():
        plain: dict[str, Any] = {} if speculative else {"num_steps": 0, "topk": 1, "num_draft_tokens": None}
        plain |= {} if speculative or is_greedy else {"acceptance": "auto"}
        call_config = dataclasses.replace(
            config,
            max_new_tokens=max_new_tokens,
            stop_sequences=stop_sequences,
            stop_token_ids=stop_token_ids,
            logprobs=True,
            **plain,
        )
        filler = dataclasses.replace(FILLER, temperature=0.0) if is_greedy else FILLER
        filler = SamplingParams(seed=0) if is_plain else filler
        for begin in range(0, len(numbers), REFERENCE_ROWS - 1):
            part = numbers[begin : begin + REFERENCE_ROWS - 1]
            num_fillers = REFERENCE_ROWS - len(part)
            result = speculative_generate(
                params,
                [requests[number].prompt for number in part] + [(1,)] * num_fillers,
                model=model,
                config=call_config,
                sampling=_per_row([requests[number].sampling for number in part] + [filler] * num_fillers),
                draft_params=draft_params if speculative else None,
            )
            assert result.logprobs is not None
            result.stats.check()
            for row, (number, tokens) in enumerate(zip(part, result.rows(), strict=False)):
                expected[number] = Expected(
                    tokens,
                    result.logprobs[row, : len(tokens)].tolist(),
                    result.finish_reasons[row],
                    int(result.stats.rounds[row]),
                    tuple(result.stats.accepted[row].tolist()),
                )
    return [expected[number] for number in range(len(requests))]


def _per_row(rows: Sequence[SamplingParams]) -> SamplingParams:
    """Joins the options of single rows into those of a batch."""
    fields = [field.name for field in dataclasses.fields(SamplingParams)]
    return SamplingParams(**{name: [getattr(row, name) for row in rows] for name in fields})


def find_difference(request: Request, receiver: Receiver, expected: Expected, *, compare_rounds: bool) -> str | None:
    """Compares a request in the engine with the reference; returns the first difference, in one line."""
    finish, tokens = receiver.finish, receiver.tokens
    assert finish is not None
    if finish.num_new_tokens != len(tokens):
        return f"the end counts {finish.num_new_tokens} tokens, of {len(tokens)}"
    if request.logprobs and len(receiver.logprobs) != len(tokens):
        return f"{len(receiver.logprobs)} log-probabilities for {len(tokens)} tokens"
    if tokens != expected.tokens[: len(tokens)]:
        return f"tokens {tokens}, not {expected.tokens}"
    # Log-probabilities of banned tokens cannot occur, so all are finite.
    errors = np.abs(np.subtract(receiver.logprobs, expected.logprobs[: len(receiver.logprobs)]))
    if not (errors <= LOGPROB_TOLERANCE).all():
        return f"log-probabilities differ by {errors.max():.2g}"
    if finish.reason == "abort":
        return None
    if (len(tokens), finish.reason) != (len(expected.tokens), expected.reason):
        return f"{len(tokens)} tokens and '{finish.reason}', not {len(expected.tokens)} and '{expected.reason}'"
    rounds = finish.num_steps, finish.accepted[: len(expected.accepted)]
    if compare_rounds and rounds != (expected.num_steps, expected.accepted):
        return f"passes and accepted drafts {rounds}, not {(expected.num_steps, expected.accepted)}"
    return None


def check_idle(status: EngineStatus) -> list[str]:
    """Returns problems that an idle engine should not have."""
    zeros = ("num_running", "num_waiting", "num_used_pages", "num_compilations", "num_failed")
    return [f"{name} is {getattr(status, name)}, not 0" for name in zeros if getattr(status, name)]


def check_family(family: Family, num_requests: int, seed: int, settings: EngineSettings) -> dict:
    """Runs a family's requests in an engine and alone; returns the row for the results file."""
    began = time.monotonic()
    model = MTPModel(small_config(family.attention, num_mtp_modules=family.num_mtp_modules))
    params = constructed_params(model, family.attention, "mixed")
    config, is_greedy = family.config, family.draft.get("acceptance") == "greedy"
    draft_params = None
    if family.drafter is not None:
        drafter, draft_params = constructed_drafter(family.drafter, model, params)
        config = dataclasses.replace(config, drafter=dataclasses.replace(drafter, **family.drafter_changes))
    rng = np.random.default_rng(seed)
    requests = list(random_requests(rng, num_requests, model.config.vocab_size, is_greedy=is_greedy))
    # 1. In company.
    settings = dataclasses.replace(settings, disable_drafts_at=family.disable_drafts_at)
    served_model, served_params = model, params
    if family.expert_devices > 1:
        mesh = make_mesh({"expert": family.expert_devices})
        placed = place_all_layers(params, num_devices=mesh.size, num_redundant=NUM_EXPERT_COPIES)
        served_model, served_params = shard_for_decoding(model, placed, mesh)
        settings = dataclasses.replace(settings, rebalance_experts_every=TICKS_PER_PLACEMENT)
    engine = Engine(served_params, model=served_model, config=config, settings=settings, draft_params=draft_params)
    engine.warm_up()
    engine.start()
    receivers = run_requests(engine, requests, seed)
    status = engine.status()
    differences = check_idle(status)
    if family.expert_devices > 1 and not status.num_rebalancings:
        differences.append("the experts were never placed anew")
    if not engine.close(timeout=60):
        differences.append("requests were left at the end")
    # 2. Alone.
    expected = run_alone(params, model, config, requests, is_greedy=is_greedy, draft_params=draft_params)
    for number, (request, receiver, wanted) in enumerate(zip(requests, receivers, expected, strict=True)):
        found = find_difference(request, receiver, wanted, compare_rounds=family.has_fixed_rounds)
        if found:
            differences.append(f"request {number} {request}: {found}")
    return {
        "family": family.name,
        "requests": num_requests,
        "tokens": status.num_new_tokens,
        "aborted": status.num_aborted,
        "preempted": status.num_preempted,
        "cached_tokens": status.num_cached_tokens,
        "passes": status.num_steps,
        "drafted_passes": status.proposed[0] if status.proposed else 0,
        "accept_length": status.accept_length,
        "rebalancings": status.num_rebalancings,
        "mismatches": len(differences),
        "differences": differences[:10],
        "seconds": time.monotonic() - began,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="requests per family (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    names = [family.name for family in FAMILIES]
    help_text = f"only these, of: {'; '.join(names)}"
    parser.add_argument("--family", choices=names, metavar="NAME", nargs="+", help=help_text)
    parser.add_argument("--quick", action="store_true", help="three families, 60 requests each, one batch size")
    parser.add_argument("--output", type=pathlib.Path, default=None, help="JSON file to write")
    options = parser.parse_args(argv)
    jax.config.update("jax_default_matmul_precision", "highest")
    console = Console(highlight=False)
    num_requests, families = options.requests, FAMILIES
    settings = EngineSettings(
        num_slots=6, max_length=MAX_LENGTH, page_size=8, num_pages=NUM_PAGES, batch_sizes=(2, 6), prefill_tokens=16
    )
    if options.quick:
        num_requests, families = min(num_requests, 60), tuple(family for family in FAMILIES if family.is_quick)
        settings = dataclasses.replace(settings, batch_sizes=(6,))
    if options.family:
        families = tuple(family for family in FAMILIES if family.name in options.family)
    else:
        families = tuple(family for family in families if family.expert_devices <= jax.device_count())
    description = about(argv)
    rows = []
    table = narrow_table()
    headings = ("family", "requests", "aborted", "preempted", "cached", "accept length", "mismatches")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    for family in families:
        row = check_family(family, num_requests, options.seed, settings)
        rows.append(row)
        counts = (row[name] for name in ("requests", "aborted", "preempted", "cached_tokens"))
        table.add_row(family.name, *map(str, counts), f"{row['accept_length']:.2f}", str(row["mismatches"]))
        console.print(f"{family.name}: {row['mismatches'] or 'no'} mismatches ({row['seconds']:.0f} s)")
        for difference in row["differences"]:
            console.print(f"  {difference}")
        if options.output is not None:  # after each family, so that an interrupted run keeps its results
            write(options.output, {**description, "families": rows})
        jax.clear_caches()  # otherwise the programs of all families stay in memory
    console.print(table)
    num_mismatches = sum(row["mismatches"] for row in rows)
    console.print(f"{sum(row['requests'] for row in rows)} requests, {num_mismatches} mismatches")
    return 4 if num_mismatches else 0


if __name__ == "__main__":
    sys.exit(main())
