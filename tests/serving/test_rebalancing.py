"""Experts that are placed anew while an engine runs: when, by which counts, and without a change of any text."""

import logging
import types

import jax
import numpy as np
import pytest

from mtpjax import DecodeConfig, compat
from mtpjax.models.expert_counts import count_expert_tokens
from mtpjax.models.expert_placement import Placement, place_all_layers
from mtpjax.models.params import shard_for_decoding
from mtpjax.serving.engine import Engine
from mtpjax.serving.rebalancing import ExpertRebalancer
from mtpjax.serving.sizes import EngineSettings
from tests.helpers.engine_client import Client, check_idle
from tests.serving.test_engine import alone, random_requests

CONFIG = DecodeConfig(num_steps=2, prefill_chunk=8)
SETTINGS = EngineSettings(
    num_slots=4,
    max_length=64,
    page_size=8,
    num_pages=20,
    batch_sizes=(4,),
    prefill_tokens=16,
    rebalance_experts_every=16,
)


class FakeExecutor:
    """Two layers of four experts in six slots of two devices; texts are counted as `counts` says."""

    count_shape = 1, 2, 4
    num_expert_devices = 2

    def __init__(self):
        self.counts = np.zeros((2, 4), np.int32)
        self.counted, self.moved = [], []

    def expert_placements(self):
        return {layer: np.array([0, 1, 2, 0, 1, 3], np.int32) for layer in ("layer_1", "layer_2")}

    def count_experts(self, tokens, lengths):
        self.counted.append([row[:length].tolist() for row, length in zip(tokens[0], lengths[0], strict=True)])
        return self.counts

    def move_experts(self, layer, expert_of_slot):
        self.moved.append((layer, sorted(expert_of_slot.tolist())))


def text(tokens, *, has_ended=False):
    return types.SimpleNamespace(text=list(tokens), num_kept=0, has_ended=has_ended)


def test_the_newest_rows_of_texts_are_counted_once():
    executor = FakeExecutor()
    rebalancer = ExpertRebalancer(executor, every=1)
    rebalancer.tick()
    assert executor.counted == []  # there is no text yet
    running = text(range(5))
    rebalancer.add(running)
    rebalancer.tick()
    assert executor.counted.pop() == [[0, 1, 2, 3], []]
    running.text += [5, 6]
    rebalancer.add(running)
    rebalancer.tick()
    assert executor.counted == []  # no whole row
    running.text += [7, 8]
    running.has_ended = True
    rebalancer.add(running)
    rebalancer.tick()
    assert executor.counted.pop() == [[4, 5, 6, 7], [8]]
    # A block has room for two rows.
    rebalancer.add(text(range(20, 34), has_ended=True))
    rebalancer.tick()
    assert executor.counted.pop() == [[28, 29, 30, 31], [32, 33]]


def test_one_layer_is_placed_per_tick_and_only_if_it_gains(caplog):
    caplog.set_level(logging.INFO)
    executor = FakeExecutor()
    rebalancer = ExpertRebalancer(executor, every=16)
    # Experts 2 and 3 get most tokens in the first layer. The second one is even already.
    executor.counts = np.array([[5, 5, 40, 50], [60, 60, 30, 30]], np.int32)
    for _ in range(16):
        rebalancer.add(text(range(4)))
        rebalancer.tick()
    assert len(executor.counted) == 8 and not executor.moved and np.isnan(rebalancer.imbalance).all()
    rebalancer.tick()
    # The copies are those of the experts that are chosen most.
    assert executor.moved == [("layer_1", [0, 1, 2, 2, 3, 3])] and rebalancer.num_rebalancings == 0
    rebalancer.tick()
    assert len(executor.moved) == 1 and rebalancer.num_rebalancings == 1
    # The devices had 45 and 55 tokens of the first layer, and have 90 each of the second.
    assert rebalancer.imbalance == pytest.approx((np.mean([1.1, 1]), 1))
    assert "of 1 of 2 layers: the busiest device had 1.05 times the mean load, now 1.00" in caplog.text
    # Texts that stay the same move nothing, and without new texts nothing is done.
    for number in range(40):
        rebalancer.add(text(range(4) if number < 14 else ()))
        rebalancer.tick()
    assert len(executor.moved) == 1 and rebalancer.num_rebalancings == 1
    assert rebalancer.imbalance == pytest.approx((1, 1)) and not rebalancer._counts


