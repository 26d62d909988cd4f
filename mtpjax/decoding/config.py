"""Decoding settings: `DecodeConfig` for a whole call, and `SamplingParams` for each row."""

import dataclasses
import math
import numbers
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from mtpjax.decoding.acceptance.rules import PARAMETERS, AcceptanceRule, find_rule
from mtpjax.decoding.sampling_ranges import check_sampling
from mtpjax.field_types import check_scalar_fields
from mtpjax.messages import require
from mtpjax.models.config import Implementation

MAX_STEPS = 127  # draft levels are reported as int8
DEFAULT_MAX_NODES = 64  # cap on the default `num_draft_tokens`


# Maps SGLang's names for cache dtypes to NumPy's names. None means the embedding's dtype.
KV_CACHE_DTYPES = {"auto": None, "bfloat16": "bfloat16", "fp8_e4m3": "float8_e4m3fn"}


MAX_INTEGER = 2**31 - 1  # token ids and counts are int32 on the device
# The smallest allowed value of each field that is an integer or None.
MINIMA = {"max_new_tokens": 1, "num_steps": 0, "topk": 1, "num_draft_tokens": 2, "relaxed_topk": 1, "draft_window": 1}
MINIMA |= {"draft_sinks": 0, "max_length": 2, "prefill_chunk": 1, "min_rows": 1}


def check_integer(name: str, value: Any) -> int:
    """Checks a Python or NumPy integer and converts it to a Python integer.

    Args:
        name: the argument's name, for the message.
        value: the value.

    Returns:
        A Python integer.

    Raises:
        ValueError: the value is not an integer, or does not fit into int32.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise ValueError(f"{name} must be an integer, got {value!r}")
    # Limits may be huge, because the model's maximum length bounds the tokens, and rounds stop once all rows have
    # ended.
    is_limit = name in ("max_new_tokens", "max_rounds")
    require(is_limit or abs(number) <= MAX_INTEGER, f"{name} must be at most {MAX_INTEGER}, got {number}")
    return number


def _float(name: str, value: Any) -> float:
    """Converts a Python or NumPy number to a float; raises `ValueError` for anything else."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(value)


