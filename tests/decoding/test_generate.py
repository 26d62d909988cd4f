"""What callers hand in and get back."""

import dataclasses

import numpy as np
import pytest

from mtpjax import (
    DecodeConfig,
    MTPModel,
    SamplingParams,
    generate,
    speculative_generate,
)
from mtpjax.decoding.capacity import round_down_capacity, round_up_capacity
from mtpjax.decoding.decoder import make_spec
from mtpjax.decoding.result import DecodeStats, GenerationResult

PROMPTS = [[1, 2, 3], [4], [5, 6]]
CONFIG = DecodeConfig(max_new_tokens=9, num_steps=2, prefill_chunk=8)


@pytest.fixture(scope="module")
def result(small):
    """Of a drafter that is right: the text runs through one cycle of the vocabulary."""
    model, params = small("grouped", "right")
    stop = generate(params, PROMPTS, model=model, config=CONFIG).rows()[1][4]
    config = dataclasses.replace(CONFIG, stop_token_ids=(stop,))
    return speculative_generate(params, PROMPTS, model=model, config=config)


def test_tokens_come_with_zeros_behind_each_end(result):
    assert result.tokens.shape == (3, result.lengths.max())
    for row, (tokens, length) in enumerate(zip(result.tokens, result.lengths, strict=True)):
        assert result.rows()[row] == tokens[:length].tolist() and not tokens[length:].any()


def test_a_row_ends_with_its_stop_token_or_at_its_limit(result):
    assert result.lengths[1] == 5 and result.finish_reasons[1] == "stop"
    for length, reason in zip(result.lengths, result.finish_reasons, strict=True):
        assert reason == ("stop" if length < 9 else "length")


def test_origins_name_the_draft_level_of_each_token(result):
    # The prefill's token, then rounds of two accepted drafts and the trunk's own token.
    assert result.origins[1].tolist()[:5] == [0, 1, 2, 0, 1]


def test_counts_agree_with_each_other(result):
    stats = result.stats
    stats.check()
    assert (stats.emitted == result.lengths).all()
    assert (stats.emitted + stats.discarded == 1 + stats.rounds + stats.accepted.sum(axis=1)).all()
    assert stats.accept_length == pytest.approx(1 + stats.survival_rates.sum()) == 3
    assert stats.conditional_rates.tolist() == [1, 1]
    assert stats.discarded[1] == 2  # the stop stands first in the second round


def test_counts_that_contradict_each_other_are_refused(result):
    for name in ("rounds", "emitted", "proposed", "accepted"):
        wrong = dataclasses.replace(result.stats, **{name: getattr(result.stats, name) + 1})
        with pytest.raises(AssertionError):
            wrong.check()


def test_rates_of_known_counts():
    counts = {"rounds": [4, 6], "proposed": [[4, 4], [6, 6]], "accepted": [[3, 1], [2, 1]], "discarded": [0, 0]}
    stats = DecodeStats(**{name: np.array(value) for name, value in counts.items()}, emitted=np.array([9, 10]))
    stats.check()
    assert stats.accept_length == 1.7
    assert stats.survival_rates.tolist() == [0.5, 0.2] and stats.conditional_rates.tolist() == [0.5, 0.4]


def test_no_step_gives_no_accept_length():
    none = np.zeros(1, int)
    stats = DecodeStats(none, np.zeros((1, 2), int), np.zeros((1, 2), int), none, none + 1)
    stats.check()
    assert np.isnan(stats.accept_length) and not stats.conditional_rates.any()


def test_plain_decoding_proposes_nothing(small):
    model, params = small("grouped", "right")
    result = generate(params, PROMPTS, model=model, config=CONFIG)
    result.stats.check()
    assert result.stats.accept_length == 1.0 and result.stats.proposed.shape == (3, 0)
    assert isinstance(result, GenerationResult) and not result.origins.any()


def test_padded_arrays_and_lists_are_the_same_prompts(small):
    model, params = small("grouped", "right")
    padded = np.array([[1, 2, 3], [4, 60, 60], [5, 6, 60]])
    found = generate(params, padded, lengths=np.array([3, 1, 2]), model=model, config=CONFIG)
    assert found.rows() == generate(params, PROMPTS, model=model, config=CONFIG).rows()


def test_max_length_ends_a_row(small):
    model, params = small("grouped", "right")
    config = dataclasses.replace(CONFIG, max_length=6)
    result = speculative_generate(params, PROMPTS, model=model, config=config)
    assert result.lengths.tolist() == [3, 5, 4] and result.finish_reasons == ("length",) * 3


