"""Hostile values for JSON texts."""

import json
import random

ESCAPE = "\x1b[2J\x1b]0;title\x07"
# JSON texts that replace a value. Long ones repeat a pattern, so that a report stays readable.
JSON_VALUES = (
    *(
        "null",
        "true",
        "false",
        "-1",
        "0",
        "1",
        "1.5",
        "1000000",
        "2147483648",
        "9223372036854775808",
        "1e308",
        "-1e400",
    ),
    *("NaN", '""', '"x"', '"../../../outside"', '"/dev/zero"', "[]", "{}", '[1, "a", null]', '{"a": {"b": 1}}'),
    json.dumps(ESCAPE),
    json.dumps("long" * 100_000),
    "[" * 2000 + "]" * 2000,
    '{"a":' * 2000 + "1" + "}" * 2000,
    "9" * 5000,
)


def change_json(text: str, rng: random.Random) -> tuple[str, str]:
    """Replaces, removes or repeats one value in a JSON text.

    Args:
        text: an object or list.
        rng: the source of randomness.

    Returns:
        The changed text, which need not be valid JSON, and what was done.
    """
    # A unique word marks the place, so that it can be replaced by text that is not JSON or too deeply nested to write.
    value, mark = json.loads(text), "@@here@@"
    parent, key, place = value, None, "$"
    while True:
        if not isinstance(parent, (dict, list)) or not parent:
            break
        key = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        place += f".{key}"
        if not isinstance(parent[key], (dict, list)) or not parent[key] or rng.random() < 0.3:
            break
        parent = parent[key]
    how = rng.choice(["value"] * 8 + ["remove", "repeat", "truncate"])
    if how == "truncate" or key is None:
        return text[: rng.randrange(len(text))], "truncated"
    if how == "remove":
        del parent[key]
        return json.dumps(value), f"{place} removed"
    if how == "repeat" and isinstance(parent, dict):
        return text.rstrip()[:-1] + f", {json.dumps(str(key))}: 1}}", f"{key} twice"
    new = rng.choice(JSON_VALUES)
    parent[key] = mark
    return json.dumps(value).replace(f'"{mark}"', new, 1), f"{place} = {new[:40]!a}"
