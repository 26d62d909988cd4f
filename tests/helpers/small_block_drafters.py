"""Small DFlash and DSpark drafters for tests, with constructed weights whose drafts are right sometimes.

The trunk of `constructed_params` mostly continues a token with its successor in one cycle through the vocabulary. A
block drafts the j-th successor of its anchor in slot j, and no slot attends to a draft. So each token is a set of
angles, by its place in the cycle, and a head of attention that looks at the anchor from j positions behind turns them j
steps on. Random parts make every draft depend on the whole context.
"""

import dataclasses
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.drafters.dflash.drafting import DFlashDrafter
from mtpjax.drafters.dflash.network import DFlashConfig
from mtpjax.drafters.dspark.drafting import DSparkDrafter
from mtpjax.drafters.dspark.network import DSparkConfig
from mtpjax.drafters.trained import DraftParams
from mtpjax.models.config import ModelConfig
from mtpjax.models.model import MTPModel

NUM_DRAFTS = 3
NUM_ANGLES = 4  # of a token
PLACE = 2 * NUM_ANGLES  # channels of the residual stream that hold a token's angles, before those of the two marks
ANCHOR, MASK = PLACE, PLACE + 1  # channels that mark a token of the text, and the mask token
# Per pair of rotated channels, the keys of the anchor and of mask tokens. A query's score is largest for the anchor at
# the head's own distance, and nearly the same for mask tokens at all distances.
ANCHOR_KEY, MASK_KEY = np.array([2**0.5, 1.0, 1.0, 0.0]), np.array([0.0, 0.0, 0.0, 2.0])
QUERY = np.array([2**0.5, 1.0, 1.0, 1.75])
SHARPNESS = 5.0  # scale of the norms of queries and keys


