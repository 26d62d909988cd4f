"""Updates of drafters with attention over ranges of keys, against updates with all scores, over 50 updates."""

import jax
import numpy as np
import pytest

from mtpjax.drafters.dflash import network
from mtpjax.models import masks
from mtpjax.models.layers import attend
from mtpjax.models.params import is_of_modules
from pallas_kernels.range_attention import blocks, range_attention_reference
from tests.helpers.new_drafters import KIND_SETTINGS, new_drafter, packed_batch, run_steps


def plain(*arrays, implementation="xla", **settings):
    del implementation
    return range_attention_reference(*arrays, **settings)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in ("medusa", "dflash"))) for kind in KIND_SETTINGS]
)
def test_fifty_updates_are_those_of_the_plain_attention(kind, small, monkeypatch):
    # Short rows use ranges of keys too, in blocks that do not fill them.
    monkeypatch.setattr(masks, "MAX_DENSE", 0)
    monkeypatch.setattr(blocks, "BLOCK", 8)
    found = []
    for is_plain in (False, True):
        jax.clear_caches()
        if is_plain:
            for module in (attend, network):
                monkeypatch.setattr(module, "range_attention", plain)
        # Adam's first update of an element is as large as the learning rate, even if its gradient is only rounding.
        settings = {"steps": 50, "warmup": 50, "num_anchors": 4}
        params, metrics = run_steps(*new_drafter(small, kind), packed_batch(), **settings)
        trained = {name: leaf for name, leaf in params.items() if is_of_modules(name)}
        found.append((jax.tree.leaves(trained), metrics["losses"]))
    jax.clear_caches()
    (params, losses), (expected, expected_losses) = found
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for got, wanted in zip(params, expected, strict=True):
        assert np.linalg.norm(got - wanted) <= 1e-5 * np.linalg.norm(wanted)