def _elements(name: str, value: Any) -> tuple[Any, ...]:
    """Returns the elements of a sequence; raises `ValueError` for text and for values that are not iterable."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a sequence, got {value!r}")
    return tuple(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Settings of a decoding call.

    Shapes and rules are static, so changing them compiles a new program. Limits, stop sequences, thresholds, costs and
    vocabularies enter the compiled call as arrays, so changing their values does not recompile. A call warns about
    settings that have no effect because of other settings.

    Attributes:
        max_new_tokens: maximum number of new tokens per row, at least 1.
        drafter: the draft method, which is "mtp" (the model's MTP modules), "lookup" (n-grams copied from the row's own
            text), or a `mtpjax.drafters.Drafter` (your own, or an EAGLE-3, Medusa, DFlash or DSpark drafter from
            `load_drafter`).
        num_steps: draft levels per round; 0 is plain decoding. Levels beyond the number of MTP modules run the last
            module again on its own output. SGLang: `speculative_num_steps`.
        topk: candidates drafted per node at each level; 1 drafts a chain, and more than 1 drafts a tree. With drafter
            "mtp", a tree needs a model with exactly one MTP module. SGLang: `speculative_eagle_topk`.
        num_draft_tokens: nodes verified per round, including the pending token. None: `num_steps + 1` for a chain; for
            a tree, the largest number that topk and num_steps allow, at most 64. SGLang:
            `speculative_num_draft_tokens`.
        acceptance: name of an acceptance rule (`mtpjax.decoding.acceptance.rules`), `package.module:RECORD`, or an
            `AcceptanceRule`. "auto" is "greedy" if every row is at temperature 0, else "block" for a chain and
            "recursive" for a tree. On a chain, "recursive" is the same as "token", and "traversal" the same as "block".
            "threshold", "typical" and "relaxed" are lossy: they change the distribution of the text.
        depth_policy: "fixed" drafts num_steps levels in every round. "adaptive" chooses 0 to num_steps levels before
            each round; it supports only chains.
        depth_costs: duration of a round at each depth 0..num_steps, in any unit (measured by `mtpjax profile`).
            Required for an adaptive depth.
        depth_rates: conditional acceptance rate of each level 1..num_steps (given that the levels before it were
            accepted), measured on similar texts (`mtpjax eval acceptance`). An adaptive depth starts from these rates.
            None: it starts from an assumed rate.
        prompt_lookup_min: minimum length of the n-grams that "lookup" matches, in tokens.
        prompt_lookup_max: maximum length of the n-grams that "lookup" matches, in tokens.
        threshold_single: "threshold" accepts every draft to which the model gives at least this probability; 1 is
            exact. SGLang: `speculative_accept_threshold_single`.
        threshold_acc: "threshold" divides the acceptance probability by this number; 1 is exact. SGLang:
            `speculative_accept_threshold_acc`.
        typical_epsilon: "typical" accepts a draft whose probability is above this number. Medusa: posterior threshold.
        typical_delta: "typical" also accepts a draft whose probability is above this number times exp(-entropy).
            Medusa: posterior alpha.
        relaxed_topk: "relaxed" accepts only drafts among the `relaxed_topk` most likely tokens (TensorRT-LLM).
        relaxed_delta: "relaxed" accepts only drafts whose probability is within this distance of the most likely
            token's.
        draft_vocabulary: token ids that the MTP modules may draft (FR-Spec, 2502.14856); None: all. It does not change
            the distribution of the text.
        draft_window: number of newest positions that the MTP modules attend to, in addition to the first `draft_sinks`
            positions; None: all positions.
        draft_sinks: number of initial positions that the MTP modules always attend to if `draft_window` is set.
        stop_token_ids: a row ends after any of these tokens. The result includes the token.
        stop_sequences: a row ends after any of these sequences of new tokens. The result includes the sequence.
        logprobs: report the log-probability of each new token under the trunk's unmodified logits.
        max_length: maximum length of a row in tokens, prompt included; None: the model's `max_position_embeddings`.
        prefill_chunk: tokens per row in one prefill pass. None: 64 on a CPU; on a GPU up to 2048, depending on prompts
            and memory, because each pass reads all weights.
        implementation: implementation of the model's kernels: "xla" (plain JAX), "triton" (GPU kernels), "interpreted"
            (the GPU kernels on any machine, slowly) or "auto" (`pallas_kernels.dispatch`). None: the model's setting.
        kv_cache_dtype: dtype of keys, values and latents in the caches, with SGLang's names: "auto" (the embedding's
            dtype), "bfloat16" or "fp8_e4m3". fp8 needs half the memory of bfloat16. It rounds entries to 3 fraction
            bits without scaling them, and clamps them to ±448. Speculative and plain decoding still produce the same
            text if both use it. The states of recurrent layers keep their dtype.
        deterministic: make each row's text independent of the other rows in the batch. Kernels then split their work in
            the same way at every batch size, which is slower (docs/guides/kernels.md). Requires the kernels on a GPU,
            or implementation "interpreted".
        allow_copies: on a mesh, replicate heads, columns, experts or the vocabulary if an axis does not divide their
            number, instead of raising an error.
        min_rows: minimum number of token rows per forward pass; narrower passes are padded. None: 2 for a batch of one
            on a GPU if the model has no experts, else 1.

    Raises:
        ValueError: if a value is out of range, or settings contradict each other.

    Example:
        >>> from mtpjax import DecodeConfig
        >>> config = DecodeConfig(max_new_tokens=64, num_steps=3)
        >>> config.num_nodes  # a chain of three drafts after the pending token
        4
        >>> DecodeConfig(num_steps=3, topk=2, num_draft_tokens=8).num_nodes  # a tree
        8
    """

    max_new_tokens: int = 128
    drafter: str | Any = "mtp"
    num_steps: int = 1
    topk: int = 1
    num_draft_tokens: int | None = None
    acceptance: str | AcceptanceRule = "auto"
    depth_policy: Literal["fixed", "adaptive"] = "fixed"
    depth_costs: tuple[float, ...] | None = None
    depth_rates: tuple[float, ...] | None = None
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    threshold_single: float = PARAMETERS["threshold_single"]
    threshold_acc: float = PARAMETERS["threshold_acc"]
    typical_epsilon: float = PARAMETERS["typical_epsilon"]
    typical_delta: float = PARAMETERS["typical_delta"]
    relaxed_topk: int = int(PARAMETERS["relaxed_topk"])
    relaxed_delta: float = PARAMETERS["relaxed_delta"]
    draft_vocabulary: tuple[int, ...] | None = None
    draft_window: int | None = None
    draft_sinks: int = 4
    stop_token_ids: tuple[int, ...] = ()
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    logprobs: bool = False
    max_length: int | None = None
    prefill_chunk: int | None = None
    implementation: Implementation | None = None
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8_e4m3"] = "auto"
    deterministic: bool = False
    allow_copies: bool = False
    min_rows: int | None = None

    def __post_init__(self):
        # 1. Check types first, so that later checks compare plain numbers. Lists become tuples, which are hashable.
        check_scalar_fields(self)
        self._convert_sequences()
        # 2. Check the ranges of single values.
        for name, minimum in MINIMA.items():
            value = getattr(self, name)
            require(value is None or value >= minimum, f"{name} must be at least {minimum}, got {value}")
            check_integer(name, minimum if value is None else value)
        require(self.num_steps <= MAX_STEPS, f"num_steps must be at most {MAX_STEPS}, got {self.num_steps}")
        for name in ("prompt_lookup_min", "prompt_lookup_max"):
            check_integer(name, getattr(self, name))
        require(
            1 <= self.prompt_lookup_min <= self.prompt_lookup_max,
            f"prompt_lookup_min ({self.prompt_lookup_min}) must be at least 1 and at most prompt_lookup_max "
            f"({self.prompt_lookup_max})",
        )
        for name in ("threshold_single", "threshold_acc"):
            require(0 <= getattr(self, name) <= 1, f"{name} must be within 0..1, got {getattr(self, name)}")
        for name in ("typical_epsilon", "typical_delta", "relaxed_delta"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"{name} must be finite and at least 0, got {value}")
        # 3. Drafters may also be the user's own objects.
        is_drafter = hasattr(self.drafter, "propose") and not isinstance(self.drafter, type)
        require(
            is_drafter or isinstance(self.drafter, str),
            f"drafter must be a name such as 'mtp' or 'lookup', or a Drafter, got {self.drafter!r}",
        )
        require(all(self.stop_sequences), "stop_sequences contains an empty sequence")
        # 4. Check combinations of values.
        self._check_tree()
        self._check_policy()

    def _convert_sequences(self):
        """Converts sequences to tuples of Python numbers; reads each iterator only once."""
        convert: dict[str, Any] = dict.fromkeys(("stop_token_ids", "draft_vocabulary"), check_integer)
        convert |= dict.fromkeys(("depth_costs", "depth_rates"), _float)
        for name, of in convert.items():
            value = getattr(self, name)
            if value is not None or name == "stop_token_ids":
                object.__setattr__(self, name, tuple(of(name, each) for each in _elements(name, value)))
        sequences = [_elements("stop_sequences", each) for each in _elements("stop_sequences", self.stop_sequences)]
        stops = tuple(tuple(check_integer("stop_sequences", each) for each in row) for row in sequences)
        object.__setattr__(self, "stop_sequences", stops)

    def _check_tree(self):
        """Checks that the rule supports the tree, and that the tree can have `num_draft_tokens` nodes."""
        rule = self.rule
        if rule is not None and rule.drafts == "chain" and self.num_steps:
            require(self.topk == 1, f"acceptance '{rule}' supports only chains: set topk to 1, got {self.topk}")
        if self.num_draft_tokens is None or not self.num_steps:
            return
        shape = f"topk {self.topk} and num_steps {self.num_steps}"
        if self.topk == 1:
            require(
                self.num_draft_tokens == self.num_steps + 1,
                f"num_draft_tokens must be {self.num_steps + 1} for a chain ({shape}), got {self.num_draft_tokens}",
            )
        max_nodes = largest_tree(self.topk, self.num_steps)
        require(
            self.num_draft_tokens <= max_nodes,
            f"num_draft_tokens must be at most {max_nodes} for {shape}, got {self.num_draft_tokens}",
        )

    def _check_policy(self):
        """Checks that an adaptive depth has costs and, if given, rates that match `num_steps`."""
        if self.depth_policy == "fixed" or not self.num_steps:
            return
        require(self.topk == 1, f"depth_policy 'adaptive' supports only chains: set topk to 1, got {self.topk}")
        given = "none" if self.depth_costs is None else str(len(self.depth_costs))
        require(
            self.depth_costs is not None and len(self.depth_costs) == self.num_steps + 1,
            f"depth_policy 'adaptive' needs {self.num_steps + 1} depth_costs, for depths 0..{self.num_steps}; got "
            f"{given} (`mtpjax profile` measures them)",
        )
        require(
            all(math.isfinite(cost) and cost > 0 for cost in self.depth_costs or ()),
            f"depth_costs must be positive and finite, got {self.depth_costs}",
        )
        rates = self.depth_rates
        require(
            rates is None or (len(rates) == self.num_steps and all(0 < rate <= 1 for rate in rates)),
            f"depth_rates must hold {self.num_steps} rates (one per level), each above 0 and at most 1; got {rates}",
        )

    @property
    def rule(self) -> AcceptanceRule | None:
        """The acceptance rule; None for "auto"."""
        return None if self.acceptance == "auto" else find_rule(self.acceptance)

    @property
    def rule_params(self) -> tuple[float, ...]:
        """The values of the rule's parameters, in the order in which the rule lists them."""
        parameters = {} if self.rule is None else self.rule.parameters
        return tuple(float(getattr(self, name, default)) for name, default in parameters.items())

    @property
    def num_nodes(self) -> int:
        """Number of nodes verified per round, W, including the pending token."""
        if self.topk == 1 or not self.num_steps:
            return self.num_steps + 1
        return self.num_draft_tokens or min(DEFAULT_MAX_NODES, largest_tree(self.topk, self.num_steps))


