"""Hugging Face transformers on the same files: the same tokens, and as many trunk passes with `use_mtp=True`.

Needs `pip install -e ".[bench,test]"`.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import mtpjax
from mtpjax import DecodeConfig, MTPModel, generate, speculative_generate
from mtpjax.io import checkpoint, convert
from mtpjax.models.rope_scaling import Llama3Scaling
from tests.golden import path
from tests.helpers.small_models import constructed_params, random_params, small_config

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

NEW_TOKENS = 40
GLM = {  # GLM-4.5 in small: biases, half of each head rotated, experts behind one dense layer
    **{"attention_bias": True, "partial_rotary_factor": 0.5, "head_dim": 8, "router_correction_bias": True},
    **{"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1},
    **{"first_k_dense_replace": 1, "use_qk_norm": True, "routed_scaling_factor": 1.5},
}


def open_there(folder):
    """The model in transformers, and a list that grows with every pass of its trunk."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    layers = model.config.num_hidden_layers
    modules = getattr(model.config, "num_nextn_predict_layers", 0)
    # MTP weights are found by this pattern, which the class fixes to the 61 layers of the published model.
    numbers = "|".join(str(layers + number) for number in range(modules))
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.({numbers})\..*"]
    passes = []
    model.model.register_forward_hook(lambda *_: passes.append(1))
    return model, passes


def decode_there(model, prompt, **options):
    ids = torch.tensor([prompt])
    options |= {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with torch.inference_mode():
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def assert_same(folder, prompts):
    """Plain and speculative tokens agree; returns the accept length, which is theirs too."""
    model, params = mtpjax.load(folder, dtype=jnp.float32)
    theirs, passes = open_there(folder)
    num_steps = model.config.num_mtp_modules
    emitted = rounds = 0
    for prompt in prompts:
        config = DecodeConfig(max_new_tokens=NEW_TOKENS, num_steps=num_steps)
        result = speculative_generate(params, [prompt], model=model, config=config)
        assert decode_there(theirs, prompt) == generate(params, [prompt], model=model, config=config).rows()[0]
        passes.clear()
        assert decode_there(theirs, prompt, use_mtp=True) == result.rows()[0]
        assert len(passes) == 1 + result.stats.rounds.sum()  # one of them is the prompt's
        emitted, rounds = emitted + NEW_TOKENS - 1, rounds + len(passes) - 1
    return emitted / rounds


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "deepseek_v3_mtp2_bf16"])
def test_golden_checkpoints_decode_alike(name):
    with np.load(path(name) / "expected.npz") as expected:
        prompts = [expected[f"{prompt}_input_ids"].tolist() for prompt in ("p0", "p1")]
    assert_same(path(name), prompts)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_plain_trunks_decode_alike(family, tmp_path, key):
    """With Llama 3.1's rotary scaling, whose ramp lies within the head."""
    scaling = Llama3Scaling(factor=4.0, original_max_position_embeddings=32) if family == "llama" else None
    config = small_config("grouped", num_mtp_modules=0, use_qk_norm=family == "qwen3", head_dim=16)
    config = dataclasses.replace(config, rope_scaling=scaling, rope_theta=100.0)
    model = MTPModel(config)
    checkpoint.save_model(tmp_path / "ours", model, random_params(model))
    convert.to_hugging_face(tmp_path / "ours", tmp_path / "there", model_type=family)
    model, params = mtpjax.load(tmp_path / "there")
    assert model.config == config
    theirs, _ = open_there(tmp_path / "there")
    prompt = np.random.default_rng(0).integers(0, config.vocab_size, 60).tolist()
    with torch.inference_mode():
        wanted = theirs(torch.tensor([prompt])).logits[0].numpy()
    found = mtpjax.forward(params, np.array([prompt]), model=model).logits[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("modules", [1, 2])
@pytest.mark.parametrize(
    ("family", "attention", "changes"), [("deepseek_v3", "latent", {}), ("glm4_moe", "grouped", GLM)]
)
def test_drafts_that_are_right_at_times_are_accepted_alike(family, attention, changes, modules, tmp_path):
    model = MTPModel(small_config(attention, num_mtp_modules=modules, **changes))
    checkpoint.save_model(tmp_path / "ours", model, constructed_params(model, "latent", "mixed"))
    convert.to_hugging_face(tmp_path / "ours", tmp_path / "there", model_type=family)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, model.config.vocab_size, length).tolist() for length in (3, 9, 20, 31)]
    accept_length = assert_same(tmp_path / "there", prompts)
    print(f"{family}, {modules} modules: accept length {accept_length:.3f}")
    assert 1.05 < accept_length < modules + 1
