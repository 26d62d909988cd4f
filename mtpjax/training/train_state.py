"""The state of a training run, with parameters, optimiser state and the number of updates."""

import flax.struct
import jax
import jax.numpy as jnp
import optax

from mtpjax.models.params import is_of_modules


class TrainState(flax.struct.PyTreeNode):
    """The pytree that an update changes. `init_train_state` makes one, and `train_step` returns a new one.

    Attributes:
        params: all parameters, with stacked trunk layers.
        optimizer: optimiser state for the trained parameters.
        step: `[]` int32 number of updates, including skipped ones.

    Example:
        >>> import jax, optax
        >>> from mtpjax import MTPModel, init_params, presets
        >>> from mtpjax.training import init_train_state
        >>> params = init_params(MTPModel(presets["tiny"], scan_layers=True), jax.random.key(0))
        >>> state = init_train_state(params, optax.adamw(1.0))
        >>> int(state.step), sorted(state.params)
        (0, ['embedding', 'head', 'mtp_0', 'norm_final', 'trunk'])
    """

    params: dict
    optimizer: optax.OptState
    step: jax.Array


def init_train_state(params: dict, optimizer: optax.GradientTransformation, trains: str = "all") -> TrainState:
    """Makes the state before the first update.

    Args:
        params: all parameters, with stacked trunk layers.
        optimizer: the optimiser; it keeps state for trained parameters only.
        trains: the trained part, as in `TrainConfig`.

    Returns:
        The state.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> from mtpjax.training import init_train_state
        >>> params = {"trunk": jnp.ones(2), "mtp_0": jnp.ones(3)}
        >>> state = init_train_state(params, optax.adamw(1.0), trains="modules")
        >>> sum(leaf.size for leaf in jax.tree.leaves(state.optimizer))  # two moments of three numbers, and a counter
        7
    """
    return TrainState(params, optimizer.init(trainable_params(params, trains)), jnp.zeros((), jnp.int32))


def trainable_params(params: dict, trains: str) -> dict:
    """Selects the parameters that training changes.

    Args:
        params: parameters by top-level name, or a tree of the same structure, such as their shardings.

    Returns:
        For "modules", the parameters of the MTP modules or of the drafter; otherwise all parameters.
    """
    return {name: leaf for name, leaf in params.items() if trains != "modules" or is_of_modules(name)}
