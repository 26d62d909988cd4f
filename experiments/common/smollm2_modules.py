"""Trains the recycled module for `train_smollm2` on the reduced trunk, and writes and reads its file."""

import dataclasses
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments.common.smollm2_settings import CHECKPOINT_FOLDER, NUM_DEPTHS, VOCABULARY_FILE, Settings
from mtpjax import MTPModel, Objective, TrainConfig
from mtpjax.atomic import atomic_file
from mtpjax.data.config import Source
from mtpjax.data.draft_vocabulary import save_vocabulary
from mtpjax.errors import CheckpointFileError
from mtpjax.io.checkpoint import save_model
from mtpjax.training.run_dir import SETTINGS_FILE
from mtpjax.training.trainer import train

VOCABULARY_NAME = "draft_vocabulary"
MIN_ANSWERS_TO_HOLD_OUT = 100  # with fewer answers, the panel measures training rows


def train_config(folder: pathlib.Path, reduced: pathlib.Path, data: pathlib.Path, settings: Settings) -> TrainConfig:
    """Makes the settings of the run: one module, recycled over three levels, trained with KL to the frozen trunk.

    Args:
        folder: output folder, which receives `run/` and the trunk's states in `states/`.
        reduced: checkpoint from `write_reduced_trunk`.
        data: conversations as token ids.
        settings: the settings of the experiment.

    Returns:
        The settings of the recipe `recycled.yaml`, with KL instead of cross-entropy.
    """
    return TrainConfig(
        init_from=str(reduced),
        trains="modules",
        output=str(folder / "run"),
        sources=(Source(path=str(data), kind="chat"),),
        held_out_fraction=0.03 if settings.answers >= MIN_ANSWERS_TO_HOLD_OUT else 0.0,
        num_depths=NUM_DEPTHS,
        extra_tokens=NUM_DEPTHS + 1,
        mtp_loss_scale=1.0,
        mtp_loss_scale_final=1.0,
        objective=Objective(mix={"kl": 1.0}, depth_weights="decayed"),
        trunk_states=str(folder / "states"),
        trunk_states_dtype="bfloat16",
        steps=settings.updates,
        batch_size=settings.batch_size,
        row_length=settings.row_length,
        learning_rate=settings.learning_rate,
        panel_prompts=0,
        save_every=100,
        seed=settings.seed,
    )


def train_modules(config: TrainConfig, path: pathlib.Path, draft_vocabulary: Sequence[int]) -> None:
    """Trains the module, or continues its run, and writes its file.

    Args:
        config: the run.
        path: file to write.
        draft_vocabulary: token ids that the module may draft.
    """
    # Evaluate only at the end, because each evaluation runs the trunk.
    result = train(config, evaluations=1, resume=(pathlib.Path(config.output) / SETTINGS_FILE).exists())
    save_modules(path, result.params["mtp_0"], draft_vocabulary)


def save_modules(path: pathlib.Path, module: dict, draft_vocabulary: Sequence[int]) -> None:
    """Writes a module in bfloat16 and its draft vocabulary as a safetensors file.

    Args:
        path: the file.
        module: parameters of one module, without embedding or head, which it shares with the trunk.
        draft_vocabulary: token ids.
    """
    from safetensors.flax import save_file

    leaves = jax.tree_util.tree_leaves_with_path(module)
    tensors = {".".join(key.key for key in keys): jnp.asarray(leaf, jnp.bfloat16) for keys, leaf in leaves}
    with atomic_file(path) as unfinished:
        save_file(tensors | {VOCABULARY_NAME: jnp.asarray(draft_vocabulary, jnp.int32)}, str(unfinished))


def attach_modules(path: pathlib.Path, model: MTPModel, params: dict) -> tuple[MTPModel, dict, tuple[int, ...]]:
    """Adds a module from its file to the trunk that it was trained on.

    Args:
        path: file that `save_modules` wrote.
        model: the trunk, without modules.
        params: its parameters.

    Returns:
        The model with one module, its parameters, and the draft vocabulary.

    Raises:
        CheckpointFileError: the file cannot be read, or contains a module with different shapes.
    """
    from safetensors import SafetensorError
    from safetensors.flax import load_file

    from mtpjax.models.params import param_shapes

    config = dataclasses.replace(model.config, num_mtp_modules=1)
    expected = param_shapes(config)["mtp_0"]
    try:
        tensors = load_file(str(path))
    except (OSError, SafetensorError) as error:
        raise CheckpointFileError(f"{path} is not a file of modules: {error}") from error
    vocabulary = tensors.pop(VOCABULARY_NAME, None)
    # Put each tensor into its place in the module's tree; the names and shapes must match.
    places, structure = jax.tree_util.tree_flatten_with_path(expected)
    names = [".".join(key.key for key in keys) for keys, _ in places]
    shapes = {name: leaf.shape for name, (_, leaf) in zip(names, places, strict=True)}
    if vocabulary is None or shapes != {name: leaf.shape for name, leaf in tensors.items()}:
        raise CheckpointFileError(f"{path} does not hold a module of width {config.hidden_size}")
    dtype = params["embedding"].dtype
    module = jax.tree_util.tree_unflatten(structure, [tensors[name].astype(dtype) for name in names])
    return MTPModel(config), params | {"mtp_0": module}, tuple(np.asarray(vocabulary).tolist())


def write_checkpoint(
    folder: pathlib.Path, model: MTPModel, params: dict, *, tokenizer, draft_vocabulary: Sequence[int]
) -> None:
    """Writes files that the mtpjax commands read: the model with its module, and the tokens that it may draft.

    Args:
        folder: output folder, which receives `checkpoint/`, and `vocabulary.json` if that does not exist yet.
        model: the model with its module.
        params: its parameters.
        tokenizer: its tokenizer.
        draft_vocabulary: token ids.
    """
    save_model(folder / CHECKPOINT_FOLDER, model, params, tokenizer=tokenizer)
    if not (folder / VOCABULARY_FILE).exists():
        counts = np.bincount(draft_vocabulary, minlength=model.config.vocab_size)
        save_vocabulary(
            folder / VOCABULARY_FILE, draft_vocabulary, counts=counts, source="the file of modules", sizes={}
        )
