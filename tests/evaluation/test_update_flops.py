"""Model FLOPs of an update, compared with XLA's count of a compiled update, with traces, and with counts by hand."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import ModelConfig, MTPModel, TrainConfig, init_params
from mtpjax.data.packing import Batch
from mtpjax.drafters.forward import forward_drafter, read_layers
from mtpjax.evaluation.update_flops import Trained, total_flops, update_flops
from mtpjax.models.flops import RowCounts, attention_flops, indexer_flops
from mtpjax.models.params import param_shapes
from mtpjax.training.gradients import TrainSpec
from mtpjax.training.step import make_optimizer, train_step
from mtpjax.training.train_state import init_train_state
from tests.helpers.new_drafters import LEVELS, new_drafter
from tests.helpers.small_models import small_config

DENSE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "num_mtp_modules": 1,
}
GROUPED = {**DENSE, "num_key_value_heads": 2}
LATENT = {
    **DENSE,
    "attention": "latent",
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}


class AllPairs(RowCounts):
    """Rows whose attention computes every pair of tokens, as plain XLA does before it masks the scores."""

    def pairs(self, limit: int = 0) -> int:
        return int((self.lengths.astype(int) ** 2).sum())


@pytest.mark.parametrize(
    ("config", "trains", "num_depths"),
    [
        (GROUPED, "all", 1),
        (GROUPED, "modules", 1),
        ({**GROUPED, "tie_word_embeddings": True}, "detached", 1),
        ({**GROUPED, "num_mtp_modules": 2, "mtp_own_head": True}, "modules", 2),
        (LATENT, "all", 1),
    ],
)
def test_count_matches_xlas_count_of_a_compiled_update(config, trains, num_depths):
    # XLA counts the body of a loop once, so the layers are unrolled, and rows are too short for attention by blocks.
    model, B, T = MTPModel(ModelConfig(**config), implementation="xla"), 2, 192
    params = param_shapes(model.config)
    optimizer = make_optimizer(TrainConfig(trains=trains))
    state = jax.eval_shape(lambda params: init_train_state(params, optimizer, trains), params)
    spec = TrainSpec(model=model, num_depths=num_depths, trains=trains)
    step = jax.jit(functools.partial(train_step, spec=spec, optimizer=optimizer))
    arrays: list[Any] = [jax.ShapeDtypeStruct((B, T), dtype) for dtype in (jnp.int32, jnp.int32, bool)]
    cost: Any = step.lower(state, Batch(*arrays), 0.1, 0.3).compile().cost_analysis()
    counted = update_flops(model.config, params, AllPairs.full(B, T), Trained(trains, num_depths))
    # XLA also counts norms, softmax, losses and the optimiser.
    assert counted is not None
    assert 1.0 < cost["flops"] / total_flops(counted) < 1.04


def product_flops_in(jaxpr) -> float:
    """Counts two FLOPs for each multiplication of every `dot_general` in a trace."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
        inner = [value for value in equation.params.values() if hasattr(value, "jaxpr") or hasattr(value, "eqns")]
        repeats = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        total += repeats * sum(product_flops_in(getattr(each, "jaxpr", each)) for each in inner)
    return total


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "dflash", "dspark"])
def test_drafter_count_matches_a_trace(small, kind):
    model, params, drafter = new_drafter(small, kind)
    B, T, A = 2, 48, 5
    config = model.config
    features = (len(read_layers(drafter)) + 1) * config.hidden_size
    states, rows = jax.ShapeDtypeStruct((B, T, features), jnp.float32), jax.ShapeDtypeStruct((B, T), jnp.int32)
    anchors = jax.ShapeDtypeStruct((B, A), jnp.int32) if drafter.draws_anchors else None

    def run(states, tokens, segments, anchors):
        settings = {"model": model, "drafter": drafter, "num_depths": LEVELS, "anchors": anchors}
        return forward_drafter(params, states, tokens, segments, **settings)

    traced = product_flops_in(jax.make_jaxpr(run)(states, rows, rows, anchors).jaxpr)
    trained = Trained("modules", LEVELS, runs_trunk=False, drafter=drafter, num_anchors=A)
    counted = update_flops(config, params, AllPairs.full(B, T), trained)
    assert counted is not None and counted["trunk"].forward == 0
    # The trace also has EAGLE-3's own diagonals and all slots' heads, and the anchor is not part of its context.
    assert counted["modules"].forward + counted["losses"].forward == pytest.approx(traced, rel=0.05)
    assert counted["modules"].backward == 2 * counted["modules"].forward


