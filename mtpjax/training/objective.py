"""Defines `Objective`, the frozen and hashable settings of the draft losses."""

import dataclasses
import numbers
from collections.abc import Mapping
from typing import Literal

from mtpjax.field_types import check_mapping, check_range, check_scalar_fields, check_used
from mtpjax.messages import require, require_choice

OBJECTIVES = ("cross_entropy", "kl", "total_variation", "lk_hybrid", "end_to_end_tv")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """Losses of the draft depths. The trunk always minimises cross-entropy.

    The draft loss is a weighted sum (a mix) of the objectives "cross_entropy", "kl", "total_variation", "lk_hybrid" and
    "end_to_end_tv", whose formulas are in `mtpjax.training.losses`.

    Args:
        mix: weight of each objective by name, as a dict or as pairs; stored as pairs. (): `TrainConfig` sets it to
            cross-entropy if `trains` is "all", and to KL if the draft losses do not reach the trunk.
        start: mix at update 0, interpolated linearly to `mix` over the first fraction `warmup` of the run. (): `mix`
            from the beginning.
        warmup: fraction of the run over which `start` becomes `mix`, 0..1. Set together with `start`.
        lk_decay: eta of the LK hybrid (2602.23881).
        depth_weights: weights of the depths in a loss: "mean" (equal, DeepSeek-V3), or "decayed" (FastMTP,
            2509.18362). Both sum to 1; the run's lambda multiplies them. "end_to_end_tv" ignores them, because its
            formula already weights the depths.
        depth_decay: beta of "decayed": depth k has weight `beta^(k-1)` before normalisation.
        vocab_chunk: compute losses over this many columns of the vocabulary at a time and never store `[B, T, V]`
            logits; 0: store the logits; None: choose by platform and sizes
            (`mtpjax.training.position_losses.choose_vocab_chunk`).

    Raises:
        ValueError: an objective is unknown, a number is out of range, or a setting is unused.

    Example:
        >>> from mtpjax import Objective
        >>> objective = Objective(mix={"end_to_end_tv": 1.0}, start={"cross_entropy": 1.0}, warmup=0.1)
        >>> sorted(objective.names)
        ['cross_entropy', 'end_to_end_tv']
    """

    mix: Mapping[str, float] | tuple[tuple[str, float], ...] = ()
    start: Mapping[str, float] | tuple[tuple[str, float], ...] = ()
    warmup: float = 0.0
    lk_decay: float = 3.0
    depth_weights: Literal["mean", "decayed"] = "mean"
    depth_decay: float = 0.6
    vocab_chunk: int | None = None

    def __post_init__(self):
        check_scalar_fields(self)
        # A mapping becomes pairs, so that the objective is hashable and can be a static argument of jit.
        for field in ("mix", "start"):
            weights = check_mapping(field, getattr(self, field))
            for name, weight in weights.items():
                require_choice("objective", name, OBJECTIVES)
                require(isinstance(weight, numbers.Real), f"the weight of {name} must be a number, got {weight!r:.80}")
                check_range(f"the weight of {name}", weight, 0)
            object.__setattr__(self, field, tuple(weights.items()))
        # A warm-up needs a mix to start from, and without a warm-up `start` has no effect.
        check_range("warmup", self.warmup, 0, 1)
        require(
            bool(self.start) == (self.warmup > 0), f"start {self.start} and warmup {self.warmup} must be set together"
        )
        check_range("lk_decay", self.lk_decay, 0)
        require(0 < self.depth_decay <= 1, f"depth_decay must be positive and at most 1, not {self.depth_decay}")
        if self.vocab_chunk is not None:
            check_range("vocab_chunk", self.vocab_chunk, 0)
        rows = (
            ("lk_decay", "lk_hybrid" in self.names, "the objective 'lk_hybrid' in mix or start"),
            ("depth_decay", self.depth_weights == "decayed", "depth_weights 'decayed'"),
            ("depth_weights", self.names != {"end_to_end_tv"}, "an objective other than 'end_to_end_tv'"),
        )
        check_used(self, rows, "objective.")

    @property
    def names(self) -> set[str]:
        """The names of the objectives in either mix."""
        return {name for name, _ in (*self.mix, *self.start)}

    @property
    def comparison(self) -> Literal["none", "kl", "all"]:
        """The terms that compare drafts with the trunk: none (only the data), KL, or KL and the overlap."""
        if self.names <= {"cross_entropy"}:
            return "none"
        return "kl" if self.names <= {"cross_entropy", "kl"} else "all"
