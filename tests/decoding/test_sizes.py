"""The sizes of caches: the longest text fits, with what a round writes after it, in `generate` and in the engine."""

import dataclasses

import numpy as np
import pytest

from mtpjax import DecodeConfig, MTPModel, generate, speculative_generate
from mtpjax.decoding.decoder import Decoder
from mtpjax.inference.requests import make_drafter
from mtpjax.serving.engine import Engine
from mtpjax.serving.memory import choose_num_pages
from mtpjax.serving.request import Request
from mtpjax.serving.sizes import EngineSettings, resolve_sizes
from tests.helpers.engine_client import Client
from tests.helpers.small_models import small_config

WIDE_TREE = {"num_steps": 4, "topk": 10, "num_draft_tokens": 120}


def random_config(random):
    """Any chain or tree, rule, minimum of rows and chunk."""
    num_steps, topk = int(random.integers(0, 6)), int(random.choice([1, 1, 2, 4, 8]))
    shape = {"num_steps": num_steps}
    if num_steps and topk > 1:
        most = topk + (num_steps - 1) * topk**2
        shape |= {"topk": topk, "num_draft_tokens": int(random.integers(2, most + 2))}
    rules = ["auto", "sample"] if num_steps else ["auto"]
    return DecodeConfig(
        **shape,
        acceptance=str(random.choice(rules)),
        min_rows=int(random.choice([1, 2, 40])),
        prefill_chunk=int(random.choice([4, 24, 64])),
        drafter="lookup" if num_steps and topk == 1 and random.integers(3) == 0 else "mtp",
    )


@pytest.mark.parametrize("seed", range(60))
def test_the_longest_text_fits(seed):
    random = np.random.default_rng(seed)
    config = random_config(random)
    modules = 1 if config.topk > 1 else int(random.integers(1, 4))
    model = MTPModel(small_config("grouped", num_mtp_modules=modules, max_position_embeddings=4096))
    drafter, max_length = make_drafter(config), int(random.integers(2, 3000))
    prompt, is_greedy = int(random.integers(1, max_length)), bool(random.integers(2))
    # 1. One call: whole chunks of the prompt, and a round that starts at the full length.
    sizes = {"batch": 1, "max_length": max_length, "longest_prompt": prompt, "is_greedy": is_greedy}
    decoder = Decoder.make(config, drafter, model, None, **sizes)
    num_chunks = -(-prompt // decoder.spec.prefill_chunk)
    written = max(num_chunks * decoder.spec.prefill_chunk, max_length + decoder.slots_per_round)
    assert written <= decoder.capacity(max_length, prompt) <= 1.25 * (written + decoder.spec.prefill_chunk) + 256
    # 2. The engine: a chunk or a round that starts at the full length, for rows under the rule and for greedy rows.
    settings = EngineSettings(
        num_slots=int(random.integers(1, 9)), page_size=int(random.choice([1, 4, 16, 100])), max_length=max_length,
        prefill_tokens=int(random.choice([4, 100])),
    )  # fmt: skip
    sizes = resolve_sizes(settings, config, drafter, model, None, limit=4096)
    decoder = sizes.decoder
    num_slots = max(decoder.slots_per_round, decoder.for_plain_rows().slots_per_round)
    assert sizes.capacity >= max_length + max(num_slots, decoder.spec.prefill_chunk)
    assert sizes.shard_pages >= settings.num_slots * sizes.max_pages
    assert sizes.max_pages * settings.page_size >= max_length + num_slots + drafter.max_shift(model)
    # 3. Pages and texts are inverse.
    num_pages = sizes.max_pages
    assert decoder.num_pages_of(decoder.max_length_of(num_pages)) == num_pages
    assert decoder.max_length_of(num_pages) >= max_length


@pytest.mark.parametrize(
    "shape",
    [
        {"num_steps": 3, "min_rows": 64},
        pytest.param(WIDE_TREE, marks=pytest.mark.slow),
        pytest.param({"num_steps": 2, "prefill_chunk": 24}, marks=pytest.mark.slow),
    ],
)
def test_a_text_that_fills_its_caches_is_plain_decoding(shape, small):
    """The capacity is 256 or 384 slots: texts end at the last ones, where a write past the end would move back."""
    model, params = small("grouped", "mixed", max_position_embeddings=512)
    config = DecodeConfig(max_new_tokens=30, prefill_chunk=16)
    for length in (150, 187, 224):
        prompt = [[7 * place % 60 + 1 for place in range(length)]]
        wanted = generate(params, prompt, model=model, config=config).rows()
        drafted = dataclasses.replace(config, **shape)
        assert speculative_generate(params, prompt, model=model, config=drafted).rows() == wanted


@pytest.mark.slow
def test_the_pool_of_a_server_has_room_for_the_longest_text_and_a_wide_tree(small):
    """The pool had room for a fixed 64 positions after a text, of which a round of this tree writes more."""
    model, params = small("grouped", "mixed", max_position_embeddings=128)
    config = DecodeConfig(prefill_chunk=16, **WIDE_TREE)
    settings = EngineSettings(num_slots=1, page_size=4, max_length=100)
    num_pages = choose_num_pages(params, model, config, settings, 0.9)
    engine = Engine(params, model=model, config=config, settings=dataclasses.replace(settings, num_pages=num_pages))
    assert num_pages * settings.page_size >= 100 + config.num_nodes
    engine.start()
    request = Request(prompt=tuple(range(1, 41)), max_new_tokens=60)
    [(tokens, *_)] = Client(engine).run([request])
    plain = DecodeConfig(max_new_tokens=60, prefill_chunk=16)
    assert tokens == generate(params, [list(request.prompt)], model=model, config=plain).rows()[0]
    assert engine.close(timeout=30)
