"""Names of the tensors of EAGLE-3 drafters, and their draft vocabulary.

Axes: D width of the drafter, Dt of the trunk, V vocabulary, R draft vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from conversion.attention_names import grouped_names
from conversion.families import Layout
from conversion.layer_names import prefixed
from conversion.tensor_slice import ParamSpec, copied, gate_up, linear
from mtpjax.drafters.dflash.network import DFlashConfig
from mtpjax.drafters.eagle3.network import Eagle3Config
from mtpjax.errors import CheckpointFileError

OFFSETS, IS_DRAFTED = "d2t", "t2d"  # of the draft vocabulary


def eagle3_specs(config: Eagle3Config) -> dict[str, ParamSpec]:
    """Lists every parameter with the tensors that hold it, by their plain names (`mtpjax.drafters.files.tensor_names`).

    Args:
        config: the architecture.

    Returns:
        The specs by flat parameter name.
    """
    block, Dt = config.block, config.target_hidden_size
    D, V = block.hidden_size, block.vocab_size
    specs = {"fc": linear("fc.weight", config.features_size, D), "norm_final/scale": copied("norm.weight", D)}
    if config.norm_before_fc:
        specs["norm_features/scale"] = copied("input_norm.weight", config.features_size)
    if config.fc_norm:
        for index in range(len(config.layer_ids)):
            specs[f"norm_state_{index}/scale"] = copied(f"fc_norm.{index}.weight", Dt)
    for index, kind in enumerate(block.trunk_kinds):
        prefix = f"layers.{index}."
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


def read_draft_ids(files: Any, names: Mapping[str, str], config: Eagle3Config | DFlashConfig) -> np.ndarray | None:
    """Reads the draft vocabulary: `d2t` holds offsets, so column j of the head is token `j + d2t[j]`.

    Args:
        files: the checkpoint.
        names: the tensors' names in the files, by plain name.
        config: the architecture.

    Returns:
        `[R]` int32 token ids; None if every token can be drafted and the files do not list them.

    Raises:
        CheckpointFileError: the vocabulary is missing, does not fit, or has two readings.
    """
    R, V = config.draft_vocab_size, config.block.vocab_size
    marks = _read_marks(files, names, V)
    if OFFSETS not in names:
        if R < V:
            raise CheckpointFileError(f"{files.path} lacks {OFFSETS}: which {R} of {V} tokens are drafted is unknown")
        if marks is not None and not marks.all():
            raise CheckpointFileError(
                f"{files.path}: {IS_DRAFTED} marks {marks.sum()} of {V} tokens, but the head drafts all of them"
            )
        return None
    offsets = files.read(names[OFFSETS])
    if offsets.shape != (R,) or offsets.dtype.kind not in "iu":
        raise CheckpointFileError(
            f"{files.path}: {OFFSETS} is {offsets.dtype}{list(offsets.shape)}, not integers [{R}]"
        )
    values = offsets.astype(np.int64)
    ids = values + np.arange(R)
    # Absolute ids in the place of offsets are other tokens, all of them valid ones for a small vocabulary.
    is_offsets, is_absolute = (_are_tokens(each, V) for each in (ids, values))
    if marks is not None:
        is_offsets = is_offsets and np.array_equal(marks, is_drafted(ids, V))
        is_absolute = is_absolute and np.array_equal(marks, is_drafted(values, V))
    if is_absolute and not is_offsets:
        raise CheckpointFileError(
            f"{files.path}: {OFFSETS} holds token ids ({values[0]}, {values[1 % R]}, ...) where offsets belong: column "
            f"j of the head is token j + {OFFSETS}[j], for SGLang and vLLM too; subtract j from element j"
        )
    if not is_offsets:
        if marks is not None and _are_tokens(ids, V):
            raise CheckpointFileError(
                f"{files.path}: {IS_DRAFTED} and {OFFSETS} name different draft vocabularies: {IS_DRAFTED} marks "
                f"{marks.sum()} tokens, of which {OFFSETS} names {marks[ids].sum()}"
            )
        raise CheckpointFileError(
            f"{files.path}: {OFFSETS} names tokens outside 0..{V - 1}, or one twice: j + {OFFSETS}[j] is from "
            f"{ids.min()} to {ids.max()}"
        )
    if is_absolute and marks is None and R > 1:
        raise CheckpointFileError(
            f"{files.path}: {OFFSETS} has two readings without {IS_DRAFTED}: its elements are different tokens both as "
            f"offsets and as ids; add {IS_DRAFTED}, bool [{V}], which is True for the tokens that can be drafted"
        )
    return ids.astype(np.int32)


def _are_tokens(ids: np.ndarray, vocab_size: int) -> bool:
    """Returns whether ids are different ones of the vocabulary."""
    return bool(ids.min() >= 0 and ids.max() < vocab_size and len(np.unique(ids)) == len(ids))


def _read_marks(files: Any, names: Mapping[str, str], vocab_size: int) -> np.ndarray | None:
    """Reads `t2d`, which marks the tokens that can be drafted, as bool or as the integers 0 and 1."""
    if IS_DRAFTED not in names:
        return None
    marks = files.read(names[IS_DRAFTED])
    if marks.shape != (vocab_size,) or marks.dtype.kind not in "biu" or not np.isin(marks, (0, 1)).all():
        raise CheckpointFileError(
            f"{files.path}: {IS_DRAFTED} is {marks.dtype}{list(marks.shape)}, not bool [{vocab_size}] or zeros and ones"
        )
    return marks.astype(bool)


def is_drafted(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Returns `[V]` bool, True for the tokens of a draft vocabulary `ids [R]`."""
    found = np.zeros(vocab_size, bool)
    found[ids] = True
    return found
