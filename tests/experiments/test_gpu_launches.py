"""A layer launches few kernels: where a model is small, launches take longer than reading its weights."""

import pytest

from experiments.kernels.bytes_moved import SUBJECTS
from experiments.kernels.gpu_launches import MOST, launches_per_layer
from mtpjax.evaluation.roofline import LAUNCHES_OF_EXPERTS, LAUNCHES_PER_DENSE_LAYER


@pytest.mark.h100
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("M", "dense"),
        pytest.param("S", "dense", marks=pytest.mark.slow),
        pytest.param("16B-A2.4B", "dense", marks=pytest.mark.slow),
        ("16B-A2.4B", "experts"),
    ],
)
def test_a_layer_launches_no_more_kernels_than_its_bound(name, kind):
    added = launches_per_layer(SUBJECTS[name], kind, "triton")
    assert 6 <= len(added) <= MOST[kind], added
    # The prediction of times counts the same.
    assert len(added) == LAUNCHES_PER_DENSE_LAYER + LAUNCHES_OF_EXPERTS * (kind == "experts"), added
