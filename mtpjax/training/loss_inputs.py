"""Custom objectives: a function of `LossInputs` that replaces the training loss or adds to it."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mtpjax.models.forward import DepthsOutput
from mtpjax.training.losses import BatchTotals, valid_mean
from mtpjax.training.position_losses import PositionTerms


class LossInputs(NamedTuple):
    """The arguments of an objective, for the rows of one device or of one step of accumulation.

    Values that an objective does not read are not computed.

    Attributes:
        loss: `[]` the loss that the run minimises without a custom objective: `inputs.loss + extra` adds to it.
        terms: cross-entropy of trunk and depths, and the depths' KL and overlap with the trunk, at each position.
        targets: `[1 + num_depths, B, T]` int32, the token that trunk (0) and depth k predict at each position.
        is_valid: `[1 + num_depths, B, T]` bool, which targets count.
        output: logits and hidden states of trunk and depths; a block drafter's levels have those of its anchors,
            `[B, A, ...]`. Reading logits stores them, also with `vocab_chunk`.
        totals: counts of valid targets in the whole batch; `mean` uses them.
        mtp_scale: `[]` lambda, the weight of the draft losses.
        progress: `[]` fraction of the run that is done, 0..1.

    Example:
        >>> import jax
        >>> from mtpjax.training import LossInputs
        >>> def z_loss(inputs: LossInputs) -> jax.Array:
        ...     '''Adds the squared log-normaliser of the trunk's softmax (PaLM, 2204.02311).'''
        ...     normaliser = jax.nn.logsumexp(inputs.output.logits, axis=-1)
        ...     return inputs.loss + 1e-4 * inputs.mean(normaliser**2, depth=0)
    """

    loss: jax.Array
    terms: PositionTerms
    targets: jax.Array
    is_valid: jax.Array
    output: DepthsOutput
    totals: BatchTotals
    mtp_scale: jax.Array | float
    progress: jax.Array | float

    def mean(self, values: jax.Array, *, depth: int) -> jax.Array:
        """Averages values over the valid positions of a depth in the whole batch.

        With accumulation or a mesh an objective gets a part of the batch at a time. The means of the parts add up to
        the batch's, because all of them divide by the batch's number of targets. Sum such means; do not multiply them.

        Args:
            values: `[B, T]` a value for each position.
            depth: draft depth; 0 is the trunk.

        Returns:
            `[]` the part's share of the mean; 0 without valid targets.
        """
        return valid_mean(values, self.is_valid[depth], self.totals.num_valid[depth])


ObjectiveFunction = Callable[[LossInputs], jax.Array]


def call_objective(objective_function: ObjectiveFunction, inputs: LossInputs) -> jax.Array:
    """Calls an objective and checks its result.

    Returns `[]` float32 loss.
    """
    loss = jnp.asarray(objective_function(inputs))
    if loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ValueError(
            f"the objective {describe_objective(objective_function)} returned {loss.dtype.name}{list(loss.shape)}, not"
            " one floating-point number"
        )
    return loss.astype(jnp.float32)


def describe_objective(objective_function: ObjectiveFunction) -> str:
    """Returns the name of an objective, as a run's settings keep it."""
    named = objective_function if hasattr(objective_function, "__qualname__") else type(objective_function)
    return f"{named.__module__}.{named.__qualname__}"
