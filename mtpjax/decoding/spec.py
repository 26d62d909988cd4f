"""The static settings of a decoding call, which select the compiled program."""

import dataclasses

from mtpjax.decoding.acceptance.rules import RULES, AcceptanceRule, find_rule
from mtpjax.decoding.draft_tree import TreeShape, choose_tree_shape


@dataclasses.dataclass(frozen=True)
class DecodeSpec:
    """The shape of one speculative round. It is hashable, and calls with equal specs share one compiled program.

    Attributes:
        num_steps: draft levels per round, K; 0 is plain decoding.
        topk: candidates per tree node; 1 drafts a chain.
        num_nodes: nodes verified per round, W, including the pending token.
        rule: the acceptance rule; a name is converted to its `AcceptanceRule`.
        is_adaptive: whether the depth policy chooses 0..num_steps levels for every round.
        window: (number of newest positions, number of attention sinks) that the MTP modules attend to; None: all
            positions.
        min_rows: minimum number of token rows per forward pass; narrower passes are padded.
        prefill_chunk: tokens per row in one prefill pass.
        logprobs: whether to record the log-probability of every new token.
        kv_cache_dtype: NumPy's name for the caches' dtype; None: the embedding's dtype.
        pool: (number of pages, positions per page) of a state with paged caches; None: contiguous caches.
        check_nan: whether to end a row as failed if a logit that its text depends on is NaN.
    """

    num_steps: int
    topk: int = 1
    num_nodes: int = 1
    rule: AcceptanceRule = RULES["greedy"]
    is_adaptive: bool = False
    window: tuple[int, int] | None = None
    min_rows: int = 1
    prefill_chunk: int = 64
    logprobs: bool = False
    kv_cache_dtype: str | None = None
    pool: tuple[int, int] | None = None
    check_nan: bool = False

    def __post_init__(self):
        # Replace names with rules, so that equal specs compare equal.
        object.__setattr__(self, "rule", find_rule(self.rule))

    def at_depth(self, num_steps: int) -> "DecodeSpec":
        """Returns the spec for chain rounds with `num_steps` draft levels, for one inner loop of an adaptive call."""
        # Without drafts there is no q to compare with, so a ratio rule becomes plain sampling.
        rule = self.rule if num_steps or self.is_greedy else RULES["sample"]
        return dataclasses.replace(self, num_steps=num_steps, num_nodes=num_steps + 1, rule=rule)

    @property
    def verify_width(self) -> int:
        """Number of tokens per row in a verify pass, after padding the nodes to the narrowest pass that runs fast."""
        return max(self.num_nodes, self.min_rows)

    @property
    def is_greedy(self) -> bool:
        """True if the rule follows the arg-max, which requires temperature 0 in every row."""
        return self.rule.follows == "arg-max"

    @property
    def is_ratio_rule(self) -> bool:
        """True if the rule compares p with q, so the drafter must sample from q and report q."""
        return self.rule.needs_q

    @property
    def tree_shape(self) -> TreeShape | None:
        """The tree that is fixed before drawing, for rules that need one; None for chains and dynamic trees."""
        is_fixed = self.rule.drafts == "fixed tree" and self.num_steps > 0
        return choose_tree_shape(self.topk, self.num_steps, self.num_nodes) if is_fixed else None
