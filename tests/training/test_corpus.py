"""The training data of a run."""

import numpy as np

from mtpjax import TrainConfig
from mtpjax.training.corpus import load_corpus
from tests.helpers import training_runs


def test_runs_of_all_seeds_are_evaluated_on_the_same_held_out_rows(tmp_path):
    data = str(training_runs.write_corpus(tmp_path))
    first, second = (
        load_corpus(TrainConfig(data=data, row_length=32, held_out_fraction=0.5, seed=seed), 256) for seed in (0, 1)
    )
    assert sum(len(document.tokens) for document in first.held_out) > 2 * first.panel_rows.tokens.size  # a choice
    np.testing.assert_array_equal(first.panel_rows.tokens, second.panel_rows.tokens)