@dataclasses.dataclass(frozen=True)
class Cycle:
    """The tokens' places in the trunk's cycle, as angles.

    Attributes:
        place: `[V]` of each token.
        frequencies: `[4]` turns of each angle per cycle.
    """

    place: np.ndarray
    frequencies: np.ndarray

    @classmethod
    def of(cls, successor: np.ndarray) -> "Cycle":
        """Follows the successors `[V]` from token 0, and chooses angles by which the tokens differ most."""
        V, place, token = len(successor), np.zeros(len(successor), int), 0
        for index in range(V):
            place[token], token = index, successor[token]
        rng = np.random.default_rng(0)
        candidates = [rng.choice(np.arange(1, (V + 1) // 2), NUM_ANGLES, replace=False) for _ in range(64)]
        others = np.arange(1, V)[:, None]
        return cls(place, min(candidates, key=lambda each: np.cos(2 * np.pi * others * each / V).sum(axis=1).max()))

    def vectors(self, steps: int = 0) -> np.ndarray:
        """Returns `[V, 8]` cosines and sines of the angles of every token, or of the one `steps` behind it."""
        angles = 2 * np.pi * (self.place[:, None] + steps) * self.frequencies / len(self.place)
        return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)

    def turn(self, steps: int) -> np.ndarray:
        """Returns the `[8, 8]` matrix that turns row vectors `steps` places on."""
        return _rotation(2 * np.pi * steps * self.frequencies / len(self.place))


def constructed_block_drafter(
    kind: str, model: MTPModel, params: dict, seed: int = 0
) -> tuple[DFlashDrafter, DraftParams]:
    """Constructs a drafter of three drafts with a full layer and a sliding, causal one; see `constructed_drafter`.

    Args:
        kind: "dflash", or "dspark" (anchor first, a window from the anchor, with a Markov and a confidence head).
        model: the trunk; of 4 heads that are at least 8 wide.
        params: its parameters.
        seed: seed of the drafter.

    Returns:
        The drafter, and its parameters in float32.
    """
    config, rng = model.config, np.random.default_rng([seed, zlib.crc32(kind.encode())])
    V, D, is_dspark = config.vocab_size, config.hidden_size, kind == "dspark"
    # A quarter of the vocabulary cannot be drafted.
    draft_ids = np.sort(rng.choice(V, V - V // 4, replace=False)).astype(np.int32)
    # The trunk's weights give the successor of each token, and so the tokens' places in the cycle.
    cycle = Cycle.of((np.asarray(params["embedding"]) @ np.asarray(params["head"])).argmax(axis=1))
    # The architecture: heads as wide as a token's angles, one full layer and one sliding, causal layer.
    block = ModelConfig(
        vocab_size=V,
        hidden_size=D,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=PLACE,
        intermediate_size=config.intermediate_size,
        max_position_embeddings=config.max_position_embeddings,
        rope_theta=500.0,
        use_qk_norm=True,
    )
    sizes: dict[str, Any] = {
        "block": block,
        "layer_ids": (0, 1, config.num_hidden_layers),
        "num_target_layers": config.num_hidden_layers,
        "block_size": NUM_DRAFTS + (not is_dspark),
        "mask_token_id": V - 1,
        "windows": (0, 5),
        "is_causal": (False, True),
        "window_from_anchor": is_dspark,
        "sample_from_anchor": is_dspark,
        "draft_vocab_size": len(draft_ids),
        "own_embedding": True,
        "own_head": True,
    }

    def noise(*shape: int, scale: float = 1.0) -> np.ndarray:
        return scale * rng.standard_normal(shape) / shape[0] ** 0.5

    # The drafter's own embedding: angles and a mark, of which the mask token has another and no angles.
    embedding = np.pad(cycle.vectors(), ((0, 0), (0, D - PLACE)))
    embedding[:, ANCHOR] = 2.0
    embedding[V - 1] = 2.0 * np.eye(D)[MASK]
    head = np.pad(2.0 * cycle.vectors()[draft_ids], ((0, 0), (0, D - PLACE))).T + noise(D, len(draft_ids), scale=0.2)
    # The context has hardly any part in the channels of angles and marks.
    is_free = np.arange(D) > MASK

    def layer(qkv: np.ndarray, output: np.ndarray) -> dict[str, Any]:
        ones = {"scale": np.ones(D)}
        F = config.intermediate_size
        return {
            "norm_attention": ones,
            "norm_feed_forward": ones,
            "attention": {
                "qkv": qkv,
                "output": output,
                "norm_q": {"scale": np.full(PLACE, SHARPNESS)},
                "norm_k": {"scale": np.full(PLACE, SHARPNESS)},
            },
            "dense": {"gate_up": noise(D, 2, F), "down": noise(F, D, scale=0.1)},
        }

    # Layer 0 finds the anchor and turns its angles on; layer 1 is random, so that the context matters.
    network: dict[str, Any] = {
        "embedding": embedding,
        "head": head,
        "fc": noise(3 * D, D),
        "norm_context": {"scale": np.where(is_free, 1.0, 0.1)},
        "norm_final": {"scale": 1 + 0.1 * rng.standard_normal(D)},
        "layer_0": layer(*_looking_back(cycle, block, is_free, noise, first=0 if is_dspark else 1)),
        "layer_1": layer(noise(D, 4, 3, PLACE), noise(4 * PLACE, D, scale=0.1)),
    }
    if is_dspark:
        # Each draft votes for its successor, too.
        network["markov_in"] = cycle.vectors()
        network["markov_out"] = cycle.vectors(-1)[draft_ids].T
        network["confidence_out"], network["confidence_bias"] = noise(D + PLACE, 1, scale=2.0), np.ones(1)
        heads: dict[str, Any] = {"markov_head": "vanilla", "markov_rank": PLACE}
        heads |= {"has_confidence": True, "confidence_with_markov": True}
        drafter: DFlashDrafter = DSparkDrafter(architecture=DSparkConfig(**sizes, **heads))
    else:
        drafter = DFlashDrafter(architecture=DFlashConfig(**sizes))
    arrays = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), network)
    return drafter, DraftParams(arrays, jnp.asarray(draft_ids))


def _looking_back(
    cycle: Cycle, block: ModelConfig, is_free: np.ndarray, noise: Any, *, first: int
) -> tuple[np.ndarray, np.ndarray]:
    """Makes the matrices of a layer whose head r finds the anchor at distance `first + r` and turns its angles on.

    Returns:
        `qkv [D, 4, 3, 8]` and `output [4 * 8, D]`. The last head mixes the context into the angles.
    """
    D, slow = len(is_free), block.rope_theta ** (-np.arange(NUM_ANGLES) / NUM_ANGLES)
    qkv = np.where(is_free[:, None, None, None], noise(D, 4, 3, PLACE), 0.0)
    output = np.zeros((4, PLACE, D))
    for index in range(NUM_DRAFTS):
        # A query at the head's distance from the anchor is rotated as the anchor's key is.
        query = np.concatenate([QUERY, np.zeros(NUM_ANGLES)]) @ _rotation(-(first + index) * slow)
        qkv[[ANCHOR, MASK], index, 0] = 5.0 * query
        qkv[[ANCHOR, MASK], index, 1, :NUM_ANGLES] = 5.0 * np.array([ANCHOR_KEY, MASK_KEY])
        # Keys of the context are orthogonal to the queries, except for some noise.
        qkv[is_free, index, 1] *= 0.2
        qkv[is_free, index, 1, -1] += noise(D)[is_free] * 5.0
        # The anchor's own slot has its angles in the stream already.
        turn = cycle.turn(index + 1) - (np.eye(PLACE) if first + index == 0 else 0)
        qkv[:PLACE, index, 2] = 0.5 * turn
        qkv[is_free, index, 2] *= 0.1
        output[index, :, :PLACE] = np.eye(PLACE)
    qkv[[ANCHOR, MASK], NUM_DRAFTS, 0] = noise(2, PLACE)
    output[NUM_DRAFTS, :, :PLACE] = noise(PLACE, PLACE, scale=0.3)
    return qkv, output.reshape(4 * PLACE, D)


def _rotation(angles: np.ndarray) -> np.ndarray:
    """Returns the matrix `[2n, 2n]` that turns row vectors, whose pairs are channels (j, j + n), by `angles [n]`."""
    cos, sin = np.diag(np.cos(angles)), np.diag(np.sin(angles))
    return np.block([[cos, sin], [-sin, cos]])
