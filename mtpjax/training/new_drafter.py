"""Makes the drafter that a run trains beside its trunk, and turns it into one for decoding."""

import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.data.draft_vocabulary import choose_vocabulary
from mtpjax.decoding.drafters.eagle3 import Eagle3Drafter, Eagle3Params
from mtpjax.decoding.drafters.load import DRAFTER_FOLDER, save_drafter
from mtpjax.decoding.drafters.medusa import MedusaDrafter, MedusaParams
from mtpjax.models.config import ModelConfig
from mtpjax.models.draft_forward import DraftArchitecture, draft_heads
from mtpjax.models.eagle3 import Eagle3, Eagle3Config
from mtpjax.models.masks import full_view
from mtpjax.models.medusa import Medusa, MedusaConfig
from mtpjax.models.model import MTPModel
from mtpjax.models.params import DRAFT_IDS, DRAFTER
from mtpjax.training.config import TrainConfig
from mtpjax.training.corpus import Corpus

MIN_DEFAULT_LAYERS = 7  # from here on EAGLE-3's default layers are three different ones


def default_draft_layers(num_layers: int) -> tuple[int, ...]:
    """Returns the layers whose input states EAGLE-3 reads: 2, L / 2 and L - 3, or thirds of a smaller trunk.

    Args:
        num_layers: layers of the trunk, L.

    Returns:
        Layers, ascending; L stands for the output of the last one.
    """
    if num_layers >= MIN_DEFAULT_LAYERS:
        return 2, num_layers // 2, num_layers - 3
    return tuple(sorted({num_layers // 3, 2 * num_layers // 3, num_layers}))


def draft_architecture(config: TrainConfig, trunk: ModelConfig) -> DraftArchitecture | None:
    """Returns the architecture of a run's new drafter.

    An EAGLE-3 drafter has one Llama layer of the trunk's width, with as many attention heads. Medusa has one residual
    layer per head.

    Args:
        config: the settings.
        trunk: the trunk's config.

    Returns:
        The architecture; None for MTP modules.

    Raises:
        ValueError: the settings do not fit the trunk.
    """
    if config.drafter == "mtp":
        return None
    V, D = trunk.vocab_size, trunk.hidden_size
    if config.draft_vocab_size > V:
        raise ValueError(f"draft_vocab_size {config.draft_vocab_size} exceeds the vocabulary of {V}")
    num_drafted = config.draft_vocab_size or V
    if config.drafter == "medusa":
        return MedusaConfig(
            hidden_size=D, vocab_size=V, num_heads=config.num_depths, draft_vocab_size=num_drafted, num_layers=1
        )
    is_grouped = trunk.attention == "grouped"
    block = ModelConfig(
        vocab_size=V,
        hidden_size=D,
        num_hidden_layers=1,
        num_attention_heads=trunk.num_attention_heads,
        num_key_value_heads=(trunk.num_key_value_heads if is_grouped else 0) or trunk.num_attention_heads,
        head_dim=(trunk.head_dim if is_grouped else 0) or D // trunk.num_attention_heads,
        intermediate_size=trunk.intermediate_size,
        max_position_embeddings=trunk.max_position_embeddings,
        rms_norm_eps=trunk.rms_norm_eps,
        rope_theta=trunk.rope_theta,
    )
    return Eagle3Config(
        block=block,
        layer_ids=config.draft_layers or default_draft_layers(trunk.num_hidden_layers),
        num_target_layers=trunk.num_hidden_layers,
        target_hidden_size=D,
        draft_vocab_size=num_drafted,
    )


def choose_draft_ids(corpus: Corpus, architecture: DraftArchitecture, vocab_size: int) -> jax.Array | None:
    """Chooses the tokens that can be drafted: the most frequent targets of the training rows, and the end of a text.

    Args:
        corpus: the data of the run.
        architecture: the drafter's.
        vocab_size: V of the trunk.

    Returns:
        `[R]` int32 ids, ascending; None if all tokens can be drafted.
    """
    if (size := architecture.draft_vocab_size) == vocab_size:
        return None
    counts = np.zeros(vocab_size, np.int64)
    for rows in corpus.source_rows:
        counts += np.bincount(rows.tokens[(rows.segment_ids > 0) & rows.loss_mask], minlength=vocab_size)
    ends = [token for token in corpus.tokenizer.eos_token_ids if token < vocab_size]
    return jnp.array(choose_vocabulary(counts, size, required_ids=ends), jnp.int32)


def add_new_drafter(
    params: dict, *, model: MTPModel, architecture: DraftArchitecture, draft_ids: jax.Array | None, key: jax.Array
) -> dict:
    """Adds a new drafter to its trunk's parameters. Its heads begin as the trunk's columns of the draft ids.

    Args:
        params: the trunk's parameters.
        model: the trunk.
        architecture: the drafter's.
        draft_ids: `[R]` int32 token of each column of its head; None: column j is token j.
        key: a `jax.random` key.

    Returns:
        The parameters with `DRAFTER` (float32), and `DRAFT_IDS` if there are any.
    """
    own, D = {} if draft_ids is None else {DRAFT_IDS: draft_ids}, model.config.hidden_size
    if isinstance(architecture, Eagle3Config):
        tokens = jnp.zeros((1, 2), jnp.int32)
        features, view = jnp.zeros((1, 2, architecture.features_size)), full_view(architecture.block, tokens + 1)
        network = jax.jit(Eagle3(architecture).init)(key, features, tokens, view)["params"]
    else:
        network = jax.jit(Medusa(architecture).init)(key, jnp.zeros((1, D)))["params"]
    params = {**params, **own, DRAFTER: dict(network)}
    head = draft_heads(params, model=model, architecture=architecture, num_depths=0)[0].astype(jnp.float32)
    for name in network:
        if name == "head" or name.startswith("output_"):
            params[DRAFTER][name] = jnp.copy(head)
    return params


def to_decoding(params: dict, architecture: DraftArchitecture) -> tuple[Eagle3Drafter | MedusaDrafter, Any]:
    """Returns a trained drafter as `DecodeConfig(drafter=...)` and `speculative_generate(draft_params=...)` take it.

    Args:
        params: parameters of trunk and drafter.
        architecture: the drafter's.

    Returns:
        The drafter and its parameters.
    """
    network, ids = params[DRAFTER], params.get(DRAFT_IDS)
    if isinstance(architecture, Eagle3Config):
        return Eagle3Drafter(architecture=architecture), Eagle3Params(network, ids)
    return MedusaDrafter(architecture=architecture), MedusaParams(network, ids)


def save_trained_drafter(output: pathlib.Path, params: dict, architecture: DraftArchitecture) -> pathlib.Path:
    """Saves a trained drafter in a published format, in the place of an older one of the same run.

    EAGLE-3 is written as speculators and vLLM read it, because SpecForge's list of layers has two readings. Medusa is
    written as its authors do, or as vLLM reads it if its vocabulary is reduced.

    Args:
        output: the run folder.
        params: parameters of trunk and drafter.
        architecture: the drafter's.

    Returns:
        The folder.
    """
    path, unfinished = output / DRAFTER_FOLDER, output / f".{DRAFTER_FOLDER}-new"
    shutil.rmtree(unfinished, ignore_errors=True)
    is_reduced = isinstance(architecture, MedusaConfig) and architecture.draft_vocab_size < architecture.vocab_size
    save_drafter(unfinished, *to_decoding(params, architecture), format="vllm" if is_reduced else None)
    shutil.rmtree(path, ignore_errors=True)
    unfinished.rename(path)
    return path