def test_pairs_are_causal_within_documents_and_windows():
    rows = RowCounts.of_segments(np.array([[1, 1, 1, 2, 2, 0], [5, 5, 5, 5, 5, 5]]))
    assert (rows.num_rows, rows.row_length, rows.tokens) == (2, 6, 12)
    assert rows.lengths.tolist() == [3, 2, 6]
    assert rows.pairs() == (1 + 2 + 3) + (1 + 2) + sum(range(1, 7))
    assert rows.pairs(2) == (1 + 2 + 2) + (1 + 2) + (1 + 2 * 5)
    assert RowCounts.full(3, 4).pairs() == 3 * (1 + 2 + 3 + 4)


def test_attention_by_hand():
    rows = RowCounts.full(1, 8)
    sliding = small_config("sliding")  # N = 4, H = 8, values of 6, a window of 5 in all but one layer
    full, window = (1 + 8) * 4, 1 + 2 + 3 + 4 + 5 * 4
    each = [2 * 4 * (sliding.head_dim + sliding.value_dim) * (window if kind.is_sliding else full)
            for kind in sliding.trunk_kinds]  # fmt: skip
    assert attention_flops(sliding, sliding.trunk_kinds, rows) == sum(each)
    # The delta rule reads the state [4 heads, 8, 6] twice and adds to it once per token.
    hybrid = small_config("hybrid")
    delta = [kind for kind in hybrid.trunk_kinds if kind.attention == "delta"]
    assert attention_flops(hybrid, delta, rows) == len(delta) * 8 * 3 * 2 * 4 * 8 * 6


def test_a_sparse_indexer_scores_all_pairs_and_selects_some():
    config = small_config("sparse")
    topk, T = config.index_topk, 4 * config.index_topk
    rows = RowCounts.full(1, T)
    width = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    selected = topk * (topk + 1) // 2 + (T - topk) * topk
    kind = config.trunk_kinds[:1]
    assert attention_flops(config, kind, rows) == 2 * 4 * width * selected
    scored = 2 * config.index_n_heads * config.index_head_dim * T * (T + 1) // 2
    num_indexers = sum(kind.indexer == "full" for kind in config.trunk_kinds)
    assert indexer_flops(config, config.trunk_kinds, rows) == num_indexers * scored
    assert indexer_flops(config, config.trunk_kinds, RowCounts.full(1, topk)) == 0
    # A selection has no gradient.
    params = param_shapes(config)
    counted = update_flops(config, params, rows, Trained("all", 1))
    assert counted is not None
    trunk = counted["trunk"]
    own = [math.prod(leaf.shape) for name, leaf in indexer_matrices(params["trunk"])]
    assert trunk.backward == 2 * (trunk.forward - num_indexers * scored - 2 * T * sum(own))


def indexer_matrices(params):
    named = ((jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params))
    return [(name, leaf) for name, leaf in named if "indexer" in name and "norm" not in name]


def test_experts_count_the_chosen_and_the_shared_ones():
    shape = {**GROUPED, "num_mtp_modules": 0, "n_routed_experts": 8, "num_experts_per_tok": 2}
    config = ModelConfig(**shape, moe_intermediate_size=96, n_shared_experts=1)
    counted = update_flops(config, param_shapes(config), RowCounts.full(1, 16), Trained())
    assert counted is not None
    D, F = config.hidden_size, config.moe_intermediate_size
    attention = D * (4 + 2 + 2) * 64 + 4 * 64 * D
    expected = 2 * 16 * (attention + D * 8 + (2 + 1) * 3 * D * F)  # projections, router, two routed and a shared expert
    assert counted["trunk"].products == expected
    assert counted["trunk"].backward == 2 * counted["trunk"].forward
    assert counted["modules"].forward == 0


def test_stacked_layers_count_as_unrolled_ones():
    for kind in ("grouped", "latent", "hybrid", "clamped"):
        config = small_config(kind)
        rows, trained = RowCounts.full(2, 16), Trained("all", 1)
        stacked = jax.eval_shape(functools.partial(init_params, MTPModel(config, scan_layers=True)), jax.random.key(0))
        assert update_flops(config, stacked, rows, trained) == update_flops(config, param_shapes(config), rows, trained)


def test_cached_trunk_states_leave_out_the_trunk():
    config = small_config()
    params, rows = param_shapes(config), RowCounts.full(2, 16)
    full = update_flops(config, params, rows, Trained("modules", 2))
    cached = update_flops(config, params, rows, Trained("modules", 2, runs_trunk=False))
    assert full is not None and cached is not None
    assert cached["trunk"] == (0, 0, 0) and full["trunk"].forward > 0 and full["trunk"].backward == 0
    assert {**full, "trunk": None} == {**cached, "trunk": None}
