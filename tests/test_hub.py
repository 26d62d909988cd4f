"""Names of repositories in the place of paths, against a local endpoint."""

import contextlib
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys

import huggingface_hub
import jax
import numpy as np
import pytest

import mtpjax
from mtpjax import hub as names
from mtpjax.cli.main import main
from mtpjax.data.tokenizer import load_tokenizer
from mtpjax.errors import CheckpointError
from mtpjax.io.checkpoint_format import find_checkpoint
from mtpjax.training.config import TrainConfig
from mtpjax.training.run_sizes import compute_run_sizes
from tests import golden
from tests.helpers.chatml import save_tokenizer
from tests.helpers.checkpoints import drop_modules
from tests.helpers.hub_server import TOKEN, serve_hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that this process asks, with an empty cache and without a token."""
    names._download.cache_clear()
    with serve_hub() as hub:
        # The package reads its environment variables when it is imported.
        constants = importlib.import_module("huggingface_hub.constants")
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub
        huggingface_hub.close_session()
    names._download.cache_clear()


@pytest.fixture
def repository(hub, tmp_path):
    """`org/small` with a checkpoint, a tokenizer, and much that is not needed."""
    folder = tmp_path / "published"
    shutil.copytree(golden.path("qwen3"), folder)
    save_tokenizer(folder)
    for other in ("pytorch_model.bin", "consolidated.safetensors", "README.md", "original/params.json", "expected.npz"):
        (folder / other).parent.mkdir(exist_ok=True)
        (folder / other).write_bytes(b"not needed")
    hub.add("org/small", folder)
    return folder


def run(arguments):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return end.value.code


def test_a_name_loads_as_its_folder_does(repository, hub):
    model, params = mtpjax.load("org/small")
    expected_model, expected = mtpjax.load(repository)
    assert model.config == expected_model.config
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    # Nothing but what a checkpoint consists of was downloaded.
    weights = {path.name for path in repository.glob("model-*.safetensors")}
    small = {"config.json", "generation_config.json", "chat_template.jinja", "tokenizer.json"}
    assert set(hub.downloaded) == weights | small | {"model.safetensors.index.json"}


def test_a_command_asks_once_and_the_cache_serves_the_next(repository, hub, monkeypatch):
    found = find_checkpoint("org/small")
    count = hub.num_requests
    assert find_checkpoint("org/small") == found and hub.num_requests == count
    # Another process, without a network: the cache has everything.
    names._download.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert find_checkpoint("org/small") == found and hub.num_requests == count


def test_a_revision_is_a_branch_a_tag_or_a_commit(repository, hub, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(golden.path("glm4_moe"), other)
    commit = hub.add("org/small", other, revision="release/v2")
    for revision in ("release/v2", commit):
        assert mtpjax.load(f"org/small@{revision}")[0].config.n_routed_experts == 12
    assert mtpjax.load("org/small")[0].config.n_routed_experts == 0


def test_an_existing_path_wins(repository, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(golden.path("glm4_moe"), tmp_path / "org" / "small")
    assert mtpjax.load("org/small")[0].config.n_routed_experts == 12
    assert not hub.num_requests


@pytest.mark.parametrize(
    "path", ["./org/small", "/org/small", "org", "org/small/extra", "../org/small", "org/model.gguf", "org/a..b/c"]
)
def test_other_paths_are_never_looked_up(path, hub):
    with pytest.raises(CheckpointError, match=f"^{re.escape(path)} does not exist"):
        find_checkpoint(path)
    assert not hub.num_requests


@pytest.mark.parametrize("is_online", [True, False])
def test_a_wrong_path_that_looks_like_a_name_is_first_said_not_to_exist(is_online, hub, tmp_path, monkeypatch):
    """Everywhere where a model or a drafter is given, and with the names that its folder holds."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", not is_online)
    monkeypatch.chdir(tmp_path)
    for name in ("quickstart", "other", ".hidden"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "text.txt").write_text("text to train on\n" * 400)
    model, prompt = ["--model-path", "runs/quickstrat"], ["--prompt", "x"]
    output = ["--output-dir", "out"]
    for command in (
        ["generate", *model, *prompt],
        ["serve", *model],
        ["eval", "acceptance", *model, "--prompts", "text.txt"],
        ["profile", *model],
        ["ablate", *model, "--output", "out"],
        ["inspect", model[1]],
        ["convert", model[1], "out"],
        ["export-mtp", "--input-dir", model[1], *output],
        ["merge-mtp", "--input-dir", model[1], "--mtp-dir", model[1], *output],
        ["vocabulary", *model, "--data", "text.txt", "--size", "9", "--output", "out"],
        ["regenerate", *model, "--data", "text.txt", "--output", "out.jsonl"],
        ["train", f"init_from={model[1]}", "data=text.txt", "output=out"],
    ):
        error = run_and_read(command)
        said = rf"^mtpjax {command[0]}: runs/quickstrat does not exist; its folder contains quickstart and 1 more\. "
        assert re.search(said, error) and error.count("\n") == 1, (command, error)


