"""The panel's decoded part: what `speculative_generate` does with held-out prompts while a model is trained."""

import dataclasses
import logging
import time
from collections.abc import Sequence

import jax
import numpy as np

from mtpjax.data.packing import Document
from mtpjax.decoding.capacity import bucket, min_rows_per_pass
from mtpjax.decoding.config import DecodeConfig
from mtpjax.evaluation.acceptance import measure_acceptance
from mtpjax.evaluation.metrics import report
from mtpjax.evaluation.round_costs import CostMeter, chain
from mtpjax.models.model import MTPModel
from mtpjax.models.trunk import unstack_layers
from mtpjax.training.corpus import Corpus

PROMPT_TOKENS, NEW_TOKENS = 64, 64
AT_ONCE = 32  # prompts in a batch, each at both temperatures
KINDS = {"greedy": 0.0, "sampled": 1.0}  # and their temperatures
SHARE = 0.05  # of a run's time that decoding on the way may take
FIRST_SECONDS = 30.0  # what the first time is taken to cost: it compiles
_NEWLINE = 10
log = logging.getLogger("mtpjax.train")


@dataclasses.dataclass(frozen=True)
class Decoded:
    """Figures of a category of held-out prompts at a temperature; accept lengths include the bonus token.

    `real` is what decoding had, with its 95 % interval over prompts; `predicted` what the trunk's own plain text says
    of it (`mtpjax.evaluation.predict`); `teacher_forced` the plain estimate over all positions of that text, `1 + sum
    of
    survival`. Per level: `survival` of decoding; `agreement` of arg-maxes and `overlap`, 1 - TV, over all positions.
    """

    prompts: int
    looping: int  # texts that repeat themselves, where drafting is easy
    real: float
    real_low: float
    real_high: float
    predicted: float
    teacher_forced: float
    survival: tuple[float, ...]
    agreement: tuple[float, ...]
    overlap: tuple[float, ...]
    speed_up: float | None = None  # real accept length over the measured costs of a round's parts, at batch 1


