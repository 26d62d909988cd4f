"""What is wrong with a grammar is said in the words of who wrote it."""

import json
import time

import pytest

pytest.importorskip("llguidance")

from mtpjax.serving.matcher import explain

from mtpjax.data.tokenizer import ByteTokenizer
from mtpjax.serving.grammar import GrammarError, Grammars
from mtpjax.serving.grammar_checks import checked_schema, find_ref_loop

GRAMMARS = Grammars(ByteTokenizer(), 256)
TO_A, TO_B = {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}


def schema(a, b=True, **root):
    return {**(root or TO_A), "$defs": {"a": a, "b": b}}


@pytest.mark.parametrize(
    "source, loop",
    [
        ({"$ref": "#"}, "# -> #"),
        ({"$id": "http://example/x", "$ref": "http://example/x#"}, "http://example/x# -> http://example/x#"),
        ({"$anchor": "here", "$ref": "#here"}, "#here -> #here"),
        (schema(TO_A), "#/$defs/a -> #/$defs/a"),
        (schema(TO_B, TO_A), "#/$defs/a -> #/$defs/b -> #/$defs/a"),
        (schema(TO_B, TO_B), "#/$defs/b -> #/$defs/b"),
        (schema({"$ref": "#/$defs/a", "type": "string"}), "#/$defs/a -> #/$defs/a"),
        (schema({"allOf": [{"type": "object"}, TO_A]}), "#/$defs/a -> #/$defs/a"),
        (schema({"anyOf": [TO_A, TO_B]}, TO_A), "#/$defs/a -> #/$defs/a"),
        # llguidance alone accepts these two: the property can never be written, without a word.
        (schema(TO_B, TO_A, properties={"x": TO_A}), "#/$defs/a -> #/$defs/b -> #/$defs/a"),
        (schema(TO_A, items=TO_A), "#/$defs/a -> #/$defs/a"),
        ({"definitions": {"a b/~": {"$ref": "#/definitions/a%20b~1~0"}}, "$ref": "#/definitions/a b~1~0"}, "a%20b"),
    ],
)
def test_a_loop_of_references_is_named(source, loop):
    with pytest.raises(GrammarError, match=r"the \$ref loop .* refers only to itself") as error:
        GRAMMARS.compile("json_schema", json.dumps(source))
    assert loop in str(error.value) and "NoExtension" not in str(error.value)


@pytest.mark.parametrize(
    "source, text",
    [
        ({"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}, '{"next": {}}'),
        ({"type": "array", "items": {"$ref": "#"}}, "[[], [[]]]"),
        (schema({"type": "object", "properties": {"children": {"type": "array", "items": TO_A}}}), '{"children": []}'),
        (schema({"anyOf": [TO_A, {"type": "integer"}]}), "7"),
        (schema(TO_B, {"type": "integer"}), "7"),
        (schema(TO_A, type="integer"), "7"),  # nothing uses the loop
        ({"properties": {"$ref": {"type": "integer"}}, "required": ["$ref"]}, '{"$ref": 7}'),
        ({"const": {"$ref": "#"}}, '{"$ref": "#"}'),
    ],
)
def test_a_schema_may_contain_itself(source, text):
    matcher = GRAMMARS.compile("json_schema", json.dumps(source)).start()
    matcher.consume(list(text.encode()))


def test_a_long_chain_of_references_is_followed_in_no_time():
    count = 1500
    chain = {f"a{index}": {"$ref": f"#/$defs/a{index + 1}"} for index in range(count)}
    for ending in ({"type": "string"}, {"$ref": "#/$defs/a0"}):
        for entries in (chain, dict(reversed(chain.items()))):
            source = {
                "$defs": {**entries, f"a{count}": ending},
                "allOf": [{"$ref": f"#/$defs/{name}"} for name in entries],
            }
            start = time.process_time()
            assert bool(find_ref_loop(source)) == ("$ref" in ending)
            assert time.process_time() - start < 2


def test_references_that_name_nothing_are_left_to_the_compiler():
    for ref in ("#/$defs/none", "#/type/0", "#none", "other.json", "#/allOf/x"):
        source = json.dumps({"type": "string", "allOf": [{"$ref": ref}]})
        assert json.loads(checked_schema(source)) == json.loads(source)
        with pytest.raises(GrammarError, match="does not compile"):
            GRAMMARS.compile("json_schema", source)


@pytest.mark.parametrize(
    "kind, source, message",
    [
        ("regex", "(", "the grammar does not compile: regex parse error: ( ^ error: unclosed group"),
        ("regex", "a$b", "^, $ and \\b are not supported"),
        ("regex", r"[^\s\S]", "no text of the model's tokens matches it"),
        ("json_schema", '{"oneOf": [{"type": "string"}, {"minLength": 2}]}', "oneOf is not supported here: use anyOf"),
    ],
)
def test_messages_have_no_internal_words(kind, source, message):
    with pytest.raises(GrammarError) as error:
        GRAMMARS.compile(kind, source)
    assert message in str(error.value)
    for word in ("NoExtension", "coerce", "non-verbose", "start: /", "lookarounds"):
        assert word not in str(error.value)


def test_other_messages_are_kept_in_one_line():
    assert explain("a\n  b <non-verbose/>") == "a b"
