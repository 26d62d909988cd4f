"""A slot that another request has used is as one that was never used, in every array of the state."""

import dataclasses

import jax
import numpy as np
import pytest

from mtpjax import DecodeConfig, SamplingParams, collect, init_state, insert, run
from mtpjax.models.attention_kinds import ATTENTION_KINDS
from mtpjax.models.cache import Cache
from tests.helpers.small_models import constructed_drafter

FIRST, SECOND = (np.random.default_rng(7).integers(0, 61, size).tolist() for size in (17, 9))
CONFIG = DecodeConfig(num_steps=2, prefill_chunk=8, acceptance="sample", logprobs=True, stop_sequences=((60, 60),))
# Of the first request; the second has none of them.
SAMPLING = SamplingParams(temperature=0.8, seed=3, top_k=9, repetition_penalty=1.1, frequency_penalty=0.2)
PAGES = list(range(20))
SHARED = ("policy.depth", "policy.since_probe")  # of the whole batch: a new row changes neither


def readable(state, row):
    """The row's part of each array, by name, without the slots that nothing reads.

    A cache's slots from its length on hold what a longer text left there, or rejected drafts. A pass writes its own
    tokens' slots before it reads, and masks all slots after them.
    """

    def of_cache(cache):
        pages, length = state.pages, int(cache.length[row])

        def used(leaf):
            if pages is None:
                return leaf[row, ..., :length, :]
            # Pages in the order of the text: [N, ..., size, H].
            own = pages.table[row][: -(-length // pages.size)]
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
    return {name: leaf for name, leaf in named.items() if name not in SHARED}


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
                ("grouped", {"pool": True}),
                ("hybrid", {"pool": True}),
                ("latent", {"topk": 2, "num_draft_tokens": 5, "acceptance": "recursive"}),
                ("grouped", {"depth_policy": "adaptive", "depth_costs": (1.0, 1.2, 1.4)}),
                *[("grouped", {"drafter": name}) for name in ("lookup", "eagle3", "medusa", "dflash", "dspark")],
            ]
        ],
    ],
)
def test_a_used_slot_starts_as_a_fresh_one(attention, changes, small):
    model, params = small(attention, "mixed")
    pool, draft_params = ((40, 4) if changes.get("pool") else None), None
    changes = {name: value for name, value in changes.items() if name != "pool"}
    if changes.get("drafter", "lookup") != "lookup":
        changes["drafter"], draft_params = constructed_drafter(changes["drafter"], model, params)
    config = dataclasses.replace(CONFIG, max_new_tokens=20, **changes)
    sampling = SAMPLING if config.acceptance != "greedy" else dataclasses.replace(SAMPLING, temperature=0.0)

    def enter(state, prompt, config, sampling=None):
        return insert(
            params, state, [1], [prompt], model=model, config=config, sampling=sampling, draft_params=draft_params,
            pages=None if pool is None else [PAGES],
        )  # fmt: skip

    def go_on(state, rounds):
        return run(params, state, rounds, model=model, config=config, draft_params=draft_params)

    def fresh():
        return init_state(params, model=model, config=config, num_slots=2, max_length=64, pool=pool)

    used = go_on(enter(fresh(), FIRST, config, sampling), 100)
    assert collect(used, [1]).lengths.tolist() == [20]
    second = dataclasses.replace(config, max_new_tokens=12, stop_sequences=())
    states = [enter(state, SECOND, second) for state in (used, fresh())]
    # Another text was in the slot than is in it now; an adaptive depth of the batch may differ from here on.
    for rounds in (0,) if config.depth_policy == "adaptive" else (0, 2):
        states = [go_on(state, rounds) if rounds else state for state in states]
        again, expected = (readable(state, 1) for state in states)
        assert again.keys() == expected.keys()
        for name, leaf in expected.items():
            np.testing.assert_array_equal(again[name], leaf, err_msg=f"{name} after {rounds} rounds")
    assert collect(states[0], [1]).origins[0, 0] == 0