@pytest.fixture(scope="module")
def skewed(small):
    """A model with two layers of experts whose routers prefer two of eight."""
    model, params = small("latent", "mixed", num_hidden_layers=3, vocab_size=64)
    trunk = dict(params["trunk"])
    for layer in ("layer_1", "layer_2"):
        experts = trunk[layer]["experts"]
        bias = experts["correction_bias"].at[:2].add(0.6)
        trunk[layer] = {**trunk[layer], "experts": {**experts, "correction_bias": bias}}
    return model, {**params, "trunk": trunk}


def on_mesh(model, params, sizes):
    mesh = compat.make_mesh(sizes)
    return shard_for_decoding(model, place_all_layers(params, num_devices=mesh.size, num_redundant=4), mesh)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"data": 2, "expert": 2}, {"expert": 4}])
def test_texts_do_not_change_while_experts_move(skewed, sizes, caplog):
    caplog.set_level(logging.INFO, "mtpjax.serving.rebalancing")
    model, params = skewed
    mesh_model, mesh_params = on_mesh(model, params, sizes)
    engine = Engine(mesh_params, model=mesh_model, config=CONFIG, settings=SETTINGS)
    before = engine._executor.expert_placements()
    engine.warm_up()
    engine.start()
    requests = list(random_requests(8, 16, prompt_length=(1, 12), new_tokens=(1, 26), prefixes=[list(range(18))]))
    expected = [alone(params, model, request, CONFIG, 64)[::2] for request in requests]
    for _ in range(3):
        results = Client(engine).run(requests)
        assert [(tokens, finish.reason) for tokens, _, finish in results] == expected
    check_idle(engine)  # nothing was compiled
    assert engine.close(timeout=30)
    status = engine.status()
    assert status.num_rebalancings >= 2
    assert caplog.records[-1].args[2:] == status.expert_imbalance
    # The first placement counts all experts the same; the last one fits the texts, of which the engine counted some.
    texts = [[*request.prompt, *tokens] for request, (tokens, _) in zip(requests, expected, strict=True)]
    counts = [count_expert_tokens(params, np.array([text]), model=model) for text in texts]
    for layer, after in engine._executor.expert_placements().items():
        total = sum(each[layer] for each in counts)
        found = [
            Placement.measured(slots, total, engine._executor.num_expert_devices).imbalance
            for slots in (before[layer], after)
        ]
        print(layer, found)
        assert found[0] > 1.2 and found[1] < 1 + 0.6 * (found[0] - 1)
    # The memory does not hold the experts twice.
    assert mesh_params["trunk"]["layer_1"]["experts"]["down"].is_deleted()


def test_what_cannot_be_rebalanced_is_refused(small, skewed):
    model, params = skewed
    for some_model, some_params, message in (
        (*small("grouped"), "no routed experts"),
        (model, params, "use a mesh that splits them over data or expert"),
        (*shard_for_decoding(model, params, compat.make_mesh({"expert": 2})), "only after `place_all_layers`"),
    ):
        with pytest.raises(ValueError, match=message):
            Engine(some_params, model=some_model, config=CONFIG, settings=SETTINGS)


@pytest.mark.slow
def test_the_other_processes_move_and_count_what_process_0_does(skewed):
    """Two executors in one process, one after the other."""
    from mtpjax.serving.multihost.follower import FollowerExecutor
    from mtpjax.serving.multihost.leader import LeaderExecutor

    sent = []
    arguments = {"config": CONFIG, "settings": SETTINGS}
    model, params = on_mesh(*skewed, {"expert": 2})
    copy = jax.tree.map(lambda leaf: leaf.copy(), params)
    followers = types.SimpleNamespace(send=sent.append)
    leader = LeaderExecutor(params, model=model, followers=followers, **arguments)
    follower = FollowerExecutor(copy, model=model, **arguments)
    tokens = np.arange(32, dtype=np.int32).reshape(1, 4, 8)
    counts = np.asarray(leader.count_experts(tokens, np.array([[8, 5, 0, 1]], np.int32)))
    np.testing.assert_array_equal(counts.sum(axis=1), 2 * 14)
    slots = np.array([1, 2, 3, 4, 5, 6, 7, 0, 0, 1, 0, 1], np.int32)
    leader.move_experts("layer_2", slots)
    assert len(sent) == 2
    for body in sent:
        follower.run(body)
    for executor in (leader, follower):
        np.testing.assert_array_equal(executor.expert_placements()["layer_2"], slots)
    for own, other in zip(*(jax.tree.leaves(each.params) for each in (leader, follower)), strict=True):
        np.testing.assert_array_equal(own, other)
