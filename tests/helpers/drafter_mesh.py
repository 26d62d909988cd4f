"""What drafters in files of their own do on a mesh."""

import dataclasses

import pytest

from mtpjax import DecodeConfig, speculative_generate
from mtpjax.compat import make_mesh


def check_mesh(model, params, drafter, draft_params, prompts):
    """Checks that a mesh splits the rows with the same result, and that one that splits the trunk is refused."""
    config = DecodeConfig(max_new_tokens=12, num_steps=2, drafter=drafter, prefill_chunk=8)
    arguments = {"model": model, "config": config, "draft_params": draft_params}
    plain = speculative_generate(params, prompts, **arguments)
    result = speculative_generate(params, prompts, **arguments, mesh=make_mesh({"data": 2}))
    assert result.rows() == plain.rows() and (result.stats.accepted == plain.stats.accepted).all()
    with pytest.raises(ValueError, match="do not support a mesh that splits the trunk"):
        speculative_generate(
            params, prompts, **arguments | {"config": dataclasses.replace(config, allow_copies=True)},
            mesh=make_mesh({"tensor": 2}),
        )  # fmt: skip
