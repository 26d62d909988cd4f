"""A round's commit equals a plain loop over lists: tokens, stops, limits, counts, caches and log-probabilities."""

import types

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtpjax.decoding.commit import commit
from mtpjax.decoding.sampling import SamplingArrays, SamplingFeatures, TokenHistory
from mtpjax.decoding.state import RowSettings
from mtpjax.models.cache import empty_cache
from mtpjax.models.view import CONTIGUOUS, ContiguousRows
from tests.helpers.small_models import small_config

B, L, K, V = 6, 40, 3, 5  # few tokens, so that stop sequences are hit
PROMPT = 6
STOPS = np.array([[[-1, 1], [2, 3]], [[-1, -1], [4, 4]]] * (B // 2))  # [B, N, Z]; -1 pads
CONFIG = small_config("grouped")
LOGITS = jax.random.normal(jax.random.key(0), (B, K + 1, V))


class Rows(flax.struct.PyTreeNode):
    """What a commit reads and changes of a `DecodeState`."""

    settings: RowSettings
    tokens: jax.Array
    origin: jax.Array
    logprobs: jax.Array
    length: jax.Array
    done: jax.Array
    stopped: jax.Array
    history: TokenHistory
    trunk: object
    rounds: jax.Array
    proposed: jax.Array
    accepted: jax.Array
    discarded: jax.Array
    drafter: object = None
    storage: ContiguousRows = CONTIGUOUS
    policy: None = None


def make_rows(rng, *, min_new=0, frequency=False):
    features = SamplingFeatures(min_new=bool(min_new), frequency=frequency)
    sampling = SamplingArrays.greedy(B, V, features).replace(min_new=jnp.full(B, min_new, jnp.int32))
    limit = rng.integers(PROMPT + 4, PROMPT + 24, B)
    length = np.full(B, PROMPT + 1)
    ints = lambda values: jnp.asarray(values, jnp.int32)
    kinds = CONFIG.trunk_kinds[:1]
    trunk = empty_cache(CONFIG, kinds, B, L)
    # Each slot's entries are its number, so that a moved one is recognised.
    layers = jax.tree.map(lambda leaf: jnp.broadcast_to(jnp.arange(L, dtype=float)[:, None], leaf.shape), trunk.layers)
    return Rows(
        settings=RowSettings(
            prompt_length=ints(np.full(B, PROMPT)),
            limit=ints(limit),
            stops=ints(STOPS),
            rule_params=jnp.zeros((B, 2)),
            sampling=sampling,
        ),
        tokens=ints(rng.integers(0, V, (B, L))),
        origin=jnp.zeros((B, L), jnp.int8),
        logprobs=jnp.zeros((B, L)),
        length=ints(length),
        done=jnp.arange(B) == 2,
        stopped=jnp.zeros(B, bool),
        history=TokenHistory.empty(B, V, sampling),
        trunk=trunk.replace(layers=layers, length=ints(length - 1)),
        rounds=jnp.zeros(B, jnp.int32),
        proposed=jnp.zeros((B, K + 1), jnp.int32),  # of an adaptive call whose deepest round has a level more
        accepted=jnp.zeros((B, K + 1), jnp.int32),
        discarded=jnp.zeros(B, jnp.int32),
    )


@jax.jit
def run_commit(rows, new_tokens, num_accepted, num_drafted, logits, path):
    """Commits the accepted tokens of a round whose drafter keeps the places of its nodes."""
    width = K + 1 if path is None else 2 * K + 1
    states = jnp.broadcast_to(jnp.arange(width), (B, width))
    drafter = types.SimpleNamespace(commit=lambda *arguments, **_: arguments[-2])  # ..., states, acceptance
    decoder = types.SimpleNamespace(drafter=drafter, spec=types.SimpleNamespace(num_steps=K), vocab_size=V)
    return commit(
        decoder,
        rows,
        types.SimpleNamespace(tokens=jnp.zeros((B, width), jnp.int32), num_drafted=num_drafted),
        types.SimpleNamespace(trunk=rows.trunk, logits=logits, states=states),
        types.SimpleNamespace(path=path, num_accepted=num_accepted, tokens=new_tokens),
    )


class PlainRow:
    """The same for one row, with lists."""

    def __init__(self, rows, index):
        self.text = rows.tokens[index, : rows.length[index]].tolist()
        self.limit, self.stops = int(rows.settings.limit[index]), STOPS[index].tolist()
        self.min_new = int(rows.settings.sampling.min_new[index])
        self.done, self.stopped = bool(rows.done[index]), False
        self.origin, self.discarded, self.num_rounds = [0] * len(self.text), 0, 0
        self.proposed, self.accepted = [0] * (K + 1), [0] * (K + 1)

    def commit(self, new, num_accepted, num_drafted):
        if self.done:
            return
        self.num_rounds += 1
        for level in range(K):
            self.proposed[level] += level < num_drafted
            self.accepted[level] += level < num_accepted
        new = new[: num_accepted + 1]
        for place, token in enumerate(new):
            may_stop = len(self.text) - PROMPT >= self.min_new
            self.text.append(token)
            self.origin.append(place + 1 if place < num_accepted else 0)
            self.stopped = may_stop and any(self.ends_with(stop) for stop in self.stops)
            self.done = self.stopped or len(self.text) == self.limit
            if self.done:
                self.discarded += len(new) - place - 1
                return

    def ends_with(self, stop):
        """The prompt takes no part in a stop sequence."""
        sequence = [token for token in stop if token >= 0]
        return bool(sequence) and self.text[PROMPT:][-len(sequence) :] == sequence


@pytest.mark.parametrize(("seed", "options"), [(0, {}), (1, {"min_new": 5}), (2, {"frequency": True}), (3, {})])
def test_rounds_equal_a_loop_over_lists(seed, options):
    rng = np.random.default_rng(seed)
    rows = make_rows(rng, **options)
    plain = [PlainRow(rows, index) for index in range(B)]
    while not all(row.done for row in plain):
        num_drafted = rng.integers(0, K + 1, B)
        num_accepted, tokens = rng.integers(0, num_drafted + 1), rng.integers(0, V, (B, K + 1))
        rows = run_commit(rows, jnp.asarray(tokens), jnp.asarray(num_accepted), jnp.asarray(num_drafted), LOGITS, None)
        for row, *round_of_row in zip(plain, tokens.tolist(), num_accepted, num_drafted, strict=True):
            row.commit(*round_of_row)
        for index, row in enumerate(plain):
            length = int(rows.length[index])
            assert rows.tokens[index, :length].tolist() == row.text and length == len(row.text)
            assert rows.origin[index, :length].tolist() == row.origin
            assert (bool(rows.done[index]), bool(rows.stopped[index])) == (row.done, row.stopped)
            assert int(rows.discarded[index]) == row.discarded and int(rows.rounds[index]) == row.num_rounds
            assert rows.proposed[index].tolist() == row.proposed and rows.accepted[index].tolist() == row.accepted
    assert rows.trunk.length.tolist() == [len(row.text) - 1 for row in plain]  # the newest token is pending
    assert any(row.stopped for row in plain)
    if options.get("frequency"):
        counts = [np.bincount(row.text[PROMPT + 1 :], minlength=V).tolist() for row in plain]
        assert rows.history.counts.tolist() == counts


def test_log_probabilities_are_those_of_the_unmodified_logits():
    rows = make_rows(np.random.default_rng(4))
    tokens = jnp.asarray(np.random.default_rng(5).integers(0, V, (B, K + 1)))
    after = run_commit(rows, tokens, jnp.full(B, K), None, LOGITS, None)
    expected = np.asarray(jax.nn.log_softmax(LOGITS))
    for index in range(B):
        new = range(int(after.length[index] - rows.length[index]))
        found = after.logprobs[index, PROMPT + 1 :]
        np.testing.assert_allclose(found[: len(new)], [expected[index, i, tokens[index, i]] for i in new], rtol=1e-5)


def test_a_path_of_a_tree_moves_side_by_side():
    rows = make_rows(np.random.default_rng(6))
    path = jnp.asarray(np.tile([0, 2, 3, 6], (B, 1)))
    logits = jnp.zeros((B, 2 * K + 1, V))
    after = run_commit(rows, jnp.zeros((B, K + 1), jnp.int32), jnp.full(B, K), None, logits, path)
    assert after.drafter.tolist() == path.tolist()
    for leaf in jax.tree.leaves(after.trunk.layers):
        slots = np.asarray(leaf).reshape(B, -1, L, leaf.shape[-1])[:, 0, :, 0]
        # The tree began at the pending token's slot; slots before it and after the path keep what they had.
        moved = np.array([*range(PROMPT), *(PROMPT + np.array([0, 2, 3, 6])), *range(PROMPT + K + 1, L)])
        np.testing.assert_array_equal(slots, np.tile(moved, (B, 1)))
