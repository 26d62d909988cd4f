"""An op that computes router logits and chooses the best experts for each token, with its kernel and reference.

Bottleneck: the launches, because decoding has few rows. Two kernels replace eleven. The first computes the product and
splits it over the processors, because reading the router with only one processor would take longer than all these
launches. The second chooses the experts, with one program per token.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.backend import triton as plt
from pallas_kernels.batch_invariance import is_batch_invariant
from pallas_kernels.block_scaled_matmul import MAX_ROWS, partial_matmul
from pallas_kernels.case import Case, Shape, random_keys, random_normal
from pallas_kernels.dispatch import choose
from pallas_kernels.partial_sums import PartialSums, load_sum
from pallas_kernels.top_k import top_k


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """The rule that chooses each token's experts (DeepSeek-V3, 2412.19437, section 2.1.2).

    Attributes:
        k: Experts per token.
        scoring: "sigmoid" or "softmax", the function that maps logits to scores.
        num_groups: Number of groups of consecutive experts; 1: no groups.
        num_kept_groups: Number of groups that a token may choose from, ranked by the sum of their two best scores.
        normalises: Whether to divide the weights by their sum.
        factor: Factor that multiplies the weights.
    """

    k: int
    scoring: str = "sigmoid"
    num_groups: int = 1
    num_kept_groups: int = 1
    normalises: bool = True
    factor: float = 1.0


def route_tokens(
    x, router, bias, routing: Routing, *, is_used=None, implementation="auto"
) -> tuple[jax.Array, jax.Array]:
    """Chooses experts and their weights for each token.

    Logits are float32, because their last bits decide between experts. The scores plus the bias first select the
    groups, then the experts within them; ties go to the lowest index. The weights are the scores without the bias. Only
    "xla" is differentiable, through the weights.

    Args:
        x: [n, D] floating.
        router: [D, E] floating.
        bias: [E] floating, or None.
        is_used: [n] bool; unused tokens are not routed and get ids of E. None: all tokens are used.
        implementation: As for every op. With more than 64 rows, "xla" always runs.

    Returns:
        Ids [n, k] int32 and weights [n, k] float32 of the chosen experts.
    """
    if x.ndim != 2 or router.ndim != 2 or x.shape[1] != router.shape[0]:
        raise ValueError(f"x {x.shape} does not fit the router {router.shape}: expected [n, D] and [D, E]")
    (n, D), E = x.shape, router.shape[1]
    is_possible = E % routing.num_groups == 0 and 1 <= routing.k <= E // routing.num_groups * routing.num_kept_groups
    if not is_possible or (bias is not None and bias.shape != (E,)):
        raise ValueError(f"{routing} does not fit {E} experts" + ("" if bias is None else f" and a bias {bias.shape}"))
    shape = {"rows": n, "inputs": D, "experts": E, "chosen": routing.k, "dtype": str(x.dtype)}
    shape["scoring"] = routing.scoring + " in groups" * (routing.num_groups > 1)
    check = functools.partial(difference_from_reference, dtype=x.dtype, routing=routing, has_bias=bias is not None)
    chosen = choose("route_tokens", implementation, ("xla", "triton"), shape, check=check)
    if chosen == "xla" or not 0 < n <= (n if is_batch_invariant() else MAX_ROWS):
        logits = x.astype(jnp.float32) @ router.astype(jnp.float32)
        ids, weights = select_experts_reference(logits, bias, routing)
        return ids if is_used is None else jnp.where(is_used[:, None], ids, E), weights
    # The second kernel adds the parts of the split product as it loads them.
    logits = partial_matmul(x, router, dtype=jnp.float32, implementation=chosen)
    return _select_experts_triton(logits, bias, is_used, routing, chosen == "interpreted")


def make_case(shape: Shape) -> Case:
    # The shape only says whether there are groups, so use four groups if four divides the number of experts.
    groups = 4 if shape["scoring"].endswith("in groups") and shape["experts"] % 4 == 0 else 1
    scoring = shape["scoring"].split()[0]
    routing = Routing(k=shape["chosen"], scoring=scoring, num_groups=groups, num_kept_groups=groups)
    keys, experts = random_keys(), shape["experts"]
    x = random_normal(keys, (shape["rows"], shape["inputs"]), shape["dtype"])
    arrays = x, random_normal(keys, (shape["inputs"], experts)), jnp.zeros(experts)
    return functools.partial(route_tokens, routing=routing), arrays


def difference_from_reference(implementation: str, *, dtype, routing: Routing, has_bias: bool) -> float:
    """Compares the chosen experts' weights with the reference, as `case.difference_from_xla` does for other ops."""
    n, D, E = 3, 64, routing.num_groups * -(-max(2, routing.k) // routing.num_kept_groups)
    keys = jax.random.split(jax.random.key(0), 3)
    x, router = jax.random.normal(keys[0], (n, D), dtype), jax.random.normal(keys[1], (D, E)) / 8
    bias = jax.random.normal(keys[2], (E,)) / 8 if has_bias else None

    # Compare by expert, so that the order of the chosen experts does not matter.
    def weight_of_each(ids, weights):
        return (jax.nn.one_hot(ids, E) * weights[:, :, None]).sum(axis=1)

    found = weight_of_each(*route_tokens(x, router, bias, routing, implementation=implementation))
    logits = jnp.matmul(x.astype(jnp.float32), router, precision=jax.lax.Precision.HIGHEST)
    expected = weight_of_each(*select_experts_reference(logits, bias, routing))
    return float(jnp.abs(found - expected).max() / (1e-4 * jnp.abs(expected).max()))


def select_experts_reference(logits, bias, routing: Routing) -> tuple[jax.Array, jax.Array]:
    """Chooses experts from float32 logits [n, E] in plain JAX, which defines the meaning of `route_tokens`."""
    n, E = logits.shape
    scores = jax.nn.sigmoid(logits) if routing.scoring == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    choice = scores if bias is None else scores + bias[None, :].astype(jnp.float32)
    # Keep the experts of the best groups.
    if routing.num_groups > 1:
        grouped = choice.reshape(n, routing.num_groups, -1)
        best_two = top_k(grouped, min(2, grouped.shape[-1]))[0].sum(axis=-1)
        _, kept = top_k(best_two, routing.num_kept_groups)
        is_kept = jax.nn.one_hot(kept, routing.num_groups).sum(axis=1) > 0
        choice = jnp.where(is_kept[:, :, None], grouped, -jnp.inf).reshape(n, E)
    # Choose the experts, and weight them by their scores without bias.
    _, ids = top_k(choice, routing.k)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if routing.normalises:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return ids, weights * routing.factor


def _select_experts_triton(logits: PartialSums, bias, is_used, routing, interpret):
    """Runs one program for each token."""
    n, E = logits.shape
    # Triton arrays have power-of-two sizes, so the groups and the experts in each group are padded.
    groups = pl.next_power_of_2(routing.num_groups)
    per_group = pl.next_power_of_2(E // routing.num_groups)
    # Convert the mask to integers, which have the same size in memory as in a register.
    optional = {"bias": bias, "is_used": None if is_used is None else is_used.astype(jnp.int32)}
    optional = {name: array for name, array in optional.items() if array is not None}
    return tuple(
        pl.pallas_call(
            functools.partial(
                _select_experts_kernel, names=tuple(optional), tile=(groups, per_group), routing=routing, num_experts=E
            ),
            out_shape=[
                jax.ShapeDtypeStruct((n, routing.k), jnp.int32),
                jax.ShapeDtypeStruct((n, routing.k), jnp.float32),
            ],
            grid=(n,),
            compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
            cost_estimate=pl.CostEstimate(
                flops=logits.parts.size + 8 * routing.k * n * E,
                transcendentals=n * E,
                bytes_accessed=logits.parts.nbytes
                + (0 if bias is None else n * bias.nbytes)
                + 8 * n * routing.k
                + 4 * n * ("is_used" in optional),
            ),
            metadata={"from_l2": str(0 if bias is None else (n - 1) * bias.nbytes)},
            interpret=interpret,
            name="select_experts",
        )(logits.parts, *optional.values())
    )


def _select_experts_kernel(parts_ref, *refs, names, tile, routing, num_experts):
    """Chooses the experts for one token; scores are [groups, experts per group], padded to powers of two."""
    *optional_refs, ids_ref, weights_ref = refs
    optional = dict(zip(names, optional_refs, strict=True))
    token = pl.program_id(0)
    per_group = num_experts // routing.num_groups
    # Compute the expert index of each position; padding gets indices after all experts.
    group, member = jnp.arange(tile[0]), jnp.arange(tile[1])
    is_expert = (group < routing.num_groups)[:, None] & (member < per_group)[None, :]
    expert = jnp.where(is_expert, group[:, None] * per_group + member[None, :], num_experts)
    lowest = -jnp.inf

    # Add the parts of the logits, and compute the scores.
    logits = load_sum(parts_ref, (token, expert), is_expert, jnp.float32)
    if routing.scoring == "sigmoid":
        scores = jax.nn.sigmoid(logits)
    else:
        largest = jnp.max(jnp.max(jnp.where(is_expert, logits, lowest), axis=1), axis=0)
        exponentials = jnp.where(is_expert, jnp.exp(logits - largest), 0.0)
        scores = exponentials / jnp.sum(jnp.sum(exponentials, axis=1), axis=0)
    choice = scores
    if "bias" in optional:
        choice = choice + plt.load(optional["bias"].at[expert], mask=is_expert, other=0.0).astype(jnp.float32)
    choice = jnp.where(is_expert, choice, lowest)

    # Keep the best groups, one at a time, by the sum of their two best experts. `argmax` picks the lowest index among
    # equal values, and does not compare numbers that a compiler may have computed twice with different rounding.
    if routing.num_groups > 1:
        value = jnp.max(choice, axis=1)
        if per_group > 1:
            is_first = member[None, :] == jnp.argmax(choice, axis=1)[:, None]
            value = value + jnp.max(jnp.where(is_first, lowest, choice), axis=1)
        is_kept = group < 0
        for _ in range(routing.num_kept_groups):
            is_best = group == jnp.argmax(jnp.where(is_kept, lowest, value), axis=0)
            is_kept = is_kept | is_best
        choice = jnp.where(is_kept[:, None], choice, lowest)

    # Choose experts one at a time.
    place = jnp.arange(pl.next_power_of_2(routing.k))
    ids, weights = jnp.zeros(place.shape, jnp.int32), jnp.zeros(place.shape, jnp.float32)
    for step in range(routing.k):
        is_best_group = group == jnp.argmax(jnp.max(choice, axis=1), axis=0)
        is_best = is_best_group[:, None] & (member[None, :] == jnp.argmax(choice, axis=1)[:, None])
        index, score = (
            jnp.sum(jnp.sum(jnp.where(is_best, of_each, 0), axis=1), axis=0) for of_each in (expert, scores)
        )
        ids, weights = jnp.where(place == step, index, ids), jnp.where(place == step, score, weights)
        choice = jnp.where(is_best, lowest, choice)
    # Normalise the weights. An unused token gets ids after all experts.
    if routing.normalises:
        weights = weights / (jnp.sum(weights, axis=0) + 1e-20)
    if "is_used" in optional:
        ids = jnp.where(plt.load(optional["is_used"].at[token]) != 0, ids, num_experts)
    is_place = place < routing.k
    plt.store(ids_ref.at[token, place], ids, mask=is_place)
    plt.store(weights_ref.at[token, place], weights * routing.factor, mask=is_place)
