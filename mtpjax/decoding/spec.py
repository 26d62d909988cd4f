"""The static part of a decoding call: the settings that select the compiled program."""

import dataclasses

from mtpjax.decoding.acceptance.rules import RULES, AcceptanceRule, find_rule
from mtpjax.decoding.config import KV_CACHE_DTYPES, DecodeConfig
from mtpjax.decoding.draft_tree import TreeShape, choose_tree_shape


@dataclasses.dataclass(frozen=True)
class DecodeSpec:
    """The shape of one speculative round. Hashable: two calls with equal specs share one compiled program.

    Attributes:
        num_steps: draft levels per round, K; 0 is plain decoding.
        topk: candidates per tree node; 1 drafts a chain.
        num_nodes: nodes verified per round, W, including the pending token.
        rule: the acceptance rule; a name becomes its record.
        is_adaptive: the depth policy chooses 0..num_steps levels for every round.
        window: (newest positions, attention sinks) that the MTP modules attend to; None: all positions.
        min_rows: minimum number of token rows per forward pass; narrower passes are padded.
        prefill_chunk: tokens per row in one prefill pass.
        logprobs: record the log-probability of every new token.
        kv_cache_dtype: NumPy's name of the dtype of the caches; None: that of the embedding.
        pool: number of pages and positions per page, of a new state whose caches are in pages; None: contiguous.
        check_nan: end a row as failed when a logit that its text depends on is NaN.
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
        # Names become records, so that equal specs compare equal.
        object.__setattr__(self, "rule", find_rule(self.rule))

    @classmethod
    def from_config(
        cls, config: DecodeConfig, *, is_greedy: bool, min_rows: int = 1, prefill_chunk: int = 64
    ) -> "DecodeSpec":
        """Resolves a `DecodeConfig` for one call.

        Args:
            config: the user's settings.
            is_greedy: True if every row decodes at temperature 0.
            min_rows: minimum number of token rows per pass (`mtpjax.decoding.capacity.min_rows_per_pass`).
            prefill_chunk: tokens per row in one prefill pass, if the settings do not set it.

        Returns:
            The spec, with `acceptance="auto"` replaced by a rule.

        Raises:
            ValueError: for rule "greedy" with rows at a temperature above 0.
        """
        # 1. "auto" picks an exact rule: comparison with the arg-max for greedy rows, block verification for sampled
        #    chains, recursive rejection for sampled trees.
        is_tree = config.topk > 1 and config.num_steps > 0
        rule = config.rule or RULES["greedy" if is_greedy else "recursive" if is_tree else "block"]
        # 2. On a chain the rules for fixed trees reduce to chain rules, which cost less.
        if not is_tree and rule.on_chain is not None:
            rule = find_rule(rule.on_chain)
        if rule.follows == "arg-max" and not is_greedy:
            raise ValueError(
                "acceptance 'greedy' supports only temperature 0; use 'auto' or an exact sampling rule for sampled rows"
            )
        # 3. Without drafts the rule only chooses the next token: the arg-max, or a sample from the target.
        if not config.num_steps:
            rule = RULES["greedy" if is_greedy else "sample"]
        return cls(
            num_steps=config.num_steps,
            topk=config.topk if config.num_steps else 1,
            num_nodes=config.num_nodes,
            rule=rule,
            is_adaptive=config.depth_policy == "adaptive" and config.num_steps > 0,
            window=None if config.draft_window is None else (config.draft_window, config.draft_sinks),
            min_rows=min_rows,
            prefill_chunk=config.prefill_chunk or prefill_chunk,
            logprobs=config.logprobs,
            kv_cache_dtype=KV_CACHE_DTYPES[config.kv_cache_dtype],
        )

    def at_depth(self, num_steps: int) -> "DecodeSpec":
        """Returns the spec of a chain round with `num_steps` draft levels, for one inner loop of an adaptive call."""
        # Without drafts there is no q to compare with, so a ratio rule becomes plain sampling.
        rule = self.rule if num_steps or self.is_greedy else RULES["sample"]
        return dataclasses.replace(self, num_steps=num_steps, num_nodes=num_steps + 1, rule=rule)

    @property
    def verify_width(self) -> int:
        """Tokens per row of a verify pass: the nodes, and the padding to the narrowest pass that runs fast."""
        return max(self.num_nodes, self.min_rows)

    @property
    def is_greedy(self) -> bool:
        """True if the rule follows the arg-max, so that every row is at temperature 0."""
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
