"""What several tests of decoding begin with."""

import pytest

from mtpjax.io.checkpoint import save_model


@pytest.fixture(scope="module")
def checkpoint(small, tmp_path_factory):
    """A model of bytes on disk, whose drafts are right now and then."""
    model, params = small("grouped", "mixed", vocab_size=256)
    path = tmp_path_factory.mktemp("model") / "checkpoint"
    save_model(path, model, params)
    return path
