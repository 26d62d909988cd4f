"""The static part of a decoding call: everything that is compiled into it."""

import dataclasses
from collections.abc import Callable

from mtpjax.decoding.config import EXACT_RULES, FIXED_TREE_RULES, DecodeConfig
from mtpjax.decoding.draft_tree import TreeShape, fixed_shape

Rule = str | Callable  # the name of a built-in acceptance rule, or a function (`mtpjax.decoding.acceptance`)


@dataclasses.dataclass(frozen=True)
class DecodeSpec:
    """The shape of one speculative round. Hashable: two calls with equal specs share one compiled program.

    Attributes:
        num_steps: draft levels per round, K; 0 is plain decoding.
        topk: candidates per tree node; 1 drafts a chain.
        num_nodes: nodes verified per round, W, including the pending token.
        rule: acceptance rule, by name or as a callable.
        is_adaptive: choose the depth of every round from 0..num_steps.
        window: newest positions and attention sinks that the drafter's attention reads; None reads everything.
        min_rows: fewest token rows per forward pass; narrower passes are padded.
        chunk: tokens per row in one prefill pass.
        logprobs: record the log-probability of every new token.
    """

    num_steps: int
    topk: int = 1
    num_nodes: int = 1
    rule: Rule = "greedy"
    is_adaptive: bool = False
    window: tuple[int, int] | None = None
    min_rows: int = 1
    chunk: int = 64
    logprobs: bool = False

    @classmethod
    def of(cls, config: DecodeConfig, *, is_greedy: bool, min_rows: int = 1) -> "DecodeSpec":
        """Resolves a `DecodeConfig` for one call.

        Args:
            config: the user's settings.
            is_greedy: True if every row decodes at temperature 0.
            min_rows: fewest token rows per pass (`mtpjax.decoding.capacity.min_rows_per_pass`).

        Returns:
            The spec, with `acceptance="auto"` replaced by a rule.

        Raises:
            ValueError: for a rule that cannot serve the temperature.
        """
        rule = config.acceptance
        is_tree = config.topk > 1 and config.num_steps > 0
        if rule == "auto":
            rule = "greedy" if is_greedy else "recursive" if is_tree else "block"
        # On a chain the tree rules are these chain rules, which cost less.
        if not is_tree:
            rule = {"recursive": "token", "traversal": "block"}.get(str(rule), rule)
        if rule == "greedy" and not is_greedy:
            raise ValueError(
                "acceptance 'greedy' supports only temperature 0; use 'auto' or an exact sampling rule for sampled rows"
            )
        # Without drafts the only question is how the next token is chosen.
        if not config.num_steps:
            rule = "greedy" if is_greedy else "sample"
        return cls(
            num_steps=config.num_steps,
            topk=config.topk if config.num_steps else 1,
            num_nodes=config.num_nodes,
            rule=rule,
            is_adaptive=config.depth_policy == "adaptive" and config.num_steps > 0,
            window=None if config.draft_window is None else (config.draft_window, config.draft_sinks),
            min_rows=min_rows,
            chunk=config.prefill_chunk,
            logprobs=config.logprobs,
        )

    def at_depth(self, num_steps: int) -> "DecodeSpec":
        """Returns the spec of a chain round with `num_steps` draft levels."""
        rule = self.rule if num_steps or self.rule == "greedy" else "sample"
        return dataclasses.replace(self, num_steps=num_steps, num_nodes=num_steps + 1, rule=rule)

    @property
    def is_ratio_rule(self) -> bool:
        """True if the rule compares p with q, so drafts must be sampled from q and q must be kept."""
        return self.rule in ("token", "block", *FIXED_TREE_RULES) or getattr(self.rule, "needs_q", False)

    @property
    def tree_shape(self) -> TreeShape | None:
        """The tree that is fixed before drawing (rules of `FIXED_TREE_RULES`); None for chains and chosen trees."""
        is_fixed = self.rule in FIXED_TREE_RULES and self.num_steps > 0
        return fixed_shape(self.topk, self.num_steps, self.num_nodes) if is_fixed else None

    @property
    def is_exact(self) -> bool:
        """True if the rule keeps the target's distribution; a custom rule says so by its attribute `is_exact`."""
        return getattr(self.rule, "is_exact", False) if callable(self.rule) else self.rule in EXACT_RULES