class PanelDecoder:
    """Decodes held-out prompts, greedily and at temperature 1, in the same batches.

    On the way through a run that is done as far as it takes a twentieth of the time; at its end with all `count`
    prompts, and with the costs of a round beside.
    """

    def __init__(self, corpus: Corpus, *, model: MTPModel, num_depths: int, count: int):
        most = model.config.max_position_embeddings
        new_tokens = min(NEW_TOKENS, most // 2)
        length = max(1, min(PROMPT_TOKENS, most - new_tokens - num_depths))
        num_tokens = min(corpus.file.num_tokens, model.config.vocab_size) if corpus.file else 0
        self.model = MTPModel(dataclasses.replace(model.config, num_tokens=num_tokens))
        self.prompts = choose_prompts(corpus.held_out, count, length=length, seed=0) if num_depths else []
        self.config = DecodeConfig(
            max_new_tokens=new_tokens, num_steps=num_depths, stop_token_ids=corpus.tokenizer.eos_token_ids
        )
        self.is_stacked = model.scan_layers
        self.spent, self.expected = 0.0, FIRST_SECONDS

    def fits(self, seconds: float) -> bool:
        """Whether it may be done after so many seconds of the run."""
        return self.spent + self.expected <= SHARE * seconds

    def measure(self, params: dict, *, is_last: bool) -> dict[str, dict[str, Decoded]]:
        """Category -> kind -> figures, "overall" first; empty without prompts or draft levels.

        Empty too, with a warning, where the device has no room: that shall not cost a run its weights.
        """
        at_once = min(AT_ONCE, len(self.prompts))
        if not at_once:
            return {}
        begin = time.perf_counter()
        if self.is_stacked:
            params = unstack_layers(params, self.model.config)
        chosen = self.prompts[: len(self.prompts) // at_once * at_once if is_last else at_once]
        decoded: dict[str, dict[str, Decoded]] = {}
        try:
            decoded = self._decode(params, chosen, 2 * at_once)
            if is_last:
                decoded = self._with_speed(params, decoded)
        except jax.errors.JaxRuntimeError as error:
            log.warning("held-out prompts could not be decoded: %s", error)
        self.expected = time.perf_counter() - begin
        self.spent += self.expected
        return decoded

    def _decode(self, params: dict, chosen, batch_size: int) -> dict[str, dict[str, Decoded]]:
        rows = [prompt for prompt, _ in chosen for _ in KINDS]
        warmth = np.tile(list(KINDS.values()), len(chosen))
        acceptance = measure_acceptance(
            params,
            rows,
            model=self.model,
            config=self.config,
            temperature=warmth.tolist(),
            batch_size=batch_size,
        )
        categories = [category for _, category in chosen]
        decoded: dict[str, dict[str, Decoded]] = {}
        for kind, temperature in KINDS.items():
            part = acceptance.take(warmth == temperature)
            looping = np.array([is_looping(text) for text in part.texts])
            for name, figures in report(part, categories).items():
                if not figures["steps"]:
                    continue  # all texts ended with their first token
                is_in = np.array([name in ("overall", category) for category in categories])
                decoded.setdefault(name, {})[kind] = _decoded(figures, kind, int(looping[is_in].sum()))
        return decoded

    def _with_speed(self, params: dict, decoded):
        shape = chain(self.config.num_steps)
        context = min(PROMPT_TOKENS + NEW_TOKENS // 2, self.model.config.max_position_embeddings // 2)
        meter = CostMeter(
            params,
            model=self.model,
            shapes=(shape,),
            context=context,
            capacity=bucket(2 * context + shape.num_nodes),
            min_rows=min_rows_per_pass(1, jax.default_backend(), self.model.implementation),
        )
        meter.measure(5)
        costs = meter.costs()

        def timed(row: Decoded) -> Decoded:
            return dataclasses.replace(row, speed_up=costs.ideal_ratio(row.real, shape))

        return {name: {kind: timed(row) for kind, row in kinds.items()} for name, kinds in decoded.items()}


def _decoded(figures: dict, kind: str, looping: int) -> Decoded:
    real, forced = figures["decoded"], figures["teacher_forced"]
    return Decoded(
        prompts=figures["prompts"],
        looping=looping,
        real=real["accept_length"].value,
        real_low=real["accept_length"].low,
        real_high=real["accept_length"].high,
        predicted=figures["predicted"]["accept_length"].value,
        teacher_forced=forced["accept_length" if kind == "greedy" else "overlap_accept_length"],
        survival=tuple(rate.value for rate in real["survival"]),
        agreement=tuple(rate.value for rate in forced["agreement"]),
        overlap=tuple(rate.value for rate in forced["overlap"]),
    )


def choose_prompts(documents: Sequence[Document], count: int, *, length: int, seed: int) -> list[tuple[list[int], str]]:
    """Up to `count` prompts of up to `length` tokens, each with its document's category; categories take turns.

    Of bytes a prompt begins with a line, of a conversation it ends where an answer begins, of other tokens anywhere; of
    a document too short for that it is the first half. Each document of a category gives one before any gives a second.
    """
    rng = np.random.default_rng(seed)
    distinct = {(each.category, each.tokens.tobytes()): each for each in documents if len(each.tokens)}
    places: dict[str, list] = {}  # category -> (turn, number of the document, where the prompt ends, document)
    for number, index in enumerate(rng.permutation(len(distinct))):
        document = list(distinct.values())[index]
        ends = rng.permutation(_ends(document, length))[:count]
        places.setdefault(document.category, []).extend(
            (turn, number, int(end), document) for turn, end in enumerate(ends)
        )
    turns = [
        (turn, place, document.tokens[max(0, end - length) : end].tolist(), category)
        for place, (category, found) in enumerate(sorted(places.items()))
        for turn, (_, _, end, document) in enumerate(sorted(found, key=lambda each: each[:3]))
    ]
    return [(prompt, category) for _, _, prompt, category in sorted(turns, key=lambda each: each[:2])[:count]]


def _ends(document: Document, length: int) -> np.ndarray:
    """Where prompts of a document may end."""
    tokens = document.tokens
    if document.loss_mask is not None:
        ends = np.flatnonzero(np.diff(document.loss_mask[: len(tokens)].astype(int)) > 0) + 1
    elif tokens.dtype == np.uint8:
        ends = np.append(0, np.flatnonzero(tokens == _NEWLINE) + 1) + length
    else:
        ends = np.arange(length, len(tokens) + 1)
    ends = ends[ends <= len(tokens)]
    return ends if len(ends) else np.array([-(-len(tokens) // 2)])


def is_looping(tokens, *, longest_period: int = 48) -> bool:
    """Whether a text's second half repeats itself: nine tokens in ten equal the one some period before.

    Greedy text of small models falls into loops, where drafting is easy: they would inflate an accept length.
    """
    tokens = np.asarray(tokens)
    half = len(tokens) // 2
    periods = range(1, min(longest_period, half) + 1)
    return any(np.mean(tokens[half:] == tokens[half - period : len(tokens) - period]) >= 0.9 for period in periods)
