"""Makes the new drafter that a run trains on its frozen trunk, and saves it."""

import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.data.draft_vocabulary import choose_vocabulary
from mtpjax.drafters.files.write import find_form
from mtpjax.drafters.forward import draft_heads
from mtpjax.drafters.method import DraftMethod
from mtpjax.drafters.methods import DRAFTER_FOLDER, find_method, save_drafter
from mtpjax.drafters.trained import DraftParams, TrainedDrafter
from mtpjax.models.config import ModelConfig
from mtpjax.models.model import MTPModel
from mtpjax.models.params import DRAFT_IDS, DRAFTER
from mtpjax.training.config import TrainConfig
from mtpjax.training.corpus import Corpus


def new_drafter(config: TrainConfig, trunk: ModelConfig) -> TrainedDrafter:
    """Makes the drafter of a run that trains one from scratch; `fit_to_data` completes it.

    Raises:
        ValueError: the settings do not fit the trunk.
    """
    method, V = find_method(config.drafter), trunk.vocab_size
    assert method.training is not None
    if config.draft_vocab_size > V:
        raise ValueError(f"draft_vocab_size {config.draft_vocab_size} exceeds the vocabulary of {V}")
    # 0: the full vocabulary.
    return method.for_architecture(method.training.architecture(config, trunk, config.draft_vocab_size or V))


def fit_to_data(
    drafter: TrainedDrafter, config: TrainConfig, corpus: Corpus
) -> tuple[TrainedDrafter, jax.Array | None]:
    """Completes a new drafter's architecture from the training rows, and chooses its draft vocabulary from them.

    Returns:
        The drafter, and the `[R]` int32 ids, ascending, of the most frequent targets and the ends of a text; None if
        all tokens can be drafted.
    """
    method, own = find_method(config.drafter), drafter.architecture
    assert method.training is not None
    V = own.trunk.vocab_size
    counts = _count_tokens(corpus, V)
    # Every text must be able to end.
    ends = [token for token in corpus.tokenizer.eos_token_ids if token < V]
    drafter = method.for_architecture(method.training.fit_to_data(own, config, counts, ends))
    if (size := own.draft_vocab_size) == V:
        return drafter, None
    return drafter, jnp.array(choose_vocabulary(counts, size, required_ids=ends), jnp.int32)


def _count_tokens(corpus: Corpus, vocab_size: int) -> np.ndarray:
    """Counts the targets of the training rows by token, `[V]` int64."""
    counts = np.zeros(vocab_size, np.int64)
    for rows in corpus.source_rows:
        counts += np.bincount(rows.tokens[(rows.segment_ids > 0) & rows.loss_mask], minlength=vocab_size)
    return counts


def add_new_drafter(
    params: dict,
    *,
    model: MTPModel,
    method: DraftMethod,
    drafter: TrainedDrafter,
    draft_ids: jax.Array | None,
    key: jax.Array,
) -> dict:
    """Adds a new drafter to its trunk's parameters. Its heads start as the trunk's columns of the draft ids.

    Args:
        params: the trunk's parameters.
        model: the trunk.
        method: the drafter's method.
        drafter: the drafter.
        draft_ids: `[R]` int32 token of each column of its head; None: column j is token j.
        key: a `jax.random` key.

    Returns:
        The parameters with `DRAFTER` (float32), and `DRAFT_IDS` if there are any.
    """
    assert method.training is not None
    network = method.training.init(drafter.architecture, key)
    params = params | DraftParams(network, draft_ids).beside_trunk()
    head = draft_heads(params, model=model, drafter=drafter, num_depths=0)[0].astype(jnp.float32)
    for name in filter(method.training.is_head, network):
        params[DRAFTER][name] = jnp.copy(head)
    return params


def save_trained_drafter(
    output: pathlib.Path, params: dict, drafter: TrainedDrafter, method: DraftMethod
) -> pathlib.Path:
    """Saves a trained drafter in the run folder in the format of `find_form`, replacing an older one."""
    path, unfinished = output / DRAFTER_FOLDER, output / f".{DRAFTER_FOLDER}-new"
    shutil.rmtree(unfinished, ignore_errors=True)
    form = find_form(method, drafter.architecture, has_draft_ids=DRAFT_IDS in params)
    save_drafter(unfinished, drafter, DraftParams.of(params), format=form, method=method)
    shutil.rmtree(path, ignore_errors=True)
    unfinished.rename(path)
    return path
