"""A slot that another request has used is as one that was never used, in every array of the state."""

import dataclasses

import jax
import numpy as np
import pytest

from mtpjax import DecodeConfig, SamplingParams
from mtpjax.models.attention_kinds import ATTENTION_KINDS
from mtpjax.models.cache import Cache
from tests.helpers.running import Running
from tests.helpers.small_models import constructed_drafter

FIRST, SECOND = (np.random.default_rng(7).integers(0, 61, size).tolist() for size in (17, 9))
CONFIG = DecodeConfig(num_steps=2, prefill_chunk=8, acceptance="sample", logprobs=True, stop_sequences=((60, 60),))
# Of the first request; the second has none of them.
SAMPLING = SamplingParams(temperature=0.8, seed=3, top_k=9, repetition_penalty=1.1, frequency_penalty=0.2)
PAGES = list(range(20))


def readable(state, row, pages=PAGES, size=4):
    """The row's part of each array, by name, without the slots that nothing reads.

    A cache's slots from its length on hold what a longer text left there, or rejected drafts. A pass writes its own
    tokens' slots before it reads, and masks all slots after them.
    """

    def of_cache(cache):
        length = int(cache.length[row])

        def used(leaf):
            # Pages in the order of the text: [N, ..., size, H].
            own = pages[: -(-length // size)]
            return np.concatenate(list(leaf[np.asarray(own)]), axis=-2)[..., :length, :]

        layers = []
        for kind, entries in zip(cache.kinds, cache.layers, strict=True):
            is_recurrent = ATTENTION_KINDS[kind.attention].is_recurrent
            layers.append(jax.tree.map((lambda leaf: leaf[row]) if is_recurrent else used, entries))
        return cache.replace(layers=tuple(layers), length=cache.length[row])

    def of(node):
        return of_cache(node) if isinstance(node, Cache) else node[row] if node.ndim else node

    rows = jax.tree.map(of, jax.device_get(state), is_leaf=lambda node: isinstance(node, Cache))
    leaves = jax.tree_util.tree_leaves_with_path(rows)
    named = {jax.tree_util.keystr(path).lstrip("."): leaf for path, leaf in leaves}
    # The tables of a session's state are the host's: a call gets those of its rows.
    return {name: leaf for name, leaf in named.items() if not name.startswith("storage")}


@pytest.mark.parametrize(
    ("attention", "changes"),
    [
        ("grouped", {}),
        *[
            pytest.param(attention, changes, marks=pytest.mark.slow)
            for attention, changes in [
                ("hybrid", {}),
                ("latent", {}),
                ("sparse", {"acceptance": "greedy"}),
                ("grouped", {"num_steps": 0}),
                ("latent", {"topk": 2, "num_draft_tokens": 5, "acceptance": "recursive"}),
                *[("grouped", {"drafter": name}) for name in ("lookup", "eagle3", "medusa", "dflash", "dspark")],
            ]
        ],
    ],
)
def test_a_used_slot_starts_as_a_fresh_one(attention, changes, small):
    model, params = small(attention, "mixed")
    draft_params = None
    if changes.get("drafter", "lookup") != "lookup":
        drafter, draft_params = constructed_drafter(changes["drafter"], model, params)
        changes = {**changes, "drafter": drafter}
    config = dataclasses.replace(CONFIG, max_new_tokens=20, **changes)
    sampling = SAMPLING if config.acceptance != "greedy" else dataclasses.replace(SAMPLING, temperature=0.0)
    used, fresh = (
        Running(params, model=model, config=config, pool=(40, 4), draft_params=draft_params) for _ in range(2)
    )
    used.enter(1, FIRST, PAGES, sampling=sampling)
    used.go_on()
    assert used.collect([1]).lengths.tolist() == [20]
    second = dataclasses.replace(config, max_new_tokens=12, stop_sequences=())
    for each in (used, fresh):
        each.enter(1, SECOND, PAGES, config=second)
    # Another text was in the slot than is in it now.
    for rounds in (0, 2):
        for each in (used, fresh):
            each.go_on(rounds)
        again, expected = (readable(each.state, 1) for each in (used, fresh))
        assert again.keys() == expected.keys()
        for name, leaf in expected.items():
            np.testing.assert_array_equal(again[name], leaf, err_msg=f"{name} after {rounds} rounds")
    assert used.collect([1]).origins[0, 0] == 0