@pytest.mark.parametrize("num_steps", [0, 3])
def test_padding_rows_change_no_token(num_steps, small):
    """`min_rows` is what a batch of one gets on a GPU."""
    model, params = small("grouped", "mixed", num_mtp_modules=2)
    config = DecodeConfig(max_new_tokens=20, num_steps=num_steps, min_rows=2, prefill_chunk=8)
    wanted = generate(params, [[7, 8]], model=model, config=dataclasses.replace(config, min_rows=None)).rows()
    result = speculative_generate(params, [[7, 8]], model=model, config=config)
    result.stats.check()
    assert result.rows() == wanted


@pytest.mark.parametrize("drafter", [None, "mtp", "lookup"])
def test_the_cache_has_room_for_the_padding_of_wide_passes(drafter, small):
    """A write after the last slot would move back over committed entries: 250 tokens in 256 slots, 64 written."""
    model, params = small("grouped", "mixed", max_position_embeddings=512)
    prompt = [[7 * place % 60 + 1 for place in range(190)]]
    config = DecodeConfig(max_new_tokens=60, num_steps=2 if drafter else 0, drafter=drafter or "mtp")
    wanted = generate(params, prompt, model=model, config=config).rows()
    wide = dataclasses.replace(config, min_rows=64)
    assert speculative_generate(params, prompt, model=model, config=wide).rows() == wanted


@pytest.mark.parametrize("rule", ["recursive", "traversal"])
def test_rows_at_temperature_0_among_sampled_ones_are_plain_decoding(rule, small):
    model, params = small("grouped", "mixed")
    config = DecodeConfig(max_new_tokens=20, num_steps=3, topk=2, num_draft_tokens=8, acceptance=rule, prefill_chunk=8)
    sampling = SamplingParams(temperature=(0.0, 0.7, 0.0), seed=(1, 2, 3))
    result = speculative_generate(params, PROMPTS, model=model, config=config, sampling=sampling)
    result.stats.check()
    assert result.is_exact and result.stats.accepted.sum(axis=0).all()
    wanted = generate(params, PROMPTS, model=model, config=config).rows()
    assert result.rows()[::2] == wanted[::2]


@pytest.mark.parametrize(("rule", "on_a_chain"), [("recursive", "token"), ("traversal", "block")])
def test_on_a_chain_a_tree_rule_is_the_chains(rule, on_a_chain):
    """`test_acceptance.py` has the proof."""
    tree, chain = (
        make_spec(DecodeConfig(num_steps=3, acceptance=acceptance), is_greedy=False)
        for acceptance in (rule, on_a_chain)
    )
    assert tree == chain


