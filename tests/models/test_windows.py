"""Layers with sliding windows, learned sinks and clamped experts: what runs where, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import DecodeConfig, speculative_generate
from mtpjax.models.cache import empty_cache
from mtpjax.models.decoding_layout import refuse_uneven_layers
from mtpjax.models.layers.clamped_experts import mix_clamped_experts
from mtpjax.models.masks import cached_view
from mtpjax.models.model import bind


@pytest.mark.parametrize(
    ("attention", "changes", "named"),
    [
        ("sliding", {"num_key_value_heads": 1}, "does not divide num_key_value_heads 1"),
        ("sliding", {"sliding_num_key_value_heads": 1}, "does not divide sliding_num_key_value_heads 1"),
    ],
)
def test_meshes_that_split_layers_unevenly_are_refused(attention, changes, named, small):
    model, _ = small(attention, **changes)
    refuse_uneven_layers(model.config, {"data": 2, "tensor": 1})
    with pytest.raises(ValueError, match=f"tensor=2 of the mesh {named}"):
        refuse_uneven_layers(model.config, {"tensor": 2})


def test_kernels_by_name_take_no_learned_sinks(small):
    model, params = small("sliding")
    model = model.clone(implementation="interpreted")
    view = cached_view(model.config, jnp.zeros(1, jnp.int32), 2, 16)
    cache = empty_cache(model.config, model.config.trunk_kinds, 1, 16)
    with pytest.raises(ValueError, match="the attention kernels do not support learned sinks"):
        jax.eval_shape(lambda: bind(model, params)(jnp.ones((1, 2), jnp.int32), view, cache, method="run_trunk"))


@pytest.mark.slow
@pytest.mark.parametrize("tree", [{}, {"topk": 2, "num_draft_tokens": 6}])
def test_windows_without_sinks_run_on_the_kernels(tree, small):
    model, params = small("sliding", "mixed", attention_sinks="none")
    config = DecodeConfig(max_new_tokens=12, num_steps=3, prefill_chunk=8, **tree)
    prompts = [[1, 2, 3], [7 * place % 61 for place in range(19)]]
    by_xla, by_kernel = (
        speculative_generate(params, prompts, model=model.clone(implementation=name), config=config)
        for name in ("xla", "interpreted")
    )
    assert by_kernel.rows() == by_xla.rows()


@pytest.mark.parametrize("alpha", [0.0, 1.702])
def test_clamped_experts_are_those_of_a_loop(alpha):
    rng = np.random.default_rng(0)
    n, k, E, D, F, limit = 7, 2, 4, 6, 5, 0.4
    x, gate_up, down = (rng.standard_normal(shape) for shape in ((n, D), (E, D, 2, F), (E, F, D)))
    biases = rng.standard_normal((E, 2, F)), rng.standard_normal((E, D))
    ids, weights = rng.integers(0, E + 1, (n, k)), rng.random((n, k))  # E: no expert
    expected = np.zeros((n, D))
    for token, column in np.ndindex(n, k):
        expert = ids[token, column]
        if expert == E:
            continue
        gate, up = np.einsum("D,DpF->pF", x[token], gate_up[expert]) + biases[0][expert]
        up = np.clip(up, -limit, limit)
        if alpha:
            gate = np.minimum(gate, limit)
            hidden = (up + 1) * gate / (1 + np.exp(-alpha * gate))
        else:
            hidden = np.minimum(gate / (1 + np.exp(-gate)), limit) * up
        expected[token] += weights[token, column] * (hidden @ down[expert] + biases[1][expert])
    arrays = jax.tree.map(lambda array: jnp.asarray(array, jnp.float32), (weights, gate_up, down, biases))
    found = mix_clamped_experts(jnp.asarray(x, jnp.float32), jnp.asarray(ids), *arrays, limit=limit, alpha=alpha)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
