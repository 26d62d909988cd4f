import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mtpjax.models.view import TreeSlots

from mtpjax import DecodeConfig, generate, speculative_generate
from mtpjax.models.cache import empty_cache
from mtpjax.models.masks import cached_view
from mtpjax.models.model import bind
from pallas_kernels.verify_attention import _run_kernel, verify_attention, verify_attention_reference

FP8 = jnp.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Shape:
    """`[B, K, T, G, H]` queries against a cache of S slots; `latent` is the width of the values in the keys."""

    T: int
    G: int
    H: int
    S: int = 300
    K: int = 2
    values: int | None = None
    latent: int | None = None
    tree: int | None = None  # slots behind the text, any of which a token may see; None: tokens follow each other
    window: tuple[int, int] | None = None  # positions and sinks
    dtype: object = jnp.float32
    cache: object = None

    def __str__(self):
        words = [f"{field.name}{getattr(self, field.name)}" for field in dataclasses.fields(self)[:-2]]
        types = [jnp.dtype(kind).name for kind in (self.dtype, self.cache) if kind]
        return "-".join([word for word in words if "None" not in word] + types).replace(" ", "")


BF16 = {"dtype": jnp.bfloat16}
SHAPES = [  # rows: T * G, 16 and 128 or more to a block; blocks of 16 slots in float32, of 64 or 32 in bfloat16
    Shape(1, 1, 64, S=40, K=1),
    Shape(3, 4, 128, S=300, tree=37),
    Shape(5, 2, 256, S=200, window=(30, 5)),
    Shape(2, 2, 64, S=900, tree=8, window=(100, 20)),
    Shape(3, 5, 16, latent=12, K=1),
    Shape(16, 9, 64, **BF16),
    Shape(5, 3, 192, values=128, tree=64, **BF16),
    Shape(4, 2, 96, cache=FP8, **BF16),
    Shape(4, 16, 576, latent=512, K=1, S=100, tree=5, **BF16),
    Shape(1, 16, 576, latent=512, K=1, S=100, cache=FP8, **BF16),
]
kernel = functools.partial(verify_attention, implementation="triton")
interpreted = functools.partial(verify_attention, implementation="interpreted")


def inputs(key, shape: Shape):
    """Arrays and keywords of a call: rows with no text, some, all; NaN in all slots that no token of a row sees."""
    keys = jax.random.split(key, 4)
    B, T = 4, shape.T
    q = jax.random.normal(keys[0], (B, shape.K, T, shape.G, shape.H), shape.dtype)
    X = shape.tree or T
    num_committed = jnp.array([0, shape.S - X, shape.S // 2, 1])
    ancestor_mask = jnp.broadcast_to(jnp.tri(T, dtype=bool)[None], (B, T, T))
    if shape.tree:
        ancestor_mask = (
            jax.random.bernoulli(keys[1], 0.5, (B, T, X)).at[0].set(False)
        )  # nothing to see in the first row
    window_start, sinks = None, 0
    if shape.window:
        window_start, sinks = num_committed[:, None] + jnp.arange(T)[None, :] - shape.window[0] + 1, shape.window[1]
    slot = jnp.arange(shape.S)[None, :]
    first = jnp.zeros(B, int) if window_start is None else window_start.min(axis=1)
    is_visible = (slot < num_committed[:, None]) & ((slot >= first[:, None]) | (slot < sinks))
    draft_slot = slot - num_committed[:, None]
    is_draft = jnp.take_along_axis(ancestor_mask.any(axis=1), jnp.clip(draft_slot, 0, X - 1), axis=1)
    is_visible |= is_draft & (draft_slot >= 0) & (draft_slot < X)

    def cache(key, width):
        entries = jax.random.normal(key, (B, shape.K, shape.S, width), shape.dtype)
        return jnp.where(is_visible[:, None, :, None], entries, jnp.nan).astype(shape.cache or shape.dtype)

    values = None if shape.latent else cache(keys[3], shape.values or shape.H)
    keywords = {"scale": shape.H**-0.5, "sinks": sinks, "value_width": shape.latent}
    return (q, cache(keys[2], shape.H), values, num_committed, ancestor_mask, window_start), keywords


def assert_kernel_is_reference(call, key, shape):
    arrays, keywords = inputs(key, shape)
    found = jax.jit(functools.partial(call, **keywords))(*arrays)
    exact = jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype.itemsize < 4 else leaf, arrays[:3])
    expected = verify_attention_reference(*exact, *arrays[3:], **keywords)
    assert found.shape == expected.shape and found.dtype == shape.dtype
    # Weights of values near one are rounded to q's dtype before they are summed.
    error = 1e-5 if shape.dtype == jnp.float32 else 1e-2
    np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=error, atol=error)
    assert not shape.tree or not found[0].any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_matches_reference_and_reads_nothing_else(shape, key):
    assert_kernel_is_reference(interpreted, key, shape)


