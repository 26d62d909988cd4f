"""speculators' own classes load what `save_drafter` writes, draft the same, and so are accepted as often.

Needs the optional package speculators (docs/guides/trained_drafters.md says how to install it). The drafts are compared
teacher-forced along the trunk's own greedy text: a round's drafts count up to the first that differs from it.
"""

import dataclasses
import json
import os
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import mtpjax
from conversion.hf_config import parse_config
from mtpjax import MTPModel
from mtpjax.drafters.dflash.network import block_states
from mtpjax.drafters.dspark.network import DSpark, DSparkConfig
from mtpjax.drafters.eagle3.network import eagle3_levels
from mtpjax.models.forward import trunk_states
from mtpjax.models.model import multiply_head
from tests.golden import drafter_path, has_trunk

LEVELS = 3
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, transformers and speculators


@pytest.fixture(scope="module")
def speculators():
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # read when torch is imported; nothing here needs its compiler
    found = pytest.importorskip("speculators", reason="speculators is not installed", exc_type=ImportError)
    pytest.importorskip("loguru").logger.disable("speculators")  # it writes to a stream of the first test
    return found


@pytest.fixture(scope="module")
def torch(speculators):
    return pytest.importorskip("torch")


@dataclasses.dataclass
class Case:
    """A golden trunk, as far as it is there, a drafter, and texts with the lengths of their prompts."""

    name: str
    model: MTPModel
    params: dict
    drafter: Any
    draft_params: Any
    texts: list
    features: list

    @property
    def config(self):
        return self.drafter.architecture

    def change(self, draft_params=None, **switches):
        """Another drafter of the same trunk."""
        drafter = dataclasses.replace(self.drafter, architecture=dataclasses.replace(self.config, **switches))
        return dataclasses.replace(self, drafter=drafter, draft_params=draft_params or self.draft_params)

    def write(self, path):
        """The drafter as mtpjax reads back what it writes in speculators' format."""
        mtpjax.save_drafter(path, self.drafter, self.draft_params, format="speculators")
        drafter, draft_params = mtpjax.load_drafter(path, model=self.model)
        assert drafter.architecture == self.config
        return dataclasses.replace(self, drafter=drafter, draft_params=draft_params)

    def shared(self, name) -> Any:
        """The embedding or the head, of the drafter if it has one, else of the trunk."""
        return self.draft_params.network.get(name, self.params.get(name))


def load_case(name):
    folder = drafter_path(name)
    if has_trunk(name):
        model, params = mtpjax.load(folder / "trunk", dtype=jnp.float32)
    else:
        model, params = MTPModel(parse_config(json.loads((folder / "trunk" / "config.json").read_text())).model), {}
    loaded: Any = mtpjax.load_drafter(folder / "draft", model=model)
    drafter, draft_params = loaded
    with np.load(folder / "expected.npz") as arrays:
        expected = dict(arrays)
    prompts = [prompt for prompt in ("p0", "p1") if f"{prompt}_input_ids" in expected]
    texts = [(expected[f"{prompt}_input_ids"], expected[f"{prompt}_greedy_ids"]) for prompt in prompts]
    texts = [(np.concatenate(parts), len(parts[0])) for parts in texts]
    if params:
        states = [states_of(params, text, model=model, layer_ids=drafter.architecture.layer_ids) for text, _ in texts]
    else:
        states = [expected[f"{prompt}_text_features"][None] for prompt in prompts]
    return Case(name, model, params, drafter, draft_params, texts, states)


def states_of(params, text, *, model, layer_ids):
    """`[1, T, n * D]` states that enter the layers."""
    segments = np.ones((1, len(text)), np.int32)
    states = trunk_states(params, text[None], segments, model=model, layer_ids=layer_ids)
    return np.asarray(states[..., : -model.config.hidden_size])


def load_original(speculators, case, path):
    """Loads a drafter's directory as speculators' programs do, with the trunk's embedding and head if it is there."""
    config = speculators.SpeculatorModelConfig.from_pretrained(path)
    config.transformer_layer_config._attn_implementation = "eager"  # without the compiler
    if case.params:
        trunk = drafter_path(case.name) / "trunk"
        config.speculators_config.verifier = speculators.VerifierConfig.from_pretrained(str(trunk))
    model = speculators.SpeculatorModel.from_pretrained(path, config=config).float().eval()
    if case.params:
        # speculators 0.9.0 marks an embedding that is not in the file with NaN and then takes the trunk's, but
        # transformers 5 leaves any numbers in its place. Mark it again.
        model.embed_tokens.weight.data.fill_(float("nan"))
        model.load_verifier_weights()
    return model


