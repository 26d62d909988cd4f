"""A drafter of a user, in one file with its record: it trains, and drafts in `generate`, `serve` and `ablate`.

`package.module:RECORD` names it everywhere: here `tests.test_toy_drafter:TOY`.
"""

import dataclasses
import json
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conversion.tensor_slice import copied, linear
from mtpjax import load_drafter
from mtpjax.ablation.drafters import load_methods
from mtpjax.cli.main import main
from mtpjax.drafters import (
    DrafterFiles,
    DraftLevels,
    DraftLimits,
    DraftMethod,
    DraftParams,
    DraftTraining,
    TrainedDrafter,
    TrunkSizes,
)
from mtpjax.drafters.levels import draft_levels
from mtpjax.drafters.methods import METHODS
from mtpjax.drafters.scoring import DraftScores, ReducedHead, own_head
from mtpjax.io.checkpoint import load
from mtpjax.models.forward import shift_left
from mtpjax.models.model import multiply_head
from mtpjax.models.params import DRAFTER
from mtpjax.serving.request import Request
from tests.helpers import training_runs
from tests.helpers.engine_client import Client

TOY_NAME = "tests.test_toy_drafter:TOY"


@dataclasses.dataclass(frozen=True)
class ToyConfig:
    vocab_size: int
    hidden_size: int
    draft_vocab_size: int

    @property
    def trunk(self) -> TrunkSizes:
        return TrunkSizes(self.vocab_size, self.hidden_size, 0)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return ()


class PreparedToy(flax.struct.PyTreeNode):
    table: jax.Array
    head: ReducedHead


@dataclasses.dataclass(frozen=True)
class ToyDrafter(TrainedDrafter):
    """Guesses each token from the one before it: a table of vectors `[V, D]`, and a head `[D, R]`."""

    architecture: ToyConfig = dataclasses.field(kw_only=True)
    title: ClassVar[str] = "Toy"
    limits: ClassVar[DraftLimits] = dataclasses.replace(TrainedDrafter.limits, trees="Toy drafts chains only")

    def prepare(self, params, draft_params, *, model):
        network = draft_params.network
        head = own_head(params, (network["head"],), draft_params.draft_ids, model=model)
        return PreparedToy(network["table"].astype(params["embedding"].dtype), head)

    def propose(self, decoder, weights, state):
        def score(level, previous, path, carry):
            rows, head = weights.drafter.table[previous], weights.drafter.head
            return DraftScores(decoder, weights.params, state, head, rows, 0, path, level), carry

        return draft_levels(decoder, score, state), state

    def levels(self, params, rows, heads, *, model, num_levels):
        # Row i of level k drafts token i+k+1, from token i+k.
        inputs = tuple(params[DRAFTER]["table"][shift_left(rows.tokens, k)] for k in range(1, num_levels + 1))
        return DraftLevels(tuple(multiply_head(x, heads[0]) for x in inputs), inputs)


def init(config: ToyConfig, key: jax.Array) -> dict[str, Any]:
    table = jax.random.normal(key, (config.vocab_size, config.hidden_size))
    return {"table": table, "head": jnp.zeros((config.hidden_size, config.draft_vocab_size))}


def parse(values, shapes, trunk, reading):
    return ToyConfig(trunk.vocab_size, trunk.hidden_size, values["drafted"]), "toy"


def specs(config: ToyConfig, form: str):
    V, D, R = config.vocab_size, config.hidden_size, config.draft_vocab_size
    return {"table": copied("table.weight", V, D), "head": linear("lm_head.weight", D, R)}


TOY = DraftMethod(
    name="toy",
    title="Toy",
    drafter=ToyDrafter,
    default_levels=2,
    files=DrafterFiles(
        formats=("toy",), parse=parse, specs=specs, describe=lambda config, form: {"drafted": config.draft_vocab_size}
    ),
    training=DraftTraining(
        architecture=lambda settings, trunk, num_drafted: ToyConfig(trunk.vocab_size, trunk.hidden_size, num_drafted),
        init=init,
        settings_of=lambda config: {},
    ),
)


def run(capsys, *arguments):
    """Runs a command, which must succeed."""
    with pytest.raises(SystemExit) as ended:
        main([*map(str, arguments)])
    printed = capsys.readouterr()
    assert ended.value.code == 0, printed.err
    return printed


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return training_runs.write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def trained(checkpoint, corpus, tmp_path_factory):
    """The folder of a run of `mtpjax train` that trained the drafter, and what the command printed."""
    output = tmp_path_factory.mktemp("toy") / "run"
    settings = training_runs.SETTINGS | {"num_depths": 2, "steps": 12, "learning_rate": 0.01, "draft_vocab_size": 64}
    settings |= {"objective.mix.cross_entropy": 1.0}
    settings |= {"drafter": TOY_NAME, "init_from": checkpoint, "data": corpus, "output": output, "plot_formats": "[]"}
    with pytest.raises(SystemExit) as ended:
        main(["train", *(f"{name}={value}" for name, value in settings.items())])
    assert ended.value.code == 0
    return output


