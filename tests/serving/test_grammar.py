"""A text with a grammar matches it, and is the one that plain decoding with the same masks gives."""

import dataclasses
import itertools
import json
import queue
import time

import jax
import numpy as np
import pytest

pytest.importorskip("llguidance")
import tokenizers

from mtpjax import DecodeConfig, SamplingParams, compat, forward, shard_for_decoding
from mtpjax.data.tokenizer import ByteTokenizer, load_tokenizer
from mtpjax.decoding import session as programs
from mtpjax.decoding.logits import draw_target
from mtpjax.decoding.sampling import SamplingArrays, SamplingFeatures, distribution
from mtpjax.serving.engine import Engine
from mtpjax.serving.grammar import MAX_GRAMMAR_BYTES, Grammars, GrammarTooSlow
from mtpjax.serving.matcher import GrammarError, Matcher, num_words
from mtpjax.serving.request import Finish, Request
from mtpjax.serving.sizes import EngineSettings
from tests.helpers.engine_client import Client, check_idle

CONFIG = DecodeConfig(num_steps=2, prefill_chunk=8)
GRAMMARS = Grammars(ByteTokenizer(), 256)
SETTINGS = EngineSettings(num_slots=4, max_length=96, page_size=8, batch_sizes=(4,), prefill_tokens=16)
SMALL_POOL = dataclasses.replace(SETTINGS, num_pages=19)  # less than two of the longest texts need
MAX_LENGTH = 96
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def engines(small):
    """`engines(attention, quality, settings, **config)` -> a running engine, its model and parameters."""
    made = {}

    def make(attention="grouped", quality="mixed", settings=SETTINGS, **changes):
        key = (attention, quality, settings, tuple(changes.items()))
        if key not in made:
            model, params = small(attention, quality, vocab_size=256)
            config = dataclasses.replace(CONFIG, **changes)
            engine = Engine(params, model=model, config=config, settings=settings, grammars=GRAMMARS)
            if not changes:  # the others compile what they use
                engine.warm_up()
            engine.start()
            made[key] = engine, model, params
        return made[key]

    yield make
    for engine, _, _ in made.values():
        assert engine.close(timeout=30)


# Grammars, and texts that match them.


def random_schema(rng, depth=2):
    """A schema whose texts have a bounded length."""
    kinds = ["integer", "boolean", "string", "enum", "nullable"] + ["object", "array"] * (depth > 0)
    match kinds[rng.integers(len(kinds))]:
        case "integer":
            low = int(rng.integers(-50, 50))
            return {"type": "integer", "minimum": low, "maximum": low + int(rng.integers(0, 200))}
        case "boolean":
            return {"type": "boolean"}
        case "string":
            return {"type": "string", "pattern": f"^[a-z]{{{rng.integers(0, 5)}}}$"}
        case "enum":
            return {"enum": [["x", 5, None, "Prüfung", 1.5][index] for index in rng.permutation(5)[:3]]}
        case "nullable":
            return {"anyOf": [{"type": "null"}, random_schema(rng, 0)]}
        case "array":
            return {"type": "array", "items": random_schema(rng, depth - 1), "minItems": 1, "maxItems": 2}
        case _:
            names = [f"p{index}" for index in range(rng.integers(1, 3))]
            properties = {name: random_schema(rng, depth - 1) for name in names}
            return {"type": "object", "properties": properties, "required": names[:1], "additionalProperties": False}


def is_valid(schema, value):
    """Returns whether a value matches a schema of `random_schema`."""
    if "enum" in schema:
        return value in schema["enum"]
    if "anyOf" in schema:
        return any(is_valid(option, value) for option in schema["anyOf"])
    match schema["type"]:
        case "null":
            return value is None
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "boolean":
            return type(value) is bool
        case "string":
            length = int(schema["pattern"].strip("^[a-z]{}$"))
            return isinstance(value, str) and len(value) == length and all("a" <= char <= "z" for char in value)
        case "array":
            return isinstance(value, list) and 1 <= len(value) <= 2 and all(is_valid(schema["items"], v) for v in value)
    properties = schema["properties"]
    is_object = isinstance(value, dict) and set(schema["required"]) <= set(value) <= set(properties)
    return is_object and all(is_valid(properties[name], part) for name, part in value.items())


