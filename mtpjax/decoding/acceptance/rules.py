"""Defines an `AcceptanceRule` for each acceptance rule. Does not import JAX, so that `--help` can list them quickly.

To add a rule, write its function in `chain`, `tree` or `lossy`, and add an `AcceptanceRule` to this module, which all
other code reads. A user-defined rule is an `AcceptanceRule` in the user's module: pass it as
`DecodeConfig(acceptance=...)`, or as `--acceptance package.module:RECORD` on the command line.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

from mtpjax.records import import_record

MAX_PARAMETERS = 2  # columns of `RowSettings.rule_params`


@dataclasses.dataclass(frozen=True)
class AcceptanceRule:
    """An acceptance rule.

    `function` gets the arrays of one row (`mtpjax.decoding.acceptance`), and the rule's parameters as keyword
    arguments. The argument q is omitted unless `needs_q` is set. The other arguments depend on `drafts`:

    - `drafts="chain"`: `function(drafts, p, q, u, num_drafted=None) -> (num_accepted, weights)`, with `drafts [K]`, `p
      [K+1, V]`, `q [K, V]`, `u [K]`. Drafts from index `num_drafted` on are padding.
    - otherwise: `function(tokens, parents, p, q, u, *, num_steps) -> AcceptedPath`. If `drafts` is "fixed tree", the
      keyword `tree` is its `TreeShape`.

    Attributes:
        name: the rule's name in settings, tables and messages.
        function: the rule's function, or `package.module:function`, which is imported when a call is traced. None for
            rules that follow the target's tokens.
        is_exact: whether the rule keeps the target's distribution.
        drafts: the supported drafts: "chain", "fixed tree" (a tree whose shape does not depend on the drafted tokens),
            or "any" (chains and trees of any shape).
        needs_q: whether the rule reads q, the distribution that drafts were drawn from, which requires sampled drafts.
        parameters: default values by parameter name, at most two. A `DecodeConfig` field of the same name overrides the
            default. Rules that differ only in these values share a compiled program.
        follows: the token of the target that a draft must equal, "arg-max" or "sample"; None for other rules.
        on_chain: for a "fixed tree" rule, the cheaper rule that is equivalent on a chain.
        reads_shard: whether `function` takes `vocabulary` and only one device's columns of p and q. Otherwise it gets
            all columns.

    Raises:
        ValueError: the attributes contradict each other.

    Example:
        >>> import jax.numpy as jnp
        >>> from mtpjax import DecodeConfig
        >>> def first_draft(drafts, p, u, num_drafted=None):  # accepts the first draft, whatever it is
        ...     return jnp.int32(1), p[1]
        >>> rule = AcceptanceRule("first draft", first_draft, drafts="chain")
        >>> DecodeConfig(num_steps=2, acceptance=rule).rule.is_exact
        False
    """

    name: str
    function: Callable[..., Any] | str | None = None
    is_exact: bool = False
    drafts: Literal["chain", "fixed tree", "any"] = "any"
    needs_q: bool = False
    parameters: Mapping[str, float] = dataclasses.field(default_factory=dict, compare=False)
    follows: Literal["arg-max", "sample"] | None = None
    on_chain: str | None = None
    reads_shard: bool = False

    def __post_init__(self):
        if (self.function is None) == (self.follows is None):
            raise ValueError(f"acceptance rule '{self.name}' must set exactly one of 'function' and 'follows'")
        # The nodes of a dynamic tree are chosen by their drafted tokens, so a test against q would not be exact.
        if self.needs_q and self.drafts == "any":
            raise ValueError(f"acceptance rule '{self.name}' needs q, so its drafts must be 'chain' or 'fixed tree'")
        if (self.on_chain is None) == (self.drafts == "fixed tree"):
            raise ValueError(f"acceptance rule '{self.name}': set on_chain if, and only if, drafts is 'fixed tree'")
        if len(self.parameters) > MAX_PARAMETERS:
            raise ValueError(f"acceptance rule '{self.name}' has more than {MAX_PARAMETERS} parameters")

    def __str__(self) -> str:
        return self.name

    def load(self) -> Callable[..., Any]:
        """Returns the rule's function; imports it if it is given as `package.module:function`."""
        assert self.function is not None, f"acceptance rule '{self.name}' follows the target's tokens"
        if not isinstance(self.function, str):
            return self.function
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(module), name)


_EXACT: Any = {"is_exact": True, "needs_q": True, "reads_shard": True}
_RULES = (
    # These rules follow the target's token after each node, so they are exact for any tree.
    AcceptanceRule("greedy", follows="arg-max", is_exact=True),
    AcceptanceRule("sample", follows="sample", is_exact=True),
    # Ratio rules compare p with q. These two are for chains.
    AcceptanceRule("token", "mtpjax.decoding.acceptance.chain:token_chain", drafts="chain", **_EXACT),
    AcceptanceRule("block", "mtpjax.decoding.acceptance.chain:block_chain", drafts="chain", **_EXACT),
    # These rules are for trees of fixed shape. On a chain they are equivalent to the rules above.
    AcceptanceRule(
        "recursive", "mtpjax.decoding.acceptance.tree:recursive_tree", drafts="fixed tree", on_chain="token", **_EXACT
    ),
    AcceptanceRule(
        "traversal", "mtpjax.decoding.acceptance.tree:traversal_tree", drafts="fixed tree", on_chain="block", **_EXACT
    ),
    # These lossy rules are for chains and trees of any shape. Their parameters are fields of `DecodeConfig`.
    AcceptanceRule(
        "threshold",
        "mtpjax.decoding.acceptance.lossy:threshold_tree",
        parameters={"threshold_single": 1.0, "threshold_acc": 1.0},
        reads_shard=True,
    ),
    AcceptanceRule(
        "typical",
        "mtpjax.decoding.acceptance.lossy:typical_tree",
        parameters={"typical_epsilon": 0.09, "typical_delta": 0.3},
        reads_shard=True,
    ),
    AcceptanceRule(
        "relaxed",
        "mtpjax.decoding.acceptance.lossy:relaxed_tree",
        parameters={"relaxed_topk": 10, "relaxed_delta": 0.6},
        reads_shard=True,
    ),
)
RULES = {rule.name: rule for rule in _RULES}  # by name, exact rules first
EXACT_NAMES = tuple(name for name, rule in RULES.items() if rule.is_exact)
LOSSY_NAMES = tuple(name for name, rule in RULES.items() if not rule.is_exact)
PARAMETERS = {name: value for rule in _RULES for name, value in rule.parameters.items()}


def find_rule(rule: "str | AcceptanceRule") -> AcceptanceRule:
    """Returns a rule.

    Args:
        rule: a name in `RULES`, `package.module:RECORD`, or an `AcceptanceRule`.

    Returns:
        The `AcceptanceRule`.

    Raises:
        ValueError: the rule does not exist.
    """
    if isinstance(rule, AcceptanceRule):
        return rule
    # A colon marks a user-defined rule; names of the library's rules contain no colon.
    if isinstance(rule, str) and ":" in rule:
        return import_record(rule, AcceptanceRule)
    if not isinstance(rule, str) or rule not in RULES:
        raise ValueError(
            f"unknown acceptance rule '{rule}'; supported: {', '.join(('auto', *RULES))}, package.module:RECORD, or an "
            "AcceptanceRule"
        )
    return RULES[rule]
