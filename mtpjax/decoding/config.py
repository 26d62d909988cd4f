"""How to decode: what is the same for a whole call, and what each row asks for."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mtpjax.models.config import require

MOST_STEPS = 127  # levels are reported as int8
MOST_DRAFT_TOKENS = 64  # where `num_draft_tokens` is left out

EXACT_RULES = ("greedy", "sample", "token", "block", "recursive", "traversal")
LOSSY_RULES = ("threshold", "typical", "relaxed")
CHAIN_RULES = ("token", "block")
FIXED_TREES = ("recursive", "traversal")  # whose shape may not depend on what was drawn
FREE_TREES = ("greedy", "sample", "threshold", "typical", "relaxed")  # whose nodes may be chosen by what they are


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """How to decode. Shapes and rules are compiled in; limits, stop sequences, costs and vocabularies enter as arrays.

    Attributes:
        max_new_tokens: most tokens per row, at least 1.
        num_steps: draft levels per round; 0 is plain decoding. Levels beyond the model's modules recycle the last.
        topk: candidates per node; 1 drafts a chain, more a tree (one module at most).
        num_draft_tokens: nodes verified per round, the pending token among them. None: `num_steps + 1` for a chain, for
            a tree as many as topk and num_steps give, up to 64.
        acceptance: the rule (`mtpjax.decoding.acceptance`). "auto": "greedy" where every row is at temperature 0, else
            "block" for a chain and "recursive" for a tree, where "traversal" accepts a little more; on a chain these
            two are "token" and "block". "threshold", "typical" and "relaxed" change the law of the text.
        depth_policy: "adaptive" chooses 0..num_steps levels before each round, by `depth_costs` and what was accepted.
        depth_costs: duration of a round by its levels, 0..num_steps, in any unit (`mtpjax profile`).
        depth_change: how much longer a round takes that follows one of other levels, in that unit (`mtpjax profile`).
        depth_rates: share of each level's drafts, 1..num_steps, that is accepted where those before it were, on texts
            like these (`mtpjax eval acceptance`): where the estimates begin. None: unknown.
        depth_lengths: accept lengths, bonus token included, of rounds of 1..num_steps levels on those texts. None: what
            depth_rates give if failures come at random, which they do not where a text repeats itself.
        threshold_single, threshold_acc: SGLang's, for "threshold"; 1 and 1 is "sample".
        typical_epsilon, typical_delta: Medusa's, for "typical".
        relaxed_topk, relaxed_delta: TensorRT-LLM's, for "relaxed".
        draft_vocabulary: ids that the modules may draft; None: all. The text keeps its distribution.
        draft_window: newest positions that the modules attend to, beside the first `draft_sinks`; None: all.
        stop_token_ids: a row ends after any of these (and returns it).
        stop_sequences: a row ends after any of these runs of new tokens (and returns it).
        logprobs: report log-probabilities of the new tokens, by the trunk's logits as they are.
        max_length: longest sequence, prompt included; None: the model's `max_position_embeddings`.
        prefill_chunk: tokens per row and prefill pass.
        min_rows: fewest tokens per row in any pass, padding included. None: 2 for a batch of one on a GPU, else 1.
            Where two rows cost less than one, this is plain decoding's best form.
    """

    max_new_tokens: int = 128
    num_steps: int = 1
    topk: int = 1
    num_draft_tokens: int | None = None
    acceptance: Literal[
        "auto", "greedy", "sample", "token", "block", "recursive", "traversal", "threshold", "typical", "relaxed"
    ] = "auto"
    depth_policy: Literal["fixed", "adaptive"] = "fixed"
    depth_costs: tuple[float, ...] | None = None
    depth_change: float = 0.0
    depth_rates: tuple[float, ...] | None = None
    depth_lengths: tuple[float, ...] | None = None
    threshold_single: float = 1.0
    threshold_acc: float = 1.0
    typical_epsilon: float = 0.09
    typical_delta: float = 0.3
    relaxed_topk: int = 10
    relaxed_delta: float = 0.6
    draft_vocabulary: tuple[int, ...] | None = None
    draft_window: int | None = None
    draft_sinks: int = 4
    stop_token_ids: tuple[int, ...] = ()
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    logprobs: bool = False
    max_length: int | None = None
    prefill_chunk: int = 64
    min_rows: int | None = None

    def __post_init__(self):
        for name, least in (("max_new_tokens", 1), ("num_steps", 0), ("topk", 1), ("prefill_chunk", 1)):
            require(getattr(self, name) >= least, f"{name} must be at least {least}, not {getattr(self, name)}")
        for name, least in (("min_rows", 1), ("max_length", 2), ("draft_window", 1), ("num_draft_tokens", 2)):
            value = getattr(self, name)
            require(value is None or value >= least, f"{name} must be at least {least}, not {value}")
        require(self.num_steps <= MOST_STEPS, f"num_steps {self.num_steps} is more than {MOST_STEPS}")
        require(self.draft_sinks >= 0, f"draft_sinks must not be negative, is {self.draft_sinks}")
        rules = ("auto", *EXACT_RULES, *LOSSY_RULES)
        require(self.acceptance in rules, f"acceptance '{self.acceptance}' is not one of {', '.join(rules)}")
        policies = ("fixed", "adaptive")
        require(self.depth_policy in policies, f"depth_policy '{self.depth_policy}' is not one of fixed, adaptive")
        for name in ("threshold_single", "threshold_acc"):
            require(0 <= getattr(self, name) <= 1, f"{name} {getattr(self, name)} is not within 0..1")
        require(self.relaxed_topk >= 1, f"relaxed_topk must be at least 1, not {self.relaxed_topk}")
        depths = ("depth_costs", "depth_rates", "depth_lengths")
        for name in ("stop_token_ids", "stop_sequences", "draft_vocabulary", *depths):
            value = getattr(self, name)
            object.__setattr__(self, name, value if value is None else tuple(value))
        object.__setattr__(self, "stop_sequences", tuple(tuple(sequence) for sequence in self.stop_sequences))
        require(all(self.stop_sequences), "a stop sequence is empty")
        self._check_tree()
        self._check_policy()

    def _check_tree(self):
        if self.topk > 1 and self.num_steps:
            require(self.acceptance not in CHAIN_RULES, f"'{self.acceptance}' verifies chains: topk must be 1")
        if self.num_draft_tokens is None or not self.num_steps:
            return
        shape = f"topk {self.topk} and num_steps {self.num_steps}"
        if self.topk == 1:
            require(
                self.num_draft_tokens == self.num_steps + 1,
                f"num_draft_tokens {self.num_draft_tokens}: a chain ({shape}) has {self.num_steps + 1}",
            )
        most = largest_tree(self.topk, self.num_steps)
        require(
            self.num_draft_tokens <= most,
            f"num_draft_tokens {self.num_draft_tokens} is more than the {most} that {shape} give",
        )

    def _check_policy(self):
        if self.depth_policy == "fixed" or not self.num_steps:
            return
        require(self.topk == 1, f"adaptive depth drafts chains: topk {self.topk} must be 1")
        given = "none" if self.depth_costs is None else str(len(self.depth_costs))
        require(
            self.depth_costs is not None and len(self.depth_costs) == self.num_steps + 1,
            f"adaptive depth needs depth_costs of depths 0..{self.num_steps}, {self.num_steps + 1} in all; there are "
            f"{given} (`mtpjax profile` measures them)",
        )
        require(
            all(math.isfinite(cost) and cost > 0 for cost in self.depth_costs or ()),
            f"depth_costs {self.depth_costs} must be positive and finite",
        )
        require(
            math.isfinite(self.depth_change) and self.depth_change >= 0,
            f"depth_change {self.depth_change} must be finite, and not negative",
        )
        rates = self.depth_rates
        require(
            rates is None or (len(rates) == self.num_steps and all(0 < rate <= 1 for rate in rates)),
            f"depth_rates {rates} must be {self.num_steps}, one per level, above 0 and at most 1",
        )
        lengths = self.depth_lengths
        if lengths is not None:
            require(rates is not None, "depth_lengths go with depth_rates of the same texts, which are missing")
            require(
                len(lengths) == self.num_steps and all(1 <= mean <= most for most, mean in enumerate(lengths, start=2)),
                f"depth_lengths {lengths} must be {self.num_steps}, one per depth, from 1 to the depth and one more",
            )

    @property
    def num_nodes(self) -> int:
        """Nodes verified per round, the pending token among them."""
        if self.topk == 1 or not self.num_steps:
            return self.num_steps + 1
        return self.num_draft_tokens or min(MOST_DRAFT_TOKENS, largest_tree(self.topk, self.num_steps))


def largest_tree(topk: int, num_steps: int) -> int:
    """Nodes of the largest tree, the root among them: topk at level 1, topk of each of topk nodes at every other."""
    return 1 + topk + (num_steps - 1) * topk**2


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What rows ask for: one value for all of them, or a sequence with one for each.

    In this order: penalties, bias, banned tokens, temperature, top_k, top_p, min_p
    (`mtpjax.decoding.sampling` has the formulas).

    Attributes:
        temperature: 0 is the arg-max.
        top_k: as many of the likeliest tokens; 0: all.
        top_p: the likeliest tokens that hold this share of what top_k left; 1: all.
        min_p: tokens with at least this share of the likeliest one's probability; 0: all.
        repetition_penalty: of tokens in prompt or text (CTRL, 1909.05858); 1: none.
        frequency_penalty, presence_penalty: of new tokens, per occurrence and once (OpenAI); 0: none.
        min_new_tokens: before a row has so many, single stop tokens do not come and longer sequences do not end it.
        logit_bias: added to the logits of these token ids: a mapping for all rows, or one (or None) per row.
        allowed_tokens: no other token comes: ids for all rows, or a sequence of ids (or None) per row.
        banned_tokens: these do not come; given as allowed_tokens are.
        seed: of a row's noise, 0..2^64-1; None: from the call's key.
    """

    temperature: float | Sequence[float] = 0.0
    top_k: int | Sequence[int] = 0
    top_p: float | Sequence[float] = 1.0
    min_p: float | Sequence[float] = 0.0
    repetition_penalty: float | Sequence[float] = 1.0
    frequency_penalty: float | Sequence[float] = 0.0
    presence_penalty: float | Sequence[float] = 0.0
    min_new_tokens: int | Sequence[int] = 0
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float] | None] | None = None
    allowed_tokens: Sequence[Any] | None = None
    banned_tokens: Sequence[Any] | None = None
    seed: int | Sequence[int] | None = None