ON_ROCM = [  # several blocks of rows, whose programs are reordered; fp8, which integer arithmetic converts
    Shape(5, 12, 32, S=600),
    Shape(16, 9, 64, tree=20, cache=FP8, **BF16),
    Shape(4, 16, 576, latent=512, K=1, S=100, cache=FP8, **BF16),
]


@pytest.mark.parametrize("shape", ON_ROCM, ids=str)
def test_kernel_of_rocm_matches_reference(shape, key):
    def call(q, keys, values, *arrays, **keywords):
        caches = (keys,) if values is None else (keys, values)
        return _run_kernel(q, caches, *arrays, None, None, **keywords, page_shift=0, interpret=True, platform="rocm")

    assert_kernel_is_reference(call, key, shape)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_compiled_kernel_matches_reference_on_a_gpu(shape, key):
    assert_kernel_is_reference(kernel, key, shape)


def test_reference_is_softmax_attention_under_a_mask(key):
    (q, keys, values, num_committed, ancestor_mask, _), keywords = inputs(key, Shape(3, 2, 16, S=20))
    found = verify_attention_reference(q, keys, values, num_committed, ancestor_mask, **keywords)
    for row, length in enumerate(num_committed):
        for token in range(3):
            see = int(length) + token + 1
            scores = np.einsum("KGH,KSH->KGS", q[row, :, token], keys[row, :, :see]) / 4
            weights = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
            expected = np.einsum("KGS,KSH->KGH", weights, values[row, :, :see])
            np.testing.assert_allclose(found[row, :, token], expected, rtol=1e-5, atol=1e-5)


def test_a_row_depends_on_no_other(key):
    arrays, keywords = inputs(key, Shape(3, 2, 16, S=600))
    call = jax.jit(functools.partial(interpreted, **keywords))
    together = call(*arrays)
    others = [array[jnp.array([1, 1, 2, 0])] if array is not None else None for array in arrays]
    np.testing.assert_array_equal(call(*others)[2], together[2])


@pytest.mark.parametrize("tokens, num_draft_slots", [(17, 17), (2, 65)])
def test_many_tokens_or_large_trees_take_the_reference(tokens, num_draft_slots):
    q, keys = jnp.ones((1, 1, tokens, 1, 16)), jnp.ones((1, 1, 80, 16))
    ancestor_mask = jnp.ones((1, tokens, num_draft_slots), bool)
    call = functools.partial(kernel, scale=1.0)
    assert "pallas_call" not in str(jax.make_jaxpr(call)(q, keys, keys, jnp.zeros(1, int), ancestor_mask))