def to_tokens(columns, original):
    """Tokens of columns of speculators' head: d2t holds offsets."""
    return columns if original.d2t is None else columns + original.d2t.numpy()[columns]


def count_accepted(drafts, text, anchors):
    """Counts drafts before the first wrong one; `drafts [A, K]` follow the tokens at the positions `anchors [A]`."""
    targets = text[anchors[:, None] + 1 + np.arange(drafts.shape[1])]
    return int(np.cumprod(drafts == targets, axis=1).sum())


def with_all_tokens(case):
    """The drafter with a head of all tokens: those that it could not draft have logits of 0."""
    V, ids, head = case.model.config.vocab_size, case.draft_params.draft_ids, case.draft_params.network["head"]
    network = {**case.draft_params.network, "head": jnp.zeros((len(head), V)).at[:, ids].set(head)}
    return case.change(case.draft_params.replace(network=network, draft_ids=None), draft_vocab_size=V)


def with_some_tokens(case):
    """The drafter with a head of its own, of the tokens that occur and some others."""
    ids = np.union1d(np.concatenate([text for text, _ in case.texts]), np.arange(0, 320, 7))
    network = {**case.draft_params.network, "head": case.params["head"][:, ids]}
    draft_params = case.draft_params.replace(network=network, draft_ids=jnp.asarray(ids, jnp.int32))
    return case.change(draft_params, own_head=True, draft_vocab_size=len(ids))


@pytest.mark.parametrize(("name", "is_reduced"), [("eagle3", True), ("eagle3", False), ("eagle31", True)])
def test_eagle3_drafts_the_same_in_speculators(name, is_reduced, speculators, torch, tmp_path, capsys):
    case = load_case(name)
    case = (case if is_reduced else with_all_tokens(case)).write(tmp_path / "draft")
    original = load_original(speculators, case, tmp_path / "draft")
    assert original.config.eagle_aux_hidden_state_layer_ids == list(case.config.layer_ids)
    assert (original.d2t is not None) == is_reduced
    captured, accepted = [], {"mtpjax": 0, "speculators": 0}
    original.lm_head.register_forward_hook(lambda module, inputs, output: captured.append(output[0].numpy()))
    for (text, begin), features in zip(case.texts, case.features, strict=True):
        network = case.draft_params.network
        sizes = {"config": case.config, "num_levels": LEVELS}
        levels = eagle3_levels(network, features, text[None], case.shared("embedding"), **sizes)
        # speculators pairs the states of position i with token i+1, as its `shift_batch` does.
        captured.clear()
        with torch.no_grad():
            drafted = original(
                hidden_states=torch.tensor(features[:, :-1]),
                input_ids=torch.tensor(text[None, 1:], dtype=torch.long),
                document_ids=torch.zeros((1, len(text) - 1), dtype=torch.long),
                ttt_steps=LEVELS,
            )
        for level in range(LEVELS):
            # Row i of level k predicts token i+k+1; later rows have no input.
            rows = len(text) - 1 - level
            np.testing.assert_allclose(levels.logits[level][0, :rows], captured[level][:rows], atol=2e-4, rtol=0)
        # Row i drafts behind the token i+1. Rounds within what the trunk wrote:
        anchors = np.arange(begin, len(text) - LEVELS)
        ours = np.stack([np.asarray(logits[0, anchors - 1]).argmax(axis=-1) for logits in levels.logits], axis=1)
        ids = case.draft_params.draft_ids
        ours = ours if ids is None else np.asarray(ids)[ours]
        theirs = np.stack([to_tokens(tokens[0, anchors - 1].numpy(), original) for tokens in drafted], axis=1)
        np.testing.assert_array_equal(ours, theirs)
        accepted["mtpjax"] += count_accepted(ours, text, anchors)
        accepted["speculators"] += count_accepted(theirs, text, anchors)
    report(capsys, f"{name}, {'reduced' if is_reduced else 'whole'} vocabulary", accepted, LEVELS)


