"""Decodes held-out prompts during and after training, for the acceptance panel."""

import dataclasses
import logging
import time

import jax
import numpy as np
from jax.sharding import Mesh

from mtpjax.compat import make_mesh
from mtpjax.data.packing import draw_prompts
from mtpjax.decoding.acceptance.rules import AcceptanceRule
from mtpjax.decoding.capacity import min_rows_per_pass, round_up_capacity
from mtpjax.decoding.config import DecodeConfig
from mtpjax.decoding.decoder import make_spec
from mtpjax.distributed import is_multiprocess
from mtpjax.drafters.trained import DraftParams, TrainedDrafter
from mtpjax.evaluation.acceptance import measure_acceptance
from mtpjax.evaluation.machine import Stopwatch
from mtpjax.evaluation.metrics import estimate_speed_up, report
from mtpjax.evaluation.round_costs import CostMeter
from mtpjax.evaluation.round_loops import TimingConditions
from mtpjax.evaluation.round_shapes import chain_shape
from mtpjax.evaluation.trust import speed_up_problem
from mtpjax.models.context import AXIS
from mtpjax.models.model import MTPModel
from mtpjax.models.params import shard_for_decoding
from mtpjax.models.sharding import mesh_of
from mtpjax.models.trunk import unstack_layers
from mtpjax.training.corpus import Corpus
from mtpjax.training.panel import KIND_TEMPERATURES, DecodedMetrics

PROMPT_TOKENS, NEW_TOKENS = 64, 64
PROMPTS_PER_BATCH = 32  # prompts per batch, each decoded at both temperatures
COST_TIMINGS = 7  # timings of a round's parts at the end of a run
MAX_TIME_SHARE = 0.05  # maximum fraction of the run's time to spend on decoding during training
FIRST_DECODING_SECONDS = 30.0  # assumed duration of the first decoding, which also compiles
log = logging.getLogger("mtpjax.train")