def test_what_does_not_fit_is_refused():
    q, keys = jnp.ones((1, 2, 3, 1, 16)), jnp.ones((1, 2, 8, 16))
    num_committed, ancestor_mask = jnp.zeros(1, int), jnp.ones((1, 3, 3))
    with pytest.raises(ValueError, match=r"\(1, 2, 8, 8\)"):
        verify_attention(q, keys[..., :8], keys, num_committed, ancestor_mask > 0, scale=1.0)
    with pytest.raises(ValueError, match="value_width"):
        verify_attention(q, keys, None, num_committed, ancestor_mask > 0, scale=1.0)
    with pytest.raises(ValueError, match="auto, xla, triton, interpreted"):
        verify_attention(q, keys, keys, num_committed, ancestor_mask > 0, scale=1.0, implementation="cudnn")
    shapes = [jax.ShapeDtypeStruct(shape, FP8) for shape in ((64, 8, 1, 4, 128), (64, 8, 32768, 128))]
    call = functools.partial(kernel, scale=1.0)
    with pytest.raises(ValueError, match="2\\^31"):
        few = jnp.zeros(64, int), jnp.ones((64, 1, 1), bool)
        jax.eval_shape(call, shapes[0], shapes[1], shapes[1], *few)


@pytest.mark.parametrize(
    "attention, is_tree, window",
    [
        ("grouped", False, (4, 1)),
        pytest.param("grouped", True, None, marks=pytest.mark.slow),
        pytest.param("latent", False, None, marks=pytest.mark.slow),
        pytest.param("latent", True, (4, 1), marks=pytest.mark.slow),
    ],
)
def test_a_cached_pass_with_the_kernel_equals_one_without_and_reads_no_garbage(attention, is_tree, window, small, key):
    model, params = small(attention)
    capacity, num_committed = 40, jnp.array([0, 7, 30])
    cache = empty_cache(model.config, model.config.trunk_kinds, 3, capacity)
    noise = iter(jax.random.split(key, 8))
    layers = jax.tree.map(lambda leaf: jax.random.normal(next(noise), leaf.shape), cache.layers)
    tree = None
    if is_tree:
        ancestor_mask = jnp.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)
        tree = TreeSlots(num_committed, jnp.array([[0, 1, 1, 2]] * 3), jnp.stack([ancestor_mask] * 3))
    view = cached_view(model.config, num_committed, 4, capacity, tree=tree, window=window)

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation, layers):
        apply = bind(model.clone(implementation=implementation), params)
        return apply(jnp.arange(12).reshape(3, 4), view, cache.replace(layers=layers), method="run_trunk").hidden

    def spoil(leaf):
        is_garbage = jnp.arange(capacity)[None, :] >= num_committed[:, None] + 4
        if window is not None:
            near = num_committed[:, None] - window[0]
            is_garbage |= (jnp.arange(capacity)[None, :] <= near) & (jnp.arange(capacity)[None, :] >= window[1])
        is_garbage = is_garbage.reshape(3, *(1,) * (leaf.ndim - 3), capacity, 1)
        return jnp.where(is_garbage, jnp.nan, leaf)

    expected = run("xla", layers)
    found = run("interpreted", jax.tree.map(spoil, layers))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "attention, shape",
    [
        pytest.param("grouped", {"num_steps": 3}, marks=pytest.mark.slow),  # `test_generate.py` runs all kernels
        pytest.param("latent", {"num_steps": 2, "draft_window": 4, "draft_sinks": 1}, marks=pytest.mark.slow),
        pytest.param("grouped", {"num_steps": 2, "topk": 2, "num_draft_tokens": 5}, marks=pytest.mark.slow),
        pytest.param("latent", {"num_steps": 2, "topk": 2, "num_draft_tokens": 5}, marks=pytest.mark.slow),
    ],
)
def test_greedy_speculation_with_the_kernel_reproduces_plain_decoding(attention, shape, small):
    model, params = small(attention, "mixed")
    prompts = [[3], list(range(5)), list(range(40, 51))]
    plain = generate(params, prompts, model=model, config=DecodeConfig(max_new_tokens=12))
    model = model.clone(implementation="interpreted")
    found = speculative_generate(params, prompts, model=model, config=DecodeConfig(max_new_tokens=12, **shape))
    assert found.rows() == plain.rows()
    assert 0 < found.stats.accepted.sum() < found.stats.proposed.sum()
