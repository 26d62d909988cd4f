import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import ModelConfig
from mtpjax.models.layers.rotary import inverse_frequencies, rotary_angles
from mtpjax.models.rope_scaling import Llama3Scaling, Yarn
from pallas_kernels.rotation import rotate

CONFIG = ModelConfig(
    vocab_size=8, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, head_dim=16
)
YARN = Yarn(factor=8.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=0.5)
POSITIONS = jnp.array([[0, 1, 2, 50], [7, 8, 900, 3]])
turn = jax.jit(rotate, static_argnames="interleaved")


def heads(key, width=16):
    return jax.random.normal(key, (2, 4, 3, width))


def test_half_split_turns_channel_j_with_j_plus_half(key):
    x = heads(key)
    found = turn(x, rotary_angles(CONFIG, POSITIONS), interleaved=False)
    angle = np.asarray(POSITIONS)[:, :, None, None] * 10000.0 ** (-np.arange(8) / 8)
    pairs = np.asarray(x[..., :8]) + 1j * np.asarray(x[..., 8:])
    turned = pairs * np.exp(1j * angle)
    # Angles up to 900 in float32 are off by up to 900 * 2^-24.
    np.testing.assert_allclose(found, np.concatenate([turned.real, turned.imag], axis=-1), atol=2e-4)


def test_interleaved_is_half_split_of_the_sorted_channels(key):
    x, angles = heads(key), rotary_angles(CONFIG, POSITIONS)
    evens_first = jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
    found = turn(x, angles, interleaved=True)
    np.testing.assert_array_equal(found, turn(evens_first, angles, interleaved=False))


@pytest.mark.parametrize("interleaved", [False, True])
def test_products_depend_on_the_distance_only(interleaved, key):
    q, k = heads(key), heads(jax.random.key(1))

    def products(shift):
        angles = rotary_angles(CONFIG, POSITIONS + shift)
        return jnp.einsum("BTNH,BSNH->BNTS", *(turn(x, angles, interleaved=interleaved) for x in (q, k)))

    # Angles of positions near 1000 carry an error of 6e-5, times sixteen channels.
    np.testing.assert_allclose(products(0), products(77), atol=2e-3)


def test_partial_rotary_leaves_the_last_channels(key):
    config = dataclasses.replace(CONFIG, partial_rotary_factor=0.5)
    x = heads(key)
    angles = rotary_angles(config, POSITIONS)
    found = turn(x, angles, interleaved=False)
    assert angles[0].shape == (2, 4, 4)
    np.testing.assert_array_equal(found[..., 8:], x[..., 8:])
    np.testing.assert_array_equal(found[..., :8], turn(x[..., :8], angles, interleaved=False))


def test_yarn_matches_its_formula():
    """Pair by pair from the paper's definition: slow pairs interpolated, fast ones left, a ramp between."""
    config = dataclasses.replace(CONFIG, rope_scaling=YARN, rope_theta=50.0)
    dim, length = 16, YARN.original_max_position_embeddings

    def pair_turning(times):  # the pair j whose wavelength fits `times` into the original length
        return dim * np.log(length / (2 * np.pi * times)) / (2 * np.log(50.0))

    low, high = max(np.floor(pair_turning(32)), 0), min(np.ceil(pair_turning(1)), dim - 1)
    assert low == 0 and 3 < high < 7  # so that there are pairs on the ramp and past it
    for pair, found in enumerate(inverse_frequencies(config)):
        plain = 50.0 ** (-2 * pair / dim)
        kept = 1 - min(max((pair - low) / (high - low), 0), 1)
        assert found == pytest.approx(plain * kept + plain / YARN.factor * (1 - kept), rel=1e-6)


def test_yarn_scales_rotation_and_the_softmax_of_latent_attention():
    config = dataclasses.replace(CONFIG, rope_scaling=YARN)
    of_all, of_rotation = 0.05 * np.log(8) + 1, 0.1 * np.log(8) + 1
    latent = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 16, "v_head_dim": 8}
    latent = dataclasses.replace(config, attention="latent", **latent)
    assert latent.softmax_scale(16) == pytest.approx(0.25 * of_all**2)
    assert config.softmax_scale(16) == CONFIG.softmax_scale(16) == 0.25
    cos, sin = rotary_angles(config, POSITIONS)
    np.testing.assert_allclose(cos**2 + sin**2, (of_rotation / of_all) ** 2, rtol=1e-5)


def test_yarn_without_scaling_is_plain():
    config = dataclasses.replace(CONFIG, rope_scaling=dataclasses.replace(YARN, factor=1.0))
    np.testing.assert_array_equal(inverse_frequencies(config), inverse_frequencies(CONFIG))
    assert config.softmax_scale(16) == 0.25


def test_llama3_scaling_follows_its_definition():
    """By wavelength, pair for pair: short ones stay, long ones are divided, and between them both are mixed."""
    scaling = Llama3Scaling(factor=8.0, original_max_position_embeddings=64, low_freq_factor=1.0, high_freq_factor=4.0)
    config = dataclasses.replace(CONFIG, rope_scaling=scaling, rope_theta=50.0)
    unscaled = inverse_frequencies(dataclasses.replace(config, rope_scaling=None))
    expected = []
    for plain in unscaled.tolist():
        wavelength = 2 * math.pi / plain
        if wavelength < 64 / 4:
            expected.append(plain)
        elif wavelength > 64 / 1:
            expected.append(plain / 8)
        else:
            smooth = (64 / wavelength - 1) / (4 - 1)
            expected.append((1 - smooth) * plain / 8 + smooth * plain)
    np.testing.assert_allclose(inverse_frequencies(config), expected, rtol=1e-6)
    assert len(set(np.round(np.array(expected) / unscaled, 4).tolist())) > 2  # of all three kinds
    assert config.softmax_scale(16) == 0.25