class PanelDecoder:
    """Decodes held-out prompts, greedily and at temperature 1 in the same batches.

    An evaluation during the run decodes one batch of prompts, unless the total decoding time would exceed the fraction
    `MAX_TIME_SHARE` of the run's time. The last evaluation decodes all prompts and measures a round's costs.

    Args:
        corpus: the data of the run.
        model: the model in its form for training, with stacked layers if MTP modules are trained.
        num_depths: number of draft levels; 0: decode nothing.
        max_prompts: maximum number of prompts.
        acceptance: the acceptance rule, as in `DecodeConfig`.
        drafter: the separate drafter, whose speed-up is not measured; None: MTP modules.

    Raises:
        ValueError: the rule is unknown or does not allow temperature 1.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        model: MTPModel,
        num_depths: int,
        max_prompts: int,
        acceptance: str | AcceptanceRule = "auto",
        drafter: TrainedDrafter | None = None,
    ):
        # Prompt, continuation and drafts together must fit into the model's maximum length.
        max_positions = model.config.max_position_embeddings
        new_tokens = min(NEW_TOKENS, max_positions // 2)
        length = max(1, min(PROMPT_TOKENS, max_positions - new_tokens - num_depths))
        # Head columns beyond the tokenizer's ids are only padding, and decoding must not choose them.
        num_tokens = min(corpus.file_tokenizer.num_tokens, model.config.vocab_size) if corpus.file_tokenizer else 0
        self.model = MTPModel(
            dataclasses.replace(model.config, num_tokens=num_tokens), implementation=model.implementation
        )
        self.prompts = draw_prompts(corpus.held_out, max_prompts, length=length, seed=0) if num_depths else []
        self.config = DecodeConfig(
            allow_copies=True,  # because the run's mesh may not suit decoding
            max_new_tokens=new_tokens,
            num_steps=num_depths,
            acceptance=acceptance,
            drafter=drafter or "mtp",
            stop_token_ids=corpus.tokenizer.eos_token_ids,
        )
        make_spec(self.config, is_greedy=False)  # rejects an unsupported rule before training, not after it
        self.is_stacked, self.drafter = model.scan_layers, drafter
        self.seconds_spent, self.expected_seconds = 0.0, FIRST_DECODING_SECONDS

    def is_within_time_share(self, seconds: float) -> bool:
        """Returns whether one more decoding keeps the total within its share of the run's `seconds` so far."""
        return self.seconds_spent + self.expected_seconds <= MAX_TIME_SHARE * seconds

    def measure(self, params: dict, *, is_last: bool) -> dict[str, dict[str, DecodedMetrics]]:
        """Decodes prompts and measures their acceptance.

        Args:
            is_last: decode all prompts instead of one batch, and measure the speed-up.

        Returns:
            Metrics by category ("overall" first) and kind ("greedy", "sampled"). Empty if there are no prompts or draft
            levels. Also empty, with a warning, if the device runs out of memory, because a failed evaluation must not
            end the run.
        """
        batch_prompts = min(PROMPTS_PER_BATCH, len(self.prompts))
        if not batch_prompts:
            return {}
        begin = time.perf_counter()
        # Training stacks the trunk's layers for a scan; decoding runs them unrolled.
        model, params = self.model, unstack_layers(params, self.model.config) if self.is_stacked else params
        # Use only full batches, so that decoding compiles for one batch size.
        chosen = self.prompts[: len(self.prompts) // batch_prompts * batch_prompts if is_last else batch_prompts]
        decoded: dict[str, dict[str, DecodedMetrics]] = {}
        try:
            if (mesh := mesh_of(params["embedding"])) is not None:
                model, params = shard_for_decoding(model, params, self._decoding_mesh(mesh), allow_copies=True)
            decoded, counts = self._decode(model, params, chosen, 2 * batch_prompts)
            # Several processes measure no speed-up, because their clocks differ.
            if is_last and self.drafter is None and not is_multiprocess():
                decoded = self._add_speed_up(model, params, decoded, counts)
        except jax.errors.JaxRuntimeError as error:
            log.warning("held-out prompts could not be decoded: %s", error)
        # The last duration predicts the next one (`is_within_time_share`).
        self.expected_seconds = time.perf_counter() - begin
        self.seconds_spent += self.expected_seconds
        return decoded

    def _decoding_mesh(self, mesh: Mesh) -> Mesh:
        """Returns the mesh on which to decode, which has the devices of the training mesh.

        Decoding does not shard over "fsdp" and "context" and would replicate the parameters and rows. Use these axes as
        "tensor", which shards heads and columns, and as "data", which shards rows. A separate drafter needs the whole
        trunk on every device and splits only the rows.
        """
        sizes: dict[str, int] = {}
        for axis, size in mesh.shape.items():
            name = {"fsdp": "tensor", AXIS: "data"}.get(str(axis), str(axis))
            sizes[name] = sizes.get(name, 1) * size
        return make_mesh(sizes if self.drafter is None else {"data": mesh.size}, list(mesh.devices.flat))

    def _decode(self, model: MTPModel, params: dict, chosen, batch_size: int):
        """Returns the metrics by category and kind, with the rounds `[P]` and accepted drafts `[P, K]` of each."""
        # Every prompt appears once per temperature, so greedy and sampled rows share the batches.
        rows = [prompt for prompt, _ in chosen for _ in KIND_TEMPERATURES]
        temperatures = np.tile(list(KIND_TEMPERATURES.values()), len(chosen))
        draft_params = None if self.drafter is None else DraftParams.of(params)
        acceptance = measure_acceptance(
            params,
            rows,
            model=model,
            config=self.config,
            draft_params=draft_params,
            temperature=temperatures.tolist(),
            batch_size=batch_size,
        )
        # Split the rows by temperature again, and report each category.
        categories = [category for _, category in chosen]
        decoded: dict[str, dict[str, DecodedMetrics]] = {}
        counts: dict[tuple[str, str], tuple[np.ndarray, np.ndarray]] = {}
        for kind, temperature in KIND_TEMPERATURES.items():
            part = acceptance.select(temperatures == temperature)
            looping = np.array([is_looping(text) for text in part.texts])
            for name, metrics in report(part, categories).items():
                if not metrics["rounds"]:
                    continue  # every text ended with its first token, so there was no round
                is_in = np.array([name in ("overall", category) for category in categories])
                decoded.setdefault(name, {})[kind] = _decoded_metrics(metrics, kind, int(looping[is_in].sum()))
                counts[name, kind] = part.rounds[is_in], part.accepted[is_in]
        return decoded, counts

    def _add_speed_up(
        self,
        model: MTPModel,
        params: dict,
        decoded: dict[str, dict[str, DecodedMetrics]],
        counts: dict[tuple[str, str], tuple[np.ndarray, np.ndarray]],
    ):
        """Adds the ideal speed-up at batch 1, and marks disturbed and impossible values."""
        # Time verify, extend and draft passes at a typical cache length, halfway through the continuation.
        shape = chain_shape(self.config.num_steps)
        context = min(PROMPT_TOKENS + NEW_TOKENS // 2, model.config.max_position_embeddings // 2)
        capacity = round_up_capacity(2 * context + shape.num_nodes)
        min_rows = min_rows_per_pass(model.config, 1, jax.default_backend())
        conditions = TimingConditions(1, context, capacity, min_rows)
        meter = CostMeter(params, model=model, shapes=(shape,), conditions=conditions)
        meter.compile()
        # Compilation is done, so the stopwatch measures only disturbances during the timings.
        stopwatch = Stopwatch()
        meter.measure(COST_TIMINGS)
        waited, plain_steps = stopwatch.waited_share(), meter.plain_steps(shape)

        def with_speed_up(row: DecodedMetrics, steps: np.ndarray, accepted: np.ndarray) -> DecodedMetrics:
            ratio = estimate_speed_up(steps, accepted, plain_steps)
            return dataclasses.replace(
                row,
                speed_up=ratio.value,
                speed_up_low=ratio.low,
                speed_up_high=ratio.high,
                waited=waited,
                problem=speed_up_problem(ratio, row.accept_length, waited=waited),
            )

        return {
            name: {kind: with_speed_up(row, *counts[name, kind]) for kind, row in kinds.items()}
            for name, kinds in decoded.items()
        }


def _decoded_metrics(metrics: dict, kind: str, looping: int) -> DecodedMetrics:
    """Builds the metrics of one category and kind from a report of `mtpjax.evaluation.metrics`."""
    decoded, forced = metrics["decoded"], metrics["teacher_forced"]
    return DecodedMetrics(
        prompts=metrics["prompts"],
        looping=looping,
        accept_length=decoded["accept_length"].value,
        accept_length_low=decoded["accept_length"].low,
        accept_length_high=decoded["accept_length"].high,
        predicted=metrics["predicted"]["accept_length"].value,
        teacher_forced=forced["accept_length" if kind == "greedy" else "overlap_accept_length"],
        survival=tuple(rate.value for rate in decoded["survival"]),
        agreement=tuple(rate.value for rate in forced["agreement"]),
        overlap=tuple(rate.value for rate in forced["overlap"]),
    )


def is_looping(tokens, *, longest_period: int = 48) -> bool:
    """Returns whether the second half of a text repeats itself.

    Greedy text of small models often falls into loops. Drafting is easy there, so loops inflate accept lengths.

    Returns True if, for some period, at least 90 % of the tokens in the second half equal the token one period earlier.
    """
    tokens = np.asarray(tokens)
    half = len(tokens) // 2
    periods = range(1, min(longest_period, half) + 1)
    return any(np.mean(tokens[half:] == tokens[half - period : len(tokens) - period]) >= 0.9 for period in periods)


def repeated_share(tokens, *, window: int = 8) -> float:
    """Measures how much of a text repeats earlier text; stricter than `is_looping`, which looks for one exact loop.

    Returns the fraction of windows of `window` tokens that equal an earlier window.
    """
    windows = [tuple(tokens[begin : begin + window]) for begin in range(len(tokens) - window + 1)]
    return 1 - len(set(windows)) / len(windows) if windows else 0.0
