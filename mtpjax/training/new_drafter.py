"""Makes the drafter that a run trains beside its trunk, and turns it into one for decoding."""

import dataclasses
import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.data.draft_vocabulary import choose_vocabulary
from mtpjax.drafters.dflash.drafting import DFlashDrafter, DFlashParams
from mtpjax.drafters.dflash.network import DFlash, DFlashConfig
from mtpjax.drafters.dspark.drafting import DSparkDrafter
from mtpjax.drafters.dspark.network import DSpark, DSparkConfig
from mtpjax.drafters.eagle3.drafting import Eagle3Drafter, Eagle3Params
from mtpjax.drafters.eagle3.network import Eagle3, Eagle3Config
from mtpjax.drafters.files.write import find_form
from mtpjax.drafters.forward import DraftArchitecture, draft_heads
from mtpjax.drafters.load import DRAFTER_FOLDER, TrainedDrafter, save_drafter
from mtpjax.drafters.medusa.drafting import MedusaDrafter, MedusaParams
from mtpjax.drafters.medusa.network import Medusa, MedusaConfig
from mtpjax.models.masks import full_view
from mtpjax.models.model import MTPModel
from mtpjax.models.params import DRAFT_IDS, DRAFTER
from mtpjax.training.config import TrainConfig
from mtpjax.training.corpus import Corpus


def with_mask_token(architecture: DraftArchitecture, config: TrainConfig, corpus: Corpus) -> DraftArchitecture:
    """Chooses the token of a block's mask slots, unless the settings name one: the rarest one of the training rows.

    Args:
        architecture: the drafter's.
        config: the settings.
        corpus: the data of the run.

    Returns:
        The architecture with the token, the last of the rarest ones and not an end of a text; others unchanged.
    """
    if not isinstance(architecture, DFlashConfig) or config.draft_mask_token is not None:
        return architecture
    V = architecture.block.vocab_size
    counts = _count_tokens(corpus, V)
    # However rare an end of a text is, drafts contain it.
    counts[[token for token in corpus.tokenizer.eos_token_ids if token < V]] = np.iinfo(np.int64).max
    return dataclasses.replace(architecture, mask_token_id=V - 1 - int(np.argmin(counts[::-1])))


def _count_tokens(corpus: Corpus, vocab_size: int) -> np.ndarray:
    """Counts the targets of the training rows by token, `[V]` int64."""
    counts = np.zeros(vocab_size, np.int64)
    for rows in corpus.source_rows:
        counts += np.bincount(rows.tokens[(rows.segment_ids > 0) & rows.loss_mask], minlength=vocab_size)
    return counts


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
    # Every text must be able to end.
    ends = [token for token in corpus.tokenizer.eos_token_ids if token < vocab_size]
    return jnp.array(choose_vocabulary(_count_tokens(corpus, vocab_size), size, required_ids=ends), jnp.int32)


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
    # Only the shapes of the inputs matter here.
    if isinstance(architecture, MedusaConfig):
        network = jax.jit(Medusa(architecture).init)(key, jnp.zeros((1, D)))["params"]
    else:
        tokens = jnp.zeros((1, 2), jnp.int32)
        features, view = jnp.zeros((1, 2, architecture.features_size)), full_view(architecture.block, tokens + 1)
        if isinstance(architecture, Eagle3Config):
            network = jax.jit(Eagle3(architecture).init)(key, features, tokens, view)["params"]
        else:
            block = DSpark(architecture) if isinstance(architecture, DSparkConfig) else DFlash(architecture)
            network = jax.jit(block.init)(key, features, jnp.zeros((1, 2, D)), view)["params"]
    params = {**params, **own, DRAFTER: dict(network)}
    # A head of its own begins as the trunk's.
    head = draft_heads(params, model=model, architecture=architecture, num_depths=0)[0].astype(jnp.float32)
    for name in network:
        if name == "head" or name.startswith("output_"):
            params[DRAFTER][name] = jnp.copy(head)
    return params


def to_decoding(params: dict, architecture: DraftArchitecture) -> tuple[TrainedDrafter, Any]:
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
    if isinstance(architecture, DSparkConfig):
        return DSparkDrafter(architecture=architecture), DFlashParams(network, ids)
    if isinstance(architecture, DFlashConfig):
        return DFlashDrafter(architecture=architecture), DFlashParams(network, ids)
    return MedusaDrafter(architecture=architecture), MedusaParams(network, ids)


def save_trained_drafter(output: pathlib.Path, params: dict, architecture: DraftArchitecture) -> pathlib.Path:
    """Saves a trained drafter in a published format, in the place of an older one of the same run.

    The format is the first one of `find_form` that can express it.

    Args:
        output: the run folder.
        params: parameters of trunk and drafter.
        architecture: the drafter's.

    Returns:
        The folder.
    """
    path, unfinished = output / DRAFTER_FOLDER, output / f".{DRAFTER_FOLDER}-new"
    shutil.rmtree(unfinished, ignore_errors=True)
    form = find_form(architecture, has_draft_ids=DRAFT_IDS in params)
    save_drafter(unfinished, *to_decoding(params, architecture), format=form)
    shutil.rmtree(path, ignore_errors=True)
    unfinished.rename(path)
    return path
