"""Text of end tokens and of other added tokens in a grammar is text: no answer is cut off there and called complete."""

import json
import string

import numpy as np
import pytest

pytest.importorskip("llguidance")
import tokenizers
from mtpjax.serving.matcher import num_words
from tokenizers import decoders, models, normalizers, pre_tokenizers

from mtpjax.data.tokenizer import load_tokenizer
from mtpjax.serving.grammar import Grammars
from mtpjax.serving.grammar_vocabulary import MAX_FORCED_BYTES

SPECIAL, TEXT = ["<|im_end|>", "</s>", "<|pad|>"], ["<think>", "</think>", "<|User|>"]
V = 400


def byte_level():
    """Like Qwen3's: characters that stand for bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("i", "m"), ("im", "_"), ("e", "n"), ("en", "d"), ("im_", "end"), ("t", "h")]
    pieces = [*alphabet, *("".join(pair) for pair in merges)]
    made = tokenizers.Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.decoder = decoders.ByteLevel()
    return made


def byte_fallback():
    """Like Llama 2's: a space before each text, and the end token among the pieces."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *string.printable[:62], "▁a"]
    model = models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True,
    )  # fmt: skip
    made = tokenizers.Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def unigram():
    """Like T5's, with bytes: the pieces of special tokens are as likely as any other."""
    pieces = ["<unk>", "</s>", "<|im_end|>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *string.printable[:62]]
    made = tokenizers.Tokenizer(models.Unigram([(piece, 0.0) for piece in pieces], unk_id=0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


@pytest.fixture(scope="module", params=[byte_level, byte_fallback, unigram])
def tokenizer(request, tmp_path_factory):
    made, folder = request.param(), tmp_path_factory.mktemp("tokenizer")
    made.add_special_tokens(SPECIAL)
    made.add_tokens([tokenizers.AddedToken(text, special=False, normalized=False) for text in TEXT])
    made.save(str(folder / "tokenizer.json"))
    ends = [made.token_to_id(text) for text in ("<|im_end|>", "</s>", "<|User|>")]
    (folder / "config.json").write_text(json.dumps({"eos_token_id": ends}))
    return load_tokenizer(folder, V)


def allowed_tokens(mask):
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def finish(grammar, tokenizer, rng, max_tokens=300):
    """Draws one allowed token after the other until only an end token may follow; returns the text."""
    matcher, mask, tokens = grammar.start(), grammar.first_mask, []
    while True:
        token = int(rng.choice(allowed_tokens(mask)))
        if token in tokenizer.eos_token_ids:
            return tokenizer.decode(tokens)
        assert len(tokens) < max_tokens
        matcher.consume([token])
        tokens.append(token)
        masks = np.zeros((1, num_words(V)), np.int32)
        matcher.fill_masks(masks, [token])
        mask = masks[0]


def random_case(rng):
    """Returns a schema with the text of a token, and a function that checks a value."""
    mark = str(rng.choice(SPECIAL + TEXT))
    around = ["", "a b", "x", " ", "é\n", mark]
    text = str(rng.choice(around)) + mark + str(rng.choice(around))
    match rng.integers(5):
        case 0:
            return {"const": text}, lambda value: value == text
        case 1:
            return {"enum": [text, text + "z", mark]}, lambda value: value in (text, text + "z", mark)
        case 2:
            pattern = f"^[ab]{{0,2}}{mark.replace('|', '[|]')}[cd]?$"
            return {"type": "string", "pattern": pattern}, lambda value: value.strip("abcd") == mark
        case 3:
            schema = {"type": "object", "properties": {text: {"enum": [1, None]}}, "required": [text]}
            return {**schema, "additionalProperties": False}, lambda value: value in ({text: 1}, {text: None})
        case _:
            schema = {"type": "array", "items": {"const": text}, "minItems": 1, "maxItems": 3}
            return schema, lambda value: value in ([text], [text] * 2, [text] * 3)


def test_no_text_is_cut_off_at_the_text_of_a_token(tokenizer):
    grammars, rng = Grammars(tokenizer, V), np.random.default_rng(0)
    for _ in range(200):
        schema, is_valid = random_case(rng)
        source = json.dumps({**schema, "x-guidance": {"whitespace_flexible": False}})
        text = finish(grammars.compile("json_schema", source), tokenizer, rng)
        assert is_valid(json.loads(text)), (schema, text)


def test_thinking_before_json_uses_the_models_own_tokens(tokenizer):
    grammar = Grammars(tokenizer, V).compile("regex", r'<think>[a-c ]{2}</think>\{"a": [01]\}')
    matcher, thinking = grammar.start(), tokenizer.encode("<think>")[-1]
    assert allowed_tokens(grammar.first_mask) == [thinking]
    matcher.consume([thinking])
    text = finish(grammar, tokenizer, np.random.default_rng(1))
    assert text.startswith("<think>") and json.loads(text.partition("</think>")[2])["a"] in (0, 1)


def test_an_end_token_never_spells_text(tokenizer):
    # <|User|> is an end token here, though it is not special.
    for mark in (*SPECIAL, "<|User|>"):
        grammar = Grammars(tokenizer, V).compile("json_schema", json.dumps({"const": mark}))
        assert json.loads(finish(grammar, tokenizer, np.random.default_rng(2))) == mark


def test_a_long_text_without_alternative_is_encoded_part_by_part(tokenizer):
    text = "a the end " * (MAX_FORCED_BYTES // 10 + 4) + "é" * MAX_FORCED_BYTES
    grammar = Grammars(tokenizer, V).compile("json_schema", json.dumps({"const": text}))
    assert json.loads(finish(grammar, tokenizer, np.random.default_rng(3), 2000)) == text