def test_a_wrong_path_of_a_drafter_is_first_said_not_to_exist(hub, checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = run_and_read(
        ["generate", "--model", str(checkpoint), "--prompt", "x", "--speculative-draft-model-path", "runs/nope"]
    )
    assert error.startswith("mtpjax generate: runs/nope does not exist. http") and error.count("\n") == 1


def run_and_read(command):
    with contextlib.redirect_stderr(io.StringIO()) as error:
        assert run(command) == 3
    # The hub of the test runs in this process, and reports connections that the client closes.
    return "".join(line for line in error.getvalue().splitlines(keepends=True) if line.startswith("mtpjax"))


def test_the_tokenizer_alone_leaves_the_weights(repository, hub):
    assert load_tokenizer("org/small", 320).digest == load_tokenizer(repository, 320).digest
    assert not [name for name in hub.downloaded if name.endswith(".safetensors")]


def test_commands_take_a_name(repository, hub, capsys, tmp_path):
    arguments = ["--prompt", "hello", "--max-new-tokens", "3", "--num-steps", "0"]
    assert run(["generate", "--model-path", "org/small", *arguments]) == 0
    assert "3 tokens" in capsys.readouterr().err
    assert run(["inspect", "org/small"]) == 0
    assert run(["convert", "org/small", str(tmp_path / "ours")]) == 0
    assert run(["convert", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    for file in (tmp_path / "back").glob("*.safetensors"):
        assert file.read_bytes() == (repository / file.name).read_bytes()


def test_modules_are_merged_from_one_repository_into_another(hub, tmp_path):
    hub.add("org/original", golden.path("glm4_moe"))
    hub.add("me/tuned", drop_modules(golden.path("glm4_moe"), tmp_path / "tuned"))
    merge = ["merge-mtp", "--input-dir", "me/tuned", "--mtp-dir", "org/original", "--output-dir", str(tmp_path / "out")]
    assert run(merge) == 0
    assert run(["export-mtp", "--input-dir", "org/original", "--output-dir", str(tmp_path / "mtp")]) == 0
    hub.add("me/modules", tmp_path / "mtp")
    merge[4:8] = ["me/modules", "--output-dir", str(tmp_path / "again")]
    assert run(merge) == 0
    merged, expected = (mtpjax.load(path)[1] for path in (tmp_path / "again", golden.path("glm4_moe")))
    jax.tree.map(np.testing.assert_array_equal, merged, expected)


def test_training_begins_from_a_name(repository, hub, tmp_path):
    (tmp_path / "text.txt").write_text("Some text to train on, line after line.\n" * 400)
    config = TrainConfig(
        init_from="org/small", data=str(tmp_path / "text.txt"), output=str(tmp_path / "run"), row_length=32
    )
    assert compute_run_sizes(config)["parameters"] > 0
    # A tokenizer of its own may be a repository too.
    hub.add("org/tokenizer", repository)
    names._download.cache_clear()
    compute_run_sizes(TrainConfig(**{**vars(config), "tokenizer": "org/tokenizer"}))


def test_checkpoints_of_ours_are_downloaded_whole(hub, checkpoint):
    hub.add("me/trained", checkpoint)
    params, expected = mtpjax.load("me/trained")[1], mtpjax.load(checkpoint)[1]
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_a_gguf_file_of_a_repository(hub, tmp_path):
    pytest.importorskip("gguf", reason="needs the extra gguf")
    from tests.helpers.gguf_checkpoints import write_gguf

    (tmp_path / "files" / "quants").mkdir(parents=True)
    write_gguf(golden.path("glm4_moe"), tmp_path / "files" / "quants" / "model.F32.gguf")
    (tmp_path / "files" / "other.gguf").write_bytes(b"not needed")
    hub.add("org/small-GGUF", tmp_path / "files")
    params, expected = mtpjax.load("org/small-GGUF/quants/model.F32.gguf")[1], mtpjax.load(golden.path("glm4_moe"))[1]
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert hub.downloaded == ["quants/model.F32.gguf"]
    with pytest.raises(CheckpointError, match=r"use org/small-GGUF/FILE\.gguf for a GGUF file"):
        mtpjax.load("org/small-GGUF")
    with pytest.raises(CheckpointError, match=r"org/small-GGUF has no file absent\.gguf"):
        mtpjax.load("org/small-GGUF/absent.gguf")


def test_what_is_missing_is_one_plain_line(repository, hub, monkeypatch):
    for name, message in [
        ("org/absent", "^org/absent does not exist\\. .* has no such repository either, or it is private"),
        ("org/small@v9", "org/small has no revision 'v9'"),
    ]:
        with pytest.raises(CheckpointError, match=message) as error:
            mtpjax.load(name)
        assert "\n" not in str(error.value)
    # Offline, and nothing of it in the cache; then without anyone at the endpoint.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"HF_HUB_OFFLINE is set, and the cache .* does not contain"):
        mtpjax.load("org/small")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match=r"127\.0\.0\.1:9 cannot be reached \(ConnectError\)"):
        mtpjax.load("org/small")


def test_gated_and_private_repositories_need_a_token(repository, hub, monkeypatch):
    hub.gated.add("org/small")
    with pytest.raises(
        CheckpointError, match=r"org/small is gated: accept its terms at .*/org/small, and set HF_TOKEN"
    ):
        mtpjax.load("org/small")
    hub.add("org/secret", repository)
    hub.private.add("org/secret")
    with pytest.raises(CheckpointError, match="it is private: if so, set HF_TOKEN"):
        mtpjax.load("org/secret")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name in ("org/small", "org/secret"):
        assert mtpjax.load(name)[0].config.hidden_size


def test_a_damaged_index_is_the_loaders_error(repository, hub):
    (repository / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": 3, "b": "../up"}}))
    with pytest.raises(CheckpointError, match="which is not the name of a file in the directory"):
        mtpjax.load("org/small")


def test_a_single_file_beside_an_index_of_others_is_refused_as_in_a_folder(repository, hub):
    (repository / "model.safetensors").write_bytes((repository / "model-00001-of-00003.safetensors").read_bytes())
    for name in ("org/small", repository):
        with pytest.raises(CheckpointError, match=r"which (names|lists) .*: only one of the two is the checkpoint"):
            mtpjax.load(name)
    assert not [file for file in hub.downloaded if file.endswith(".safetensors")]


def test_an_index_of_too_many_files_is_rejected(repository, hub):
    weight_map = {str(number): f"{number}.safetensors" for number in range(names.MAX_SHARDS + 1)}
    (repository / names.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="lists 10001 files; at most 10000"):
        mtpjax.load("org/small")


@pytest.mark.slow
def test_the_environment_variables_of_the_package_hold(repository, hub, tmp_path):
    """In a process of its own, as a user has it: endpoint, home and token from the environment."""
    hub.private.add("org/small")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN}
    command = [sys.executable, "-m", "mtpjax.cli.main", "inspect", "org/small"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "qwen3" in done.stdout, done.stderr
    done = subprocess.run(command, env=environment | {"HF_HUB_OFFLINE": "1"}, capture_output=True, check=False)
    assert done.returncode == 0
    environment["HF_HOME"] = str(tmp_path / "empty")
    done = subprocess.run(
        command, env=environment | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3 and len(done.stderr.strip().splitlines()) == 1, done.stderr
