"""In bfloat16 wide passes round otherwise than narrow ones: every token is still the arg-max, up to rounding.

`pytest -n 0 -s` prints by how much.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.check_equality import LONGEST_PROMPT, NEW_TOKENS
from mtpjax import DecodeConfig, forward, generate, speculative_generate
from mtpjax.decode.evaluate import partings

DENSE = {"n_routed_experts": 0, "router_correction_bias": False}  # a router's near tie moves logits far
SETTINGS = {  # the wide ones take other products of XLA's than plain decoding, those of four nodes the same
    "chain of 4": {"num_steps": 3},
    "chain of 16": {"num_steps": 15},
    "tree of 16": {"num_steps": 3, "topk": 4, "num_draft_tokens": 16},
}


def cast(params, dtype):
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def logits_along(params, model, prompts, rows) -> np.ndarray:
    """What the full pass says where each new token was chosen: `[rows, NEW_TOKENS, V]`, float64."""
    size = LONGEST_PROMPT + NEW_TOKENS
    texts = [prompt + row for prompt, row in zip(prompts, rows, strict=True)]
    lengths = np.array([len(text) for text in texts])
    padded = np.array([text + [0] * (size - len(text)) for text in texts])
    logits = np.asarray(forward(params, padded, model=model, lengths=lengths, num_depths=0).logits, np.float64)
    place = np.array([len(prompt) for prompt in prompts])[:, None] - 1 + np.arange(NEW_TOKENS)
    return np.take_along_axis(logits, place[:, :, None], axis=1)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("attention", ["grouped", "latent"])
def test_tokens_are_the_arg_max_within_the_arithmetic_s_error(attention, name, small):
    model, params = small(attention, "mixed", **(DENSE if attention == "latent" else {}))
    narrow = cast(params, jnp.bfloat16)
    exact = cast(narrow, jnp.float32)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 61, 1 + number % LONGEST_PROMPT).tolist() for number in range(64)]
    config = DecodeConfig(max_new_tokens=NEW_TOKENS, **SETTINGS[name])
    result = speculative_generate(narrow, prompts, model=model, config=config)
    assert result.stats.accept_length > 1.5
    rows, plain = np.array(result.rows()), generate(narrow, prompts, model=model, config=config).rows()

    logits = logits_along(exact, model, prompts, rows.tolist())
    error = np.abs(logits_along(narrow, model, prompts, rows.tolist()) - logits).max()
    best = np.sort(logits, axis=-1)
    behind = best[:, :, -1] - np.take_along_axis(logits, rows[:, :, None], axis=2)[:, :, 0]
    parted = partings(exact, prompts, rows.tolist(), plain, model=model)
    gaps = np.array([parting.gap for parting in parted if parting is not None])
    print(
        f"{attention}, {name}: {len(gaps)} of {len(rows)} rows differ from plain decoding, at gaps of "
        f"{np.round(gaps, 3).tolist()}; logits err by {error:.3f}, "
        f"and no token is more than {behind.max():.3f} behind the best"
    )
    assert behind.max() <= 2 * error and (gaps <= 2 * error).all()
    assert np.mean(best[:, :, -1] - best[:, :, -2] > 2 * error) > 0.8  # so that a wrong token would be found