def test_the_toy_is_in_no_table():
    assert TOY not in METHODS


def test_train_writes_its_files_and_learns(trained, checkpoint):
    history = list(training_runs.read_losses(trained).values())
    assert history[-1][1] < history[0][1]  # of the first draft level; the trunk is frozen
    drafter, draft_params = load_drafter(trained, model=load(checkpoint)[0], method=TOY)
    assert drafter == ToyDrafter(architecture=ToyConfig(256, drafter.architecture.hidden_size, 64))
    assert isinstance(draft_params, DraftParams) and draft_params.draft_ids is not None
    assert np.any(draft_params.network["head"])


def test_train_continues_from_its_files(trained, checkpoint, corpus, tmp_path, capsys):
    settings = training_runs.SETTINGS | {"num_depths": 2, "steps": 1, "init_from": checkpoint, "data": corpus}
    settings |= {"drafter": TOY_NAME, "draft_init_from": trained, "output": tmp_path / "run", "plot_formats": "[]"}
    run(capsys, "train", *(f"{name}={value}" for name, value in settings.items()))


def test_generate_drafts_with_it(trained, checkpoint, capsys):
    flags = ["--prompt", "def f1(x):", "--max-new-tokens", "16", "--check", "--speculative-algorithm", TOY_NAME]
    printed = run(capsys, "generate", "--model", checkpoint, *flags, "--speculative-draft-model-path", trained)
    assert "identical to plain decoding: yes" in printed.err
    assert len(printed.err.split("accepted per level ")[1].split("\n")[0].split()) == TOY.default_levels


def test_serve_drafts_with_it(trained, checkpoint, capsys, monkeypatch):
    def serve(app, engine, *others, **more):
        tokenizer, api = app.state.server.tokenizer, app.state.server.settings
        prompt = tuple(tokenizer.encode("def f1(x):"))
        requests = [Request(prompt=prompt, max_new_tokens=12, speculative=drafts) for drafts in (True, False)]
        (drafted, _, finish), (plain, _, _) = Client(engine).run(requests)
        assert drafted == plain and sum(finish.proposed) > 0
        assert api.server_info["speculative_algorithm"] == TOY_NAME

    monkeypatch.setattr("mtpjax.serving.launch.serve", serve)
    sizes = ["--max-running-requests", "2", "--context-length", "64", "--precompile-bs-paddings", "2", "--port", "0"]
    flags = ["--speculative-algorithm", TOY_NAME, "--speculative-draft-model-path", trained, "--skip-server-warmup"]
    run(capsys, "serve", "--model-path", checkpoint, *sizes, *flags)


def test_ablate_measures_it(trained, checkpoint, tmp_path, capsys):
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text("".join(json.dumps({"prompt": f"def f{number}("}) + "\n" for number in range(2)))
    command = ["ablate", "--model", checkpoint, "--output", output, "--prompts", prompts, "--num-prompts", "2"]
    command += ["--drafters", f"{TOY_NAME}={trained}", "--num-steps", "2", "--topk", "1", "--temperature", "0"]
    run(capsys, *command, "--batch-size", "1", "--max-new-tokens", "8", "--repeats", "1")
    (row,) = map(json.loads, (output / "cells.jsonl").read_text().splitlines())
    assert row["cell"]["drafter"] == "run" and row["lossless"] == "identical"
    (loaded,) = load_methods([f"{TOY_NAME}={trained}"], model=load(checkpoint)[0])
    assert loaded.kind == "Toy" and loaded.digest
    assert loaded.flags == f"--speculative-algorithm {TOY_NAME} --speculative-draft-model-path {trained}"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tests.test_toy_drafter:NONE", "has no attribute 'NONE'"),
        ("tests.no_such_file:TOY", "No module named"),
        ("tests.test_toy_drafter:ToyConfig", "must be an instance of DraftMethod, got type"),
        (TOY_NAME, f"{TOY_NAME} needs --speculative-draft-model-path"),
    ],
)
def test_a_wrong_record_is_one_line(name, message, checkpoint, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["generate", "--model", str(checkpoint), "--prompt", "x", "--speculative-algorithm", name])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