def compact(schema):
    """Compiles a schema without whitespace, of which a model without sense might write any amount."""
    return GRAMMARS.compile("json_schema", json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}}))


def request_of(grammar, prompt=(72, 105), **fields):
    return Request(**{"prompt": prompt, "max_new_tokens": 60, "stop_token_ids": (0,), "grammar": grammar, **fields})


def random_requests(seed, count, **fields):
    """Requests with random schemas, and the schemas."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        schema = random_schema(rng)
        prompt = tuple(rng.integers(1, 256, rng.integers(1, 20)).tolist())
        sampling = SamplingParams(temperature=1.0 * (number % 2), seed=number, top_p=0.9 if number % 4 == 1 else 1.0)
        yield schema, request_of(compact(schema), prompt, sampling=sampling, **fields)


def allowed_tokens(matcher, pending):
    masks = np.zeros((1, num_words(256)), np.int32)
    matcher.fill_masks(masks, [pending])
    return np.unpackbits(masks[0].view(np.uint8), bitorder="little").astype(bool)


def plain_text(params, model, request):
    """The plain Python twin: a forward pass, a mask and a draw per token."""
    text, matcher = list(request.prompt), request.grammar.start()
    sampling = SamplingArrays.greedy(1, 256, SamplingFeatures(top_p=True)).replace(
        temperature=np.full(1, request.sampling.temperature, np.float32),
        top_p=np.full(1, request.sampling.top_p, np.float32),
        seed=np.array([divmod(request.sampling.seed or 0, 2**32)], np.uint32),
    )
    for _ in range(min(request.max_new_tokens, MAX_LENGTH - len(text))):
        padded = np.array([text + [0] * (MAX_LENGTH - len(text))])
        logits = np.asarray(forward(params, padded, model=model).logits[0, len(text) - 1], np.float32)
        logits = np.where(allowed_tokens(matcher, text[-1]), logits, -np.inf)[None, None]
        token = int(draw_target(distribution(logits, sampling), sampling, np.array([[len(text)]]))[0, 0])
        text.append(token)
        if token in request.stop_token_ids:
            break
        matcher.consume([token])
    return text[len(request.prompt) :]


def check_text(schema, tokens, finish):
    """Checks a text that ended by itself against its schema."""
    assert finish.reason == "stop" and tokens[-1] == 0, (finish, tokens)
    value = json.loads(bytes(tokens[:-1]).decode())
    assert is_valid(schema, value), (schema, value)


# The engine.


@pytest.mark.parametrize(
    ("attention", "changes"),
    [
        ("grouped", {"acceptance": "sample"}),
        pytest.param("latent", {"acceptance": "sample"}, marks=slow),
        pytest.param("hybrid", {"acceptance": "sample"}, marks=slow),
        pytest.param("latent", {"acceptance": "sample", "topk": 2, "num_draft_tokens": 5}, marks=slow),
        pytest.param("grouped", {"acceptance": "sample", "drafter": "lookup"}, marks=slow),
    ],
)
def test_texts_match_their_schema_and_equal_plain_decoding_with_masks(engines, attention, changes):
    engine, model, params = engines(attention, settings=SMALL_POOL, **changes)
    pairs = list(random_requests(0, 12))
    results = Client(engine).run([request for _, request in pairs])
    for (schema, request), (tokens, _, finish) in zip(pairs, results, strict=True):
        check_text(schema, tokens, finish)
        assert tokens == plain_text(params, model, request), schema


@slow
@pytest.mark.parametrize("changes", [{}, {"acceptance": "token"}])
def test_rules_that_compare_p_with_q_give_valid_texts_and_exact_greedy_ones(engines, changes):
    engine, model, params = engines(**changes)
    pairs = list(random_requests(1, 24))
    results = Client(engine).run([request for _, request in pairs])
    for (schema, request), (tokens, _, finish) in zip(pairs, results, strict=True):
        check_text(schema, tokens, finish)
        if not request.sampling.temperature:
            assert tokens == plain_text(params, model, request)


@slow
def test_ratio_rules_draw_from_the_masked_distribution(engines):
    engine, model, params = engines()
    grammar, num_texts = GRAMMARS.compile("regex", "[a-c]{3}"), 1000
    sampling = [SamplingParams(temperature=2.0, seed=seed) for seed in range(num_texts)]
    results = Client(engine).run([request_of(grammar, sampling=each) for each in sampling])
    counts = {text: 0 for text in itertools.product(b"abc", repeat=3)}
    for tokens, _, _ in results:
        counts[tuple(tokens[:-1])] += 1
    # The exact probability of each text: products of softmaxes over the three letters.
    expected = {}
    for text in counts:
        logits = np.asarray(forward(params, np.array([[72, 105, *text]]), model=model).logits[0], np.float64) / 2
        steps = [logits[1 + step, list(b"abc")] for step in range(3)]
        shares = [np.exp(step - step.max()) / np.exp(step - step.max()).sum() for step in steps]
        expected[text] = num_texts * np.prod([share[token - 97] for share, token in zip(shares, text, strict=True)])
    assert sum(expected.values()) == pytest.approx(num_texts)
    distance = sum((counts[text] - expected[text]) ** 2 / expected[text] for text in counts)
    assert distance < 54  # chi-square with 26 degrees of freedom: 0.1 % are above


def test_drafts_that_the_grammar_allows_are_accepted(engines):
    engine, model, params = engines(quality="right", num_steps=2)
    request = request_of(GRAMMARS.compile("regex", r"(?s)[\x01-\x7f]*"), (72, 105), max_new_tokens=40)
    tokens, _, finish = Client(engine).run([request])[0]
    assert tokens == plain_text(params, model, request)
    assert sum(finish.accepted) > 0 and finish.num_steps < len(tokens) - 1


@slow
def test_no_draft_is_accepted_that_the_grammar_forbids(engines):
    # The drafter knows capital letters only.
    engine, model, params = engines(draft_vocabulary=tuple(range(65, 91)))
    request = request_of(GRAMMARS.compile("regex", "[a-z]{30}"))
    tokens, _, finish = Client(engine).run([request])[0]
    assert tokens == plain_text(params, model, request) and len(tokens) == 31
    assert finish.num_steps == 30 and sum(finish.proposed) == 60 and sum(finish.accepted) == 0


@slow
def test_rows_with_and_without_grammars_leave_each_other_unchanged(engines):
    engine, *_ = engines()
    client, rng = Client(engine), np.random.default_rng(2)
    prompts = [tuple(rng.integers(1, 256, rng.integers(1, 25)).tolist()) for _ in range(12)]
    free = [
        Request(prompt=prompt, max_new_tokens=30, sampling=SamplingParams(temperature=index % 2, seed=index))
        for index, prompt in enumerate(prompts)
    ]
    bound = [request for _, request in random_requests(3, 12, logprobs=True)]
    apart = client.run(free) + client.run(bound)
    mixed = client.run(list(itertools.chain(*zip(free, bound, strict=True))))
    for (tokens, logprobs, finish), other in zip(apart, mixed[::2] + mixed[1::2], strict=True):
        assert (tokens, finish.reason) == (other[0], other[2].reason)
        np.testing.assert_allclose(logprobs, other[1], atol=1e-4)
    check_idle(engine)


@pytest.mark.slow
def test_log_probabilities_are_those_of_the_trunk_without_masks(engines):
    engine, model, params = engines()
    request = request_of(compact({"enum": ["abc", "abd", "x"]}), logprobs=True)
    tokens, logprobs, _ = Client(engine).run([request])[0]
    logits = forward(params, np.array([[*request.prompt, *tokens]]), model=model).logits[0]
    expected = jax.nn.log_softmax(logits)[np.arange(1, 1 + len(tokens)), np.array(tokens)]
    np.testing.assert_allclose(logprobs, expected, atol=1e-4)


@slow
def test_preemption_and_shared_beginnings_change_no_text(engines):
    engine, model, params = engines(settings=SMALL_POOL, acceptance="sample")
    prefix = tuple(np.random.default_rng(4).integers(1, 256, 27).tolist())
    grammar = compact({"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 12, "maxItems": 14})
    requests = [
        request_of(grammar, (*prefix, index), sampling=SamplingParams(temperature=index % 2, seed=index))
        for index in range(1, 13)
    ]
    before = engine.status()
    for request, (tokens, _, _) in zip(requests, Client(engine).run(requests), strict=True):
        assert tokens == plain_text(params, model, request)
    assert engine.status().num_preempted > before.num_preempted
    assert engine.status().num_cached_tokens > before.num_cached_tokens


def test_an_aborted_text_frees_its_slot(engines):
    engine, model, params = engines()
    client = Client(engine)
    long = request_of(GRAMMARS.compile("regex", "[a-z]{80}"), max_new_tokens=90)
    submitted = [client.submit(long) for _ in range(6)]
    submitted[0][1].get(timeout=60)
    for request_id, _ in submitted:
        engine.abort(request_id)
    assert {client.finish(each)[2].reason for each in submitted} <= {"abort", "stop"}
    check_idle(engine)
    request = next(request for _, request in random_requests(5, 1))
    assert client.run([request])[0][0] == plain_text(params, model, request)


def test_limits_and_stop_sequences_end_a_text_early(engines):
    engine, *_ = engines()
    grammar = GRAMMARS.compile("regex", "[a-z]{9}=[0-9]+")
    cut, stopped = Client(engine).run(
        [request_of(grammar, max_new_tokens=5), request_of(grammar, stop_sequences=((ord("="),),))]
    )
    assert len(cut[0]) == 5 and cut[2].reason == "length"
    assert stopped[0][-1] == ord("=") and len(stopped[0]) == 10 and stopped[2].reason == "stop"


def test_a_grammar_that_fails_ends_its_request_alone(engines, monkeypatch):
    engine, *_ = engines()
    fill, client = Matcher.fill_masks, Client(engine)
    failing = GRAMMARS.compile("regex", "[a-z]{70}")

    def fail(self, masks, tokens, parents=None):
        if "7" in chr(tokens[0]):
            raise GrammarError("the grammar failed: too complex")
        fill(self, masks, tokens, parents)

    monkeypatch.setattr(Matcher, "fill_masks", fail)
    other = next(request for _, request in random_requests(6, 1))
    other = dataclasses.replace(other, grammar=failing, max_new_tokens=20)
    bad = request_of(GRAMMARS.compile("regex", "[a-z]{5}7[a-z]{9}"), max_new_tokens=20)
    results = client.run([other, bad, other])
    assert results[1][2].reason == "invalid" and "too complex" in results[1][2].message
    monkeypatch.undo()
    assert results[0][0] == results[2][0] == client.run([other])[0][0]
    check_idle(engine)


@slow
def test_a_row_that_becomes_nan_fails_alone(small):
    model, params = small("grouped", "mixed", vocab_size=256)
    broken = {**params, "embedding": params["embedding"].at[200].set(np.nan)}
    config = dataclasses.replace(CONFIG, draft_vocabulary=tuple(range(128)))
    engine = Engine(broken, model=model, config=config, settings=SETTINGS, grammars=GRAMMARS)
    engine.start()
    grammar = GRAMMARS.compile("regex", "[a-z]{9}")
    results = Client(engine).run([request_of(grammar, prompt) for prompt in ((65, 66), (65, 200), (67,))])
    assert [finish.reason for _, _, finish in results] == ["stop", "error", "stop"]
    assert engine.close(timeout=30)


@slow
def test_a_mesh_changes_no_text(small):
    model, params = small("grouped", "mixed", vocab_size=256)
    mesh = compat.make_mesh({"data": 2, "tensor": 2})
    parts = shard_for_decoding(model, params, mesh)
    engine = Engine(parts[1], model=parts[0], config=CONFIG, settings=SETTINGS, grammars=GRAMMARS)
    engine.warm_up()
    engine.start()
    pairs = list(random_requests(7, 12))
    for (schema, request), (tokens, _, finish) in zip(
        pairs, Client(engine).run([request for _, request in pairs]), strict=True
    ):
        check_text(schema, tokens, finish)
        if not request.sampling.temperature:
            assert tokens == plain_text(params, model, request)
    check_idle(engine)
    assert engine.close(timeout=30)


def test_rows_without_grammars_run_programs_without_masks(engines, monkeypatch):
    engine, *_ = engines()
    # The tick in which the last request of another test ended may go on.
    while engine.busy_since is not None:
        time.sleep(0.01)
    calls = []
    run = engine._executor.session.run
    monkeypatch.setattr(engine._executor.session, "run", lambda call: calls.append(call) or run(call))
    free = Request(prompt=(1, 2), max_new_tokens=9)
    client = Client(engine)
    client.run([free])
    assert {call.program for call in calls} == {programs.admit, programs.prefill_chunk, programs.advance}
    assert all(call.arrays[1].allowed is None for call in calls if call.program is programs.prefill_chunk)
    assert all(len(call.arrays) == 2 for call in calls if call.program is programs.advance)  # rows and rounds
    calls.clear()
    client.run([request_of(GRAMMARS.compile("regex", "[a-z]{9}"))])
    assert programs.advance not in {call.program for call in calls}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop_token_ids": ()}, "ends with the end token"),
        ({"sampling": SamplingParams(min_new_tokens=3)}, "a grammar cannot be combined with min_new_tokens"),
        ({"sampling": SamplingParams(banned_tokens=(97,))}, "a grammar cannot be combined with"),
    ],
)
def test_options_that_contradict_a_grammar_are_refused(engines, fields, message):
    engine, *_ = engines()
    with pytest.raises(ValueError, match=message):
        engine.submit(request_of(GRAMMARS.compile("regex", "a"), **fields), print)


@pytest.mark.parametrize(
    ("grammars", "changes", "message"),
    [
        (None, {}, "started without grammars"),
        (GRAMMARS, {"acceptance": "threshold"}, "may accept tokens that the grammar forbids"),
    ],
)
def test_an_engine_that_cannot_keep_to_a_grammar_refuses_it(small, grammars, changes, message):
    model, params = small("grouped", "mixed", vocab_size=256)
    config = dataclasses.replace(CONFIG, **changes)
    engine = Engine(params, model=model, config=config, settings=SETTINGS, grammars=grammars)
    events = queue.Queue()
    with pytest.raises(ValueError, match=message):
        engine.submit(request_of(GRAMMARS.compile("regex", "a")), events.put)
    engine.start()
    assert engine.close(timeout=30) and not any(isinstance(event, Finish) for event in events.queue)


# Compiling, and masks.


@pytest.mark.parametrize(
    ("kind", "source", "message"),
    [
        ("regex", "(", "unclosed group"),
        ("regex", "a\\", "incomplete escape"),
        ("regex", "a" * (MAX_GRAMMAR_BYTES + 1), "more than 65536 bytes"),
        ("json_schema", "{", "is invalid"),
        ("json_schema", "5", "must be an object"),
        ("json_schema", '{"type": "bogus"}', "Invalid type: bogus"),
        ("json_schema", '{"type": NaN}', "is invalid"),
        ("json_schema", '{"not": {}}', 'Unimplemented keys: ["not"]'),
        ("json_schema", '{"$ref": "file:///etc/passwd"}', "does not fetch"),
        ("json_schema", '{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}', "the grammar failed"),
        ("json_schema", '{"items": ' * 70 + "true" + "}" * 70, "nested more than 64 deep"),
        ("json_schema", '{"multipleOf": 999983}', "least common multiple"),
        ("json_schema", '{"allOf": [{"multipleOf": 9.973}, {"multipleOf": 9967}]}', "least common multiple"),
    ],
)
def test_a_wrong_grammar_is_refused_in_one_line(kind, source, message):
    with pytest.raises(GrammarError) as error:
        GRAMMARS.compile(kind, source)
    assert message in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 300


def test_a_limit_of_alternatives_is_told_with_its_numbers_and_no_mask_stays_open():
    properties = {f"p{index}": {"type": "integer"} for index in range(600)}
    grammar = GRAMMARS.compile("json_schema", json.dumps({"type": "object", "properties": properties}))
    message = "it allows 24.. alternatives at one point, more than 2000; an object has about four for each"
    with pytest.raises(GrammarError, match=message):
        grammar.start().consume(b"{")
    # A draft reaches the limit before the text does.
    masks = np.full((2, num_words(256)), -1, np.int32)
    with pytest.raises(GrammarError, match=message):
        grammar.start().fill_masks(masks, [0, ord("{")])


def test_a_schema_that_takes_minutes_is_stopped():
    # 1.9 kB; each pair of patterns is compared.
    schema = {"allOf": [{"type": "string", "pattern": f"a{index}"} for index in range(50)]}
    begin = time.process_time()
    with pytest.raises(GrammarTooSlow, match=r"the grammar takes more than 0\.2 seconds to compile"):
        GRAMMARS.compile("json_schema", json.dumps(schema), seconds=0.2)
    assert time.process_time() - begin < 5
    assert GRAMMARS.compile("regex", "[a-z]").first_mask.any()


def test_masks_of_a_tree_follow_the_parents():
    matcher = compact({"enum": ["ab", "cd", "ce"]}).start()
    matcher.consume(b'"')
    #         root a    c    b    x    e    after x
    tokens = [34, 97, 99, 98, 120, 101, 97]
    masks = np.full((7, num_words(256)), -1, np.int32)
    matcher.fill_masks(masks, tokens, [-1, 0, 0, 1, 2, 2, 4])
    allowed = [np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist() for row in masks]
    assert [bytes(each) for each in allowed[:4]] == [b"ac", b"b", b"de", b'"'] and bytes(allowed[5]) == b'"'
    assert len(allowed[4]) == len(allowed[6]) == 256  # forbidden nodes
    # The matcher is where it was.
    assert np.flatnonzero(allowed_tokens(matcher, 34)).tolist() == list(b"ac")


def test_only_the_end_token_follows_a_complete_text():
    matcher = compact({"enum": [12]}).start()
    matcher.consume(b"12")
    assert np.flatnonzero(allowed_tokens(matcher, 50)).tolist() == [0]


def test_a_tokenizer_of_merged_tokens_and_several_end_tokens(tmp_path):
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate([*alphabet, "ab"])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[("a", "b")]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<eos>", "<end>"])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"eos_token_id": [257, 258]}')
    tokenizer = load_tokenizer(tmp_path, 300)
    grammars = Grammars(tokenizer, 300)
    merged = tokenizer.encode("ab")
    assert len(merged) == 1
    matcher, masks = grammars.compile("regex", "xab").start(), np.zeros((3, num_words(300)), np.int32)
    matcher.fill_masks(masks, [0, *tokenizer.encode("x"), *merged])
    allowed = [np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist() for row in masks]
    # llguidance allows only the encoder's own tokens of a text that has no alternative.
    assert allowed[0] == tokenizer.encode("x") and set(merged) <= set(allowed[1]) <= {*merged, *tokenizer.encode("a")}
    assert allowed[2] == [257, 258] == sorted(tokenizer.eos_token_ids)
