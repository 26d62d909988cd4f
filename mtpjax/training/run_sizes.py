"""The sizes of a run, computed from its settings and data without training."""

import math

import jax

from mtpjax.drafters.forward import read_layers
from mtpjax.training.config import TrainConfig
from mtpjax.training.corpus import load_corpus
from mtpjax.training.hidden_state_cache import bytes_per_token
from mtpjax.training.initial_drafter import add_drafter, initial_drafter
from mtpjax.training.initial_model import init_model, num_trained_depths
from mtpjax.training.step import make_optimizer
from mtpjax.training.train_state import trainable_params


def compute_run_sizes(config: TrainConfig) -> dict[str, int]:
    """Computes a run's numbers of rows, tokens and parameters, its memory and its disk space, without training."""
    # Compute only shapes, so that no parameters or optimiser state are allocated.
    model, make_params = init_model(config)
    initial = initial_drafter(config, model)
    params = jax.eval_shape(make_params)
    corpus = load_corpus(config, model.config.vocab_size, num_depths=num_trained_depths(config, model))
    if initial is not None:
        settings = {"config": config, "corpus": corpus, "model": model}
        params = jax.eval_shape(lambda params: add_drafter(params, initial, **settings)[0], params)
    state = (params, jax.eval_shape(make_optimizer(config).init, trainable_params(params, config.trains)))
    sizes = {
        "rows": sum(len(rows.tokens) for rows in corpus.source_rows),
        "tokens": sum(int((rows.segment_ids > 0).sum()) for rows in corpus.source_rows),
        "held-out documents": len(corpus.held_out),
        "parameters": sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)),
        "bytes of parameters and optimiser": sum(
            math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)
        ),
    }
    if config.trunk_states is not None:
        layer_ids = read_layers(None if initial is None else initial.drafter)
        each = bytes_per_token(model, config.trunk_states_dtype, layer_ids)
        sizes["bytes of the trunk's states, each token"] = each
        sizes["bytes of the trunk's states"] = each * sum(rows.tokens.size for rows in corpus.source_rows)
    return sizes
