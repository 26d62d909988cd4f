"""The panel's figures are those of a loop over positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax.model import forward
from mtpjax.train.data import Batch
from mtpjax.train.panel import acceptance_panel

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.parametrize("num_depths", [0, 3])
def test_figures_are_those_of_a_loop_over_positions(num_depths, small):
    model, params = small()
    rng = np.random.default_rng(0)
    tokens = rng.integers(model.config.vocab_size, size=(2, 12)).astype(np.int32)
    segment_ids = np.array([[1] * 7 + [2] * 5, [1] * 9 + [0] * 3], np.int32)
    loss_mask = (segment_ids > 0) & (rng.random((2, 12)) < 0.8)
    panel = acceptance_panel(params, Batch(tokens, segment_ids, loss_mask), model=model, num_depths=num_depths)

    output = forward(
        params, jnp.asarray(tokens), model=model, segment_ids=jnp.asarray(segment_ids), num_depths=num_depths
    )
    trunk, *drafts = (np.array(jax.nn.softmax(logits)) for logits in (output.logits, *output.mtp_logits))
    found = {name: [[] for _ in range(num_depths)] for name in ("agreement", "survival", "overlap", "sampled_survival")}
    for row, place in np.ndindex(2, 12):
        survives, product = True, 1.0
        for level, draft in enumerate(drafts, start=1):
            target = place + level + 1
            if target >= 12 or not segment_ids[row, place] or segment_ids[row, target] != segment_ids[row, place]:
                break
            p, q = trunk[row, place + level], draft[row, place]
            agrees, overlap = p.argmax() == q.argmax(), np.minimum(p, q).sum()
            survives, product = survives and agrees, product * overlap
            if loss_mask[row, target]:
                for name, value in zip(found, (agrees, survives, overlap, product), strict=True):
                    found[name][level - 1].append(value)
    for name, levels in found.items():
        np.testing.assert_allclose(getattr(panel, name), [np.mean(values) for values in levels], atol=1e-6)
    assert len(panel.bits_per_token) == num_depths + 1
    assert panel.accept_length == pytest.approx(1 + sum(panel.survival))
    assert panel.sampled_accept_length == pytest.approx(1 + sum(panel.sampled_survival))
