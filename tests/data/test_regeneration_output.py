"""The manifest beside a regenerated file."""

import json

import pytest

from mtpjax.data.regeneration_output import manifest_path, open_output


@pytest.mark.parametrize("missing", ["sha256", "bytes"])
def test_a_manifest_without_a_digest_or_a_size_is_damaged(tmp_path, missing):
    path = tmp_path / "answers.jsonl"
    with open_output(path, {"seed": 0}, "jsonl") as output:
        output.append([{"text": "a"}])
    manifest = json.loads(manifest_path(path).read_text())
    del manifest["written"][missing]
    manifest_path(path).write_text(json.dumps(manifest))
    with (
        pytest.raises(ValueError, match=r"answers\.jsonl\.about\.json is damaged"),
        open_output(path, {"seed": 0}, "jsonl"),
    ):
        pass