@pytest.mark.parametrize("kind", ["dflash", "dflash with a draft vocabulary", "dspark"])
def test_blocks_draft_the_same_in_speculators(kind, speculators, torch, tmp_path, capsys):
    case = load_case(kind.split()[0])
    if kind == "dflash":  # speculators counts windows from the anchor
        case = case.change(window_from_anchor=True)
    elif kind != "dspark":
        case = with_some_tokens(case.change(windows=(0, 0), is_causal=(False, False)))
    case = case.write(tmp_path / "draft")
    original = load_original(speculators, case, tmp_path / "draft")
    assert original.target_layer_ids == list(case.config.layer_ids)
    X, K = case.config.block_size, case.config.num_drafts
    accepted = {"mtpjax": 0, "speculators": 0}
    for (text, begin), features in zip(case.texts, case.features, strict=True):
        # speculators leaves out anchors whose block may not fit.
        anchors = np.arange(begin, len(text) - X)
        previous = text[anchors[:, None] + np.arange(X)]
        logits = {"mtpjax": run_blocks(case, text, features, anchors, previous)}
        logits["speculators"] = run_original_blocks(torch, original, case, text, features, anchors, previous)
        for ours, theirs in zip(logits["mtpjax"], logits["speculators"], strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-4, rtol=0)
        drafts = {name: each[0][:, X - K :].argmax(axis=-1) for name, each in logits.items()}
        if (ids := case.draft_params.draft_ids) is not None:
            drafts["mtpjax"] = np.asarray(ids)[drafts["mtpjax"]]
        drafts["speculators"] = to_tokens(drafts["speculators"], original)
        np.testing.assert_array_equal(drafts["mtpjax"], drafts["speculators"])
        for name, tokens in drafts.items():
            accepted[name] += count_accepted(tokens, text, anchors)
    report(capsys, kind, accepted, K)


def run_blocks(case, text, features, anchors, previous):
    """Logits `[A, X, R]` of blocks behind true anchors, with DSpark's Markov head, and its confidences `[A, X]`."""
    shared = case.shared("embedding"), case.shared("head")
    network, config = case.draft_params.network, case.config
    hidden = block_states(network, features, text[None], anchors[None], shared[0], config=config)
    logits = multiply_head(hidden, shared[1])
    if not isinstance(config, DSparkConfig):
        return [np.asarray(logits[0])]
    head, variables = DSpark(config), {"params": network}
    bias, _ = head.apply(variables, hidden[0], previous, head.first_carry(hidden[0]), method="markov_bias")
    confidence = head.apply(variables, hidden[0], previous, method="confidence_logits")
    return [np.asarray(logits[0] + bias), np.asarray(confidence)]


def run_original_blocks(torch, original, case, text, features, anchors, previous):
    """The same by speculators' class."""
    T = len(text)
    is_anchor = torch.zeros((1, T))
    is_anchor[0, anchors] = 1
    with torch.no_grad():
        hidden, logits, *_ = original._backbone_forward(
            hidden_states=torch.tensor(features),
            input_ids=torch.tensor(text[None], dtype=torch.long),
            loss_mask=is_anchor,
            verifier_last_hidden_states=torch.zeros((1, T, case.model.config.hidden_size)),
            document_ids=torch.zeros((1, T), dtype=torch.long),
            max_anchors=len(anchors),
        )
        hidden, logits = (each.reshape(len(anchors), case.config.block_size, -1) for each in (hidden, logits))
        if not isinstance(case.config, DSparkConfig):
            return [logits.numpy()]
        given = {"prev_token_ids": torch.tensor(previous), "hidden_states": hidden}
        embedded = original.markov_head.prev_embeddings(given["prev_token_ids"])
        confidence = original.confidence_head(torch.cat([hidden, embedded], dim=-1))
        return [(logits + original.markov_head.block_bias(**given)).numpy(), confidence.numpy()]


def report(capsys, name, accepted, num_drafts):
    """Prints the counts, and requires that they are equal and that something was accepted."""
    with capsys.disabled():
        print(f"\n{name}: accepted drafts {accepted}, chains of {num_drafts}")
    assert accepted["mtpjax"] == accepted["speculators"] > 0
