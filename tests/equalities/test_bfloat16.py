"""In bfloat16 speculation gives plain decoding's tokens in passes as wide; narrower ones round differently.

`pytest -n 0 -s` prints how many texts part from those of passes over one token, and by how little.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax import DecodeConfig, forward, generate, speculative_generate
from mtpjax.evaluation.acceptance import equals_plain_decoding
from mtpjax.evaluation.same_text import first_divergences

LONGEST_PROMPT, NEW_TOKENS = 32, 24
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 61, 1 + number % LONGEST_PROMPT).tolist() for number in range(64)]
SETTINGS = {  # of 64 rows XLA computes products of 16 tokens otherwise than of 4 and of 1
    "chain of 4": {"num_steps": 3},
    "chain of 16": {"num_steps": 15},
    "tree of 16": {"num_steps": 3, "topk": 4, "num_draft_tokens": 16},
}


def cast(params, dtype):
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


@pytest.mark.parametrize(  # linear attention takes no trees, and its replayed states may differ in the last bit
    ("attention", "name"),
    [
        ("grouped", "chain of 4"),
        pytest.param("grouped", "chain of 16", marks=pytest.mark.slow),
        pytest.param("grouped", "tree of 16", marks=pytest.mark.slow),
        pytest.param("latent", "chain of 16", marks=pytest.mark.slow),
        pytest.param("sparse", "tree of 16", marks=pytest.mark.slow),
        pytest.param("hybrid", "chain of 4", marks=pytest.mark.slow),
    ],
)
def test_texts_are_plain_decoding_s_in_passes_as_wide(attention, name, small):
    model, params = small(attention, "mixed")
    narrow, exact = cast(params, jnp.bfloat16), cast(cast(params, jnp.bfloat16), jnp.float32)
    config = DecodeConfig(max_new_tokens=NEW_TOKENS, **SETTINGS[name])
    result = speculative_generate(narrow, PROMPTS, model=model, config=config)
    assert result.stats.accept_length > 1.5
    rows, plain = result.rows(), generate(narrow, PROMPTS, model=model, config=config).rows()
    parted = [
        divergence.gap for divergence in first_divergences(exact, PROMPTS, rows, plain, model=model) if divergence
    ]
    gaps = ", ".join(f"{gap:.3f}" for gap in sorted(parted)) or "nothing"
    print(
        f"{attention}, {name}: {len(parted)} of {len(rows)} texts part from those of narrow passes, at gaps of {gaps}"
    )
    assert equals_plain_decoding(narrow, PROMPTS, rows, plain, model=model, config=config).all()
    rows[3][5] = (rows[3][5] + 1) % 61
    assert np.flatnonzero(
        ~equals_plain_decoding(narrow, PROMPTS, rows, plain, model=model, config=config)
    ).tolist() == [3]


def logits_along(params, model, rows) -> np.ndarray:
    """What the full pass says where each new token was chosen: `[rows, NEW_TOKENS, V]`, float64."""
    size = LONGEST_PROMPT + NEW_TOKENS
    texts = [prompt + row for prompt, row in zip(PROMPTS, rows, strict=True)]
    lengths = np.array([len(text) for text in texts])
    padded = np.array([text + [0] * (size - len(text)) for text in texts])
    logits = np.asarray(forward(params, padded, model=model, lengths=lengths, num_depths=0).logits, np.float64)
    place = np.array([len(prompt) for prompt in PROMPTS])[:, None] - 1 + np.arange(NEW_TOKENS)
    return np.take_along_axis(logits, place[:, :, None], axis=1)


def test_tokens_are_the_arg_max_within_the_arithmetic_s_error(small):
    """Of a dense model: where a router's near tie falls the other way, logits move further."""
    model, params = small("grouped", "mixed")
    narrow = cast(params, jnp.bfloat16)
    config = DecodeConfig(max_new_tokens=NEW_TOKENS, **SETTINGS["tree of 16"])
    rows = speculative_generate(narrow, PROMPTS, model=model, config=config).rows()
    logits = logits_along(cast(narrow, jnp.float32), model, rows)
    error = np.abs(logits_along(narrow, model, rows) - logits).max()
    best = np.sort(logits, axis=-1)
    behind = best[:, :, -1] - np.take_along_axis(logits, np.array(rows)[:, :, None], axis=2)[:, :, 0]
    print(f"logits err by up to {error:.3f}, and no token is more than {behind.max():.3f} behind the best")
    assert behind.max() <= 2 * error
    assert np.mean(best[:, :, -1] - best[:, :, -2] > 2 * error) > 0.8  # so that a wrong token would be found