def largest_tree(topk: int, num_steps: int) -> int:
    """Computes the number of nodes in the largest tree, including the root.

    In SGLang's construction, level 1 has topk nodes, and the topk best nodes of each level get topk children each.

    Args:
        topk: children per expanded node.
        num_steps: depth of the tree, at least 1.

    Returns:
        `1 + topk + (num_steps - 1) * topk^2`.
    """
    return 1 + topk + (num_steps - 1) * topk**2


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters. Each field is one value for all rows, or a sequence with one value per row.

    They are applied in this order: penalties, bias, banned tokens, temperature, top_k, top_p, min_p (formulas:
    `mtpjax.decoding.sampling`).

    Attributes:
        temperature: softmax temperature; 0 is greedy.
        top_k: keep only the `top_k` most likely tokens; 0 keeps all.
        top_p: after top_k, keep the fewest most likely tokens with at least this total probability; 1 keeps all.
        min_p: keep tokens with at least this fraction of the most likely token's probability; 0 keeps all.
        repetition_penalty: penalty for tokens in the prompt or the new text (CTRL, 1909.05858); 1 is off.
        frequency_penalty: penalty per occurrence of a token in the new text, as in OpenAI's API; 0 is off.
        presence_penalty: penalty for tokens that occur in the new text, as in OpenAI's API; 0 is off.
        min_new_tokens: minimum number of new tokens. Until then, single stop tokens are banned and longer stop
            sequences do not end the row.
        logit_bias: values to add to the logits by token id; one mapping for all rows, or one (or None) per row.
        allowed_tokens: the only token ids that may be generated; one sequence for all rows, or one (or None) per row.
        banned_tokens: token ids that may not be generated, in the same form as allowed_tokens.
        seed: seed of the row's random numbers, 0..2^64-1; None derives it from the call's key.

    Raises:
        ValueError: if a value has the wrong type or is out of range. A decoding call also checks token ids against the
            vocabulary, and the lengths of sequences against the number of rows.

    Example:
        >>> from mtpjax import SamplingParams
        >>> SamplingParams(temperature=[0.0, 0.8], top_p=0.95, seed=[1, 2]).top_p
        0.95
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

    def __post_init__(self):
        # An iterator can be read only once, but these fields are read several times. Keep its elements instead.
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _materialise(getattr(self, field.name)))
        check_sampling(vars(self))


def _materialise(value: Any) -> Any:
    """Replaces iterators, including those inside a list or tuple, with tuples of their elements."""
    if isinstance(value, Iterator):
        value = tuple(value)
    if type(value) in (list, tuple):
        return type(value)(_materialise(each) for each in value)
    return value