@pytest.mark.parametrize("size", [1, 127, 128, 129, 1000, 1023, 1024, 1025, 5000, 100_000])
def test_a_bucket_holds_its_size_and_little_more(size):
    assert size <= round_up_capacity(size) <= max(256, size * 1.25, 128 + size // 128 * 128)
    assert round_up_capacity(round_up_capacity(size)) == round_up_capacity(size) and round_up_capacity(size) % 128 == 0


def test_the_bucket_below_a_size_is_the_largest_that_fits():
    for size in (*range(1, 3000), 10_791, 40_377, 454_593):
        below = round_down_capacity(size)
        assert below <= size and (not below or round_up_capacity(below) == below)
        assert round_up_capacity(below + 1) > size


def test_buckets_are_few():
    assert len({round_up_capacity(size) for size in range(1, 100_000)}) < 50


BAD = [  # prompts, keywords, what the message names
    ([], {}, "empty"),
    ([[1], []], {}, "prompt 1 is empty"),
    (np.zeros((2, 0), int), {}, "prompt 0 is empty"),
    ([[1, 61]], {}, "61, outside 0..60"),
    ([[1], [-3]], {}, "prompt 1 holds token id -3, outside 0..60"),
    ([[1] * 300], {}, "300 tokens; max_length 256"),
    ([[1] * 8], {"max_length": 8}, "8 tokens; max_length 8"),
    ([[1]], {"max_length": 257}, "257 exceeds the model's 256"),
    ([[1]], {"stop_token_ids": (61,)}, "61 is outside 0..60"),
    ([[1]], {"stop_token_ids": (-1,)}, "-1 is outside 0..60"),
    ([[1.5]], {}, "float64"),
    ([[[1]]], {}, "shape"),
    (["text"], {}, "encode each text with mtpjax.load_tokenizer(path).encode(text)"),
    ("text", {}, "not text: encode each text with mtpjax.load_tokenizer"),
    ([1, 2], {}, "list of token lists"),
    (np.zeros(3, int), {}, "(3,)"),
    (np.zeros((2, 3, 4), int), {}, "(2, 3, 4)"),
    (np.zeros((2, 3), int), {"lengths": np.array([1, 2, 3])}, "lengths has shape (3,), but there are 2 prompts"),
    (np.zeros((2, 3), int), {"lengths": np.array([1, 4])}, "4 exceeds the 3"),
    (np.zeros((2, 3), int), {"lengths": np.array([1, 0])}, "prompt 1 is empty"),
    (np.zeros((2, 3), int), {"lengths": np.array([1, -2])}, "prompt 1 is empty"),
    ([[1]], {"lengths": np.array([1])}, "not with a list"),
]


@pytest.mark.parametrize(("prompts", "keywords", "named"), BAD)
def test_bad_input_is_one_line_that_names_it(prompts, keywords, named, small):
    model, params = small("grouped", "right")
    lengths = keywords.get("lengths")
    config = dataclasses.replace(CONFIG, **{name: value for name, value in keywords.items() if name != "lengths"})
    for decoder in (generate, speculative_generate):
        with pytest.raises(ValueError) as raised:
            decoder(params, prompts, model=model, config=config, lengths=lengths)
        assert named in str(raised.value) and "\n" not in str(raised.value)


def test_drafting_without_modules_is_refused(small):
    model, params = small("grouped", num_mtp_modules=0)
    with pytest.raises(ValueError, match="needs at least one MTP module"):
        speculative_generate(params, PROMPTS, model=model, config=CONFIG)


def test_decoding_with_stacked_layers_is_refused(small):
    model, params = small()
    with pytest.raises(ValueError, match="unstack_layers"):
        generate(params, PROMPTS, model=MTPModel(model.config, scan_layers=True), config=CONFIG)


@pytest.mark.parametrize(
    "attention",
    [
        pytest.param("grouped", marks=pytest.mark.slow),
        "latent",
        pytest.param("hybrid", marks=pytest.mark.slow),
        pytest.param("sparse", marks=pytest.mark.slow),
    ],
)
def test_speculation_with_interpreted_kernels_equals_plain_decoding_by_xla(attention, small):
    model, params = small(attention, "mixed", num_mtp_modules=1)
    config = DecodeConfig(max_new_tokens=6, num_steps=2, prefill_chunk=32)
    prompts = [list(range(1, 45)), list(range(3, 30))]  # two chunks of prefill, the second only for one row
    wanted = generate(params, prompts, model=model, config=config).rows()
    interpreted = dataclasses.replace(config, implementation="interpreted")
    assert speculative_generate(params, prompts, model=model, config=interpreted).rows() == wanted


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["grouped", "latent"])
def test_deterministic_rows_have_the_same_bits_whatever_rows_are_beside_them(attention, small):
    model, params = small(attention, "mixed", num_mtp_modules=1)
    config = DecodeConfig(
        max_new_tokens=4, num_steps=2, implementation="interpreted", deterministic=True, logprobs=True
    )
    # Beside it: more rows than a tile, other lengths, and so another capacity.
    beside = [list(range(1, 45)), [7] * 9, *([row] * 3 for row in range(1, 6))]
    alone = speculative_generate(params, [[5, 9, 2]], model=model, config=config)
    first = speculative_generate(params, [[5, 9, 2], *beside], model=model, config=config)
    assert alone.rows()[0] == first.rows()[0]
    np.testing.assert_array_equal(alone.logprobs[0], first.logprobs[0])


def test_deterministic_settings_that_cannot_hold_are_refused(small):
    model, params = small("grouped", num_mtp_modules=1)
    config = DecodeConfig(max_new_tokens=4, num_steps=2, implementation="interpreted", deterministic=True)
    for changes, said in (
        ({"implementation": "auto"}, "needs the kernels on a GPU, but runs 'auto' on a cpu"),
        ({"implementation": "xla"}, "decode the rows one by one"),
        ({"num_steps": 16}, "at most 16 tokens per round, got 17"),
        ({"min_rows": 20}, "at most 16 tokens per round, got 20"),
        ({"prefill_chunk": 16}, "a prefill_chunk above 16, got 16"),
    ):
        with pytest.raises(ValueError, match=said):
            speculative_generate(params, [[1, 2]], model=model, config=dataclasses.replace(config, **changes))
    for attention, said in (("sparse", "a sparse indexer"), ("hybrid", "linear attention")):
        model, params = small(attention, num_mtp_modules=1)
        with pytest.raises(ValueError, match=f"deterministic decoding does not support {said}"):
            speculative_generate(params, [[1, 2]], model=model, config=config)
    with pytest.raises(ValueError, match="deterministic must be True or False, got 1"):
        DecodeConfig(deterministic=1)


def test_the_implementation_of_the_settings_replaces_the_models(small):
    model, params = small("grouped", num_mtp_modules=1)
    config = DecodeConfig(max_new_tokens=6, num_steps=1, prefill_chunk=8)
    # The kernels need a GPU, so their name must fail here.
    with pytest.raises(ValueError, match="interpret"):
        speculative_generate(
            params, [[1, 2, 3]], model=model, config=dataclasses.replace(config, implementation="triton")
        )
    with pytest.raises(ValueError, match="implementation 'cuda' is not one of auto, xla, triton, interpreted"):
        dataclasses.replace(config, implementation="cuda")
