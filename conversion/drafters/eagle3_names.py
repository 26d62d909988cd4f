"""Names of the tensors of EAGLE-3 drafters, and their draft vocabulary.

Axes: D width of the drafter, Dt of the trunk, V vocabulary, R draft vocabulary.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from conversion.attention_names import grouped_names
from conversion.drafters.eagle3_config import Format
from conversion.families import Layout
from conversion.layer_names import prefixed
from conversion.tensor_slice import ParamSpec, copied, gate_up, linear
from mtpjax.errors import CheckpointFileError
from mtpjax.models.dflash import DFlashConfig
from mtpjax.models.eagle3 import Eagle3Config

OFFSETS, IS_DRAFTED = "d2t", "t2d"  # of the draft vocabulary
OLDER_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")  # of three states; later `fc_norm.0` to `fc_norm.2`


def eagle3_specs(config: Eagle3Config, form: Format, has: Callable[[str], bool]) -> dict[str, ParamSpec]:
    """Lists every parameter with the tensors that hold it.

    Args:
        config: the architecture.
        form: the format, which decides the name of the first layer.
        has: returns whether the files contain a tensor; older files use other names for some tensors.

    Returns:
        The specs by flat parameter name.
    """
    block, Dt = config.block, config.target_hidden_size
    D, V = block.hidden_size, block.vocab_size
    specs = {"fc": linear("fc.weight", config.features_size, D), "norm_final/scale": copied("norm.weight", D)}
    if config.norm_before_fc:
        specs["norm_features/scale"] = copied("input_norm.weight", config.features_size)
    if config.fc_norm:
        names = [f"fc_norm.{index}" for index in range(len(config.layer_ids))]
        names = OLDER_NORMS if has(f"{OLDER_NORMS[0]}.weight") else names
        for index, name in enumerate(names):
            specs[f"norm_state_{index}/scale"] = copied(f"{name}.weight", Dt)
    for index, kind in enumerate(block.trunk_kinds):
        prefix = "midlayer." if form == "specforge" else f"layers.{index}."
        # The first layer normalises its two inputs one by one; its attention reads both.
        first = {"norm_embedding": "input_layernorm", "norm_hidden": "hidden_norm"}
        norms = (first if index == 0 else {"norm_attention": "input_layernorm"}) | {
            "norm_feed_forward": "post_attention_layernorm"
        }
        layer = {f"{path}/scale": copied(f"{prefix}{name}.weight", D) for path, name in norms.items()}
        input_size = 2 * D if index == 0 else D
        layer |= prefixed("attention/", grouped_names(block, kind, prefix, Layout(), input_size=input_size))
        layer["dense/gate_up"] = gate_up(f"{prefix}mlp.", D, block.intermediate_size)
        layer["dense/down"] = linear(f"{prefix}mlp.down_proj.weight", block.intermediate_size, D)
        specs |= prefixed(f"layer_{index}/", layer)
    if config.own_embedding:
        specs["embedding"] = copied("embed_tokens.weight", V, D)
    if config.own_head:
        specs["head"] = linear("lm_head.weight", D, config.draft_vocab_size)
    return specs


def read_draft_ids(files: Any, config: Eagle3Config | DFlashConfig) -> np.ndarray | None:
    """Reads the draft vocabulary: `d2t` holds offsets, so column j of the head is token `j + d2t[j]`.

    Args:
        files: the checkpoint.
        config: the architecture.

    Returns:
        `[R]` int32 token ids; None if every token can be drafted and the files do not list them.

    Raises:
        CheckpointFileError: the vocabulary is missing, or does not fit.
    """
    R, V = config.draft_vocab_size, config.block.vocab_size
    if OFFSETS not in files.tensors:
        if R < V:
            raise CheckpointFileError(f"{files.path} lacks {OFFSETS}: which {R} of {V} tokens are drafted is unknown")
        return None
    offsets = files.read(OFFSETS)
    if offsets.shape != (R,) or offsets.dtype.kind != "i":
        raise CheckpointFileError(
            f"{files.path}: {OFFSETS} is {offsets.dtype}{list(offsets.shape)}, not integers [{R}]"
        )
    ids = offsets.astype(np.int64) + np.arange(R)
    # Absolute ids in the place of offsets lead out of the vocabulary or name tokens twice.
    if ids.min() < 0 or ids.max() >= V or len(np.unique(ids)) < R:
        raise CheckpointFileError(f"{files.path}: {OFFSETS} names tokens outside 0..{V - 1}, or one twice")
    if IS_DRAFTED in files.tensors and not np.array_equal(files.read(IS_DRAFTED), is_drafted(ids, V)):
        raise CheckpointFileError(f"{files.path}: {IS_DRAFTED} and {OFFSETS} name different draft vocabularies")
    return ids.astype(np.int32)


def is_drafted(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Returns `[V]` bool, True for the tokens of a draft vocabulary `ids [R]`."""
    found = np.zeros(vocab_size, bool)
    found[ids] = True
    return found
