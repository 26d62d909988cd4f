"""The engine on a mesh: the tokens of one device, with slots and pages in every part of `data`."""

import dataclasses

import pytest

from mtpjax import DecodeConfig, compat
from mtpjax.models.params import shard_for_decoding
from mtpjax.serving.engine import Engine
from mtpjax.serving.sizes import EngineSettings
from tests.serving.test_engine import Client, alone, check_idle, random_requests

CONFIG = DecodeConfig(num_steps=2, prefill_chunk=8)
# One program of each kind: compiling for eight devices takes long.
SETTINGS = EngineSettings(num_slots=4, max_length=64, page_size=8, num_pages=20, batch_sizes=(2,), prefill_tokens=16)


@pytest.mark.parametrize(
    ("attention", "sizes"),
    [
        pytest.param("grouped", {"data": 2, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param("grouped", {"tensor": 2}, marks=pytest.mark.slow),  # rows are not split
        pytest.param("latent", {"data": 2, "expert": 2, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param("hybrid", {"data": 2, "tensor": 2}, marks=pytest.mark.slow),
    ],
)
def test_an_engine_on_a_mesh_gives_the_tokens_of_one_device(small, attention, sizes):
    model, params = small(attention, vocab_size=64)
    mesh = compat.make_mesh(sizes)
    mesh_model, mesh_params = shard_for_decoding(model, params, mesh)
    settings = dataclasses.replace(SETTINGS, batch_sizes=(4 // sizes.get("data", 1),))
    engine = Engine(mesh_params, model=mesh_model, config=CONFIG, settings=settings)
    engine.warm_up()
    engine.start()
    requests = list(random_requests(8, 16, prompt_length=(1, 12), new_tokens=(1, 26), prefixes=[list(range(18))]))
    expected = [alone(params, model, request, CONFIG, 64)[::2] for request in requests]
    # The second time, each part has seen the common beginning.
    for _ in range(2):
        before = engine.status().num_cached_tokens
        results = Client(engine).run(requests)
        assert [(tokens, finish.reason) for tokens, _, finish in results] == expected
    assert engine.status().num_cached_tokens > before
    check_idle(engine)
    assert engine.close(timeout=30)
