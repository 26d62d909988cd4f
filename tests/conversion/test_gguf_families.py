"""GGUF files of DeepSeek-V3 and GLM-4.5 with their MTP modules give what the golden checkpoints give."""

import json
import logging

import jax
import numpy as np
import pytest

import mtpjax
from conversion.files import CheckpointFiles
from conversion.gguf_files import GGUFFiles
from conversion.gguf_tokenizer import tokenizer_files
from conversion.load_plan import make_plan
from mtpjax import DecodeConfig, forward, generate, speculative_generate
from mtpjax.errors import CheckpointError
from mtpjax.io.checkpoint import save_model
from mtpjax.io.convert import to_hugging_face, to_mtpjax
from mtpjax.io.huggingface_files import read_kept_config
from mtpjax.io.merge import merge_mtp
from tests import golden
from tests.helpers.checkpoints import drop_modules
from tests.helpers.gguf_checkpoints import write_gguf

gguf = pytest.importorskip("gguf", reason="needs the extra gguf")

FORMS = [
    ("deepseek_v3", {}),
    ("deepseek_v3", {"is_split": False}),
    ("deepseek_v3_mtp2_bf16", {"kind": "BF16"}),
    ("glm4_moe", {}),
]


def assert_equal_files(one, other):
    """Two checkpoints have the same tensors with the same bits."""
    with CheckpointFiles(one) as ours, CheckpointFiles(other) as theirs:
        assert ours.tensors.keys() == theirs.tensors.keys()
        for name in ours.tensors:
            assert ours.tensors[name].dtype == theirs.tensors[name].dtype, name
            np.testing.assert_array_equal(ours.read(name), theirs.read(name), err_msg=name)


def assert_equal_parameters(one, other):
    """Two checkpoints load with the same configuration, bits and dtypes."""
    (model, params), (expected_model, expected) = mtpjax.load(one), mtpjax.load(other)
    assert model.config == expected_model.config
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert jax.tree.map(lambda leaf: leaf.dtype, params) == jax.tree.map(lambda leaf: leaf.dtype, expected)


def without(name):
    return {"with_tensors": lambda tensors: {key: value for key, value in tensors.items() if key != name}}


def replaced(name, array):
    return {"with_tensors": lambda tensors: {**tensors, name: array}}


@pytest.mark.parametrize("name, form", FORMS)
def test_the_parameters_have_the_bits_of_the_original(name, form, tmp_path):
    path = write_gguf(golden.path(name), tmp_path / "model.gguf", **form)
    assert_equal_parameters(path, golden.path(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_logits_and_drafts_are_those_of_the_golden_checkpoint(name, tmp_path):
    model, params = mtpjax.load(write_gguf(golden.path(name), tmp_path / "model.gguf"))
    with np.load(golden.path(name) / "expected.npz") as expected:
        tokens = expected["p0_input_ids"][None]
        output = forward(params, tokens, model=model, num_depths=1)
        # The golden tests' own tolerance for float32.
        np.testing.assert_allclose(output.logits[0], expected["p0_logits"], rtol=1e-4, atol=2e-4)
        np.testing.assert_allclose(output.mtp_logits[0][0, :-1], expected["p0_mtp1_logits"], rtol=1e-4, atol=2e-4)
        config = DecodeConfig(max_new_tokens=24, num_steps=2)
        prompts, greedy = [expected["p0_input_ids"]], [expected["p0_greedy_ids"].tolist()]
    drafted = speculative_generate(params, prompts, model=model, config=config)
    assert drafted.rows() == generate(params, prompts, model=model, config=config).rows() == greedy
    # Modules that draft otherwise would be accepted otherwise.
    original = speculative_generate(mtpjax.load(golden.path(name))[1], prompts, model=model, config=config)
    assert drafted.stats.accept_length == original.stats.accept_length


def test_quantized_experts_are_dequantized_one_by_one(tmp_path):
    # The golden set's rows are too short for blocks of 32, so longer ones take their place.
    stacked = np.random.default_rng(0).normal(size=(12, 20, 64)).astype(np.float32)
    path = write_gguf(
        golden.path("glm4_moe"), tmp_path / "model.gguf", kind="Q8_0", **replaced("blk.2.ffn_up_exps.weight", stacked)
    )
    q8 = gguf.GGMLQuantizationType.Q8_0
    expected = gguf.quants.dequantize(gguf.quants.quantize(stacked, q8), q8)
    with GGUFFiles(path) as files:
        for expert in (0, 1, 11):
            name = f"model.layers.2.mlp.experts.{expert}.up_proj.weight"
            np.testing.assert_array_equal(files.read(name), expected[expert])
            np.testing.assert_array_equal(files.read(name, 3, 5), expected[expert][3:5])
        assert not np.array_equal(expected, stacked)


def test_rows_of_a_split_tensor_can_be_read_from_anywhere(tmp_path):
    path = write_gguf(golden.path("deepseek_v3"), tmp_path / "model.gguf")
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    with GGUFFiles(path) as files, CheckpointFiles(golden.path("deepseek_v3")) as original:
        whole = original.read(name)
        for begin, end in [(0, 1), (27, 29), (5, 60), (30, 112)]:
            np.testing.assert_array_equal(files.read(name, begin, end), whole[begin:end])


def test_conversion_gives_the_original_directory(tmp_path):
    path = write_gguf(golden.path("glm4_moe"), tmp_path / "model.gguf")
    to_mtpjax(path, tmp_path / "ours")
    to_hugging_face(tmp_path / "ours", tmp_path / "back")
    assert_equal_files(tmp_path / "back", golden.path("glm4_moe"))


def test_a_trained_model_keeps_the_family_of_the_file_that_it_began_from(tmp_path):
    path = write_gguf(golden.path("glm4_moe"), tmp_path / "model.gguf")
    save_model(tmp_path / "trained", *mtpjax.load(path), init_from=path)
    to_hugging_face(tmp_path / "trained", tmp_path / "out")
    kept = json.loads(read_kept_config(tmp_path / "trained") or b"{}")
    assert kept["model_type"] == "glm4_moe"
    assert json.loads((tmp_path / "out" / "config.json").read_text()).items() >= kept.items()
    assert_equal_parameters(tmp_path / "out", golden.path("glm4_moe"))


def test_a_file_without_modules_is_a_trunk(tmp_path):
    path = write_gguf(golden.path("glm4_moe"), tmp_path / "model.gguf", modules=False)
    assert mtpjax.load(path)[0].config.num_mtp_modules == 0


def test_dropped_tensors_of_modules_leave_a_trunk_with_a_warning(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    path = write_gguf(
        golden.path("glm4_moe"),
        tmp_path / "model.gguf",
        with_tensors=lambda tensors: {name: each for name, each in tensors.items() if not name.startswith("blk.4.")},
    )
    assert mtpjax.load(path)[0].config.num_mtp_modules == 0
    assert "1 MTP module" in caplog.text


def test_a_count_of_modules_without_tensors_leaves_a_trunk_of_all_blocks(tmp_path, caplog):
    """The count is left over, and `block_count` is that of the trunk."""
    path = write_gguf(
        golden.path("glm4_moe"),
        tmp_path / "model.gguf",
        modules=False,
        change=lambda writer: writer.add_uint32("glm4moe.nextn_predict_layers", 1),
    )
    model, _ = mtpjax.load(path)
    assert (model.config.num_hidden_layers, model.config.num_mtp_modules) == (4, 0) and "1 MTP module" in caplog.text


@pytest.mark.parametrize("is_gguf", [(True, False), (False, True), (True, True)])
def test_modules_are_merged_from_and_into_gguf_files(is_gguf, tmp_path):
    original, has = golden.path("glm4_moe"), dict(zip(("base", "modules"), is_gguf, strict=True))
    base = (
        write_gguf(original, tmp_path / "base.gguf", modules=False)
        if has["base"]
        else drop_modules(original, tmp_path / "base")
    )
    modules = write_gguf(original, tmp_path / "modules.gguf") if has["modules"] else original
    report = merge_mtp(base, modules, tmp_path / "merged")
    assert report.added and not report.replaced
    assert_equal_parameters(tmp_path / "merged", original)


@pytest.mark.parametrize(
    "form, message",
    [
        (without("blk.0.attn_v_b.weight"), r"'blk\.0\.attn_k_b\.weight', but not 'blk\.0\.attn_v_b\.weight'"),
        (without("blk.4.nextn.hnorm.weight"), r"lacks 1 tensor.*model\.layers\.4\.hnorm\.weight"),
        (replaced("blk.1.attn_v_b.weight", np.ones((4, 12, 19), np.float32)), r"\[4, 12, 19\], not \[heads"),
        (replaced("blk.2.ffn_up_exps.weight", np.ones((3, 20, 48), np.float32)), "expert_count is 12.*3, 20, 48"),
        (replaced("blk.2.ffn_up_exps.weight", np.ones((12, 20, 32), np.float32)), "shape.*20, 32"),
        (replaced("blk.2.surprise.weight", np.ones(3, np.float32)), r"unknown tensors: blk\.2\.surprise\.weight"),
        (replaced("blk.0.post_attention_norm.weight", np.ones(48, np.float32)), "are both model.layers.0.post_att"),
    ],
)
def test_damaged_tensors_are_named(form, message, tmp_path):
    path = write_gguf(golden.path("deepseek_v3"), tmp_path / "model.gguf", **form)
    with pytest.raises(CheckpointError, match=message) as error:
        mtpjax.load(path)
    assert "\n" not in str(error.value)


def override(**values):
    """Replaces keys after the converter has written them; "." is written as "__"."""

    def change(writer):
        for key, value in values.items():
            name = f"{writer.arch}.{key.replace('__', '.')}"
            writer.kv_data[0].pop(name, None)
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(name, value)

    return change


@pytest.mark.parametrize(
    "values, message",
    [
        ({"expert_count": 2**31 - 1}, r"expert_count is 2147483647, but tensor .* has shape \[12,"),
        ({"expert_gating_func": 1}, r"expert_gating_func is 1; supported: 2 \(sigmoid\)"),
        ({"nextn_predict_layers": 5}, "nextn_predict_layers is 5, but block_count, which includes these layers, is 5"),
        ({"nextn_predict_layers": 2**31}, "nextn_predict_layers is 2147483648"),
        ({"rope__dimension_count": 24}, "key_length_mla is 24, but must be larger than rope.dimension_count"),
        ({"attention__kv_lora_rank": 0}, "kv_lora_rank is 0; supported: one integer of at least 1"),
        ({"rope__scaling__attn_factor": 0.5}, "attn_factor is 0.5; supported: 1.0"),
        ({"expert_used_count": 13}, "num_experts_per_tok"),
    ],
)
def test_wrong_keys_are_named(values, message, tmp_path):
    path = write_gguf(golden.path("deepseek_v3"), tmp_path / "model.gguf", change=override(**values))
    with pytest.raises(CheckpointError, match=message) as error:
        mtpjax.load(path)
    assert "\n" not in str(error.value)


def test_one_part_of_a_split_file_is_rejected(tmp_path):
    path = write_gguf(
        golden.path("glm4_moe"), tmp_path / "model.gguf", change=lambda writer: writer.add_uint16("split.count", 3)
    )
    with pytest.raises(CheckpointError, match="one of 3 parts: join them first"):
        mtpjax.load(path)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_no_value_of_a_key_ends_in_another_exception(name, tmp_path):
    """Two random values for each key: missing, too large, negative, not a number, of another type."""
    kinds = gguf.GGUFValueType
    values = [(None, None), (0, kinds.UINT32), (2**31, kinds.UINT32), (2**63, kinds.UINT64), (-1, kinds.INT32)]
    values += [(float("nan"), kinds.FLOAT32), (1e300, kinds.FLOAT64), ("x", kinds.STRING), (True, kinds.BOOL)]
    rng, keys, failed = np.random.default_rng(1), [], 0
    write_gguf(golden.path(name), tmp_path / "model.gguf", change=lambda writer: keys.extend(writer.kv_data[0]))
    assert len(keys) > 20
    for key in keys * 2:
        value, kind = values[rng.integers(len(values))]

        def change(writer, key=key, value=value, kind=kind):
            writer.kv_data[0].pop(key)
            if kind is not None:
                writer.add_key_value(key, value, kind)

        write_gguf(golden.path(name), tmp_path / "model.gguf", change=change)
        try:
            with GGUFFiles(tmp_path / "model.gguf") as files:
                make_plan(files)
        except CheckpointError as error:
            failed += 1
            assert "\n" not in str(error)
    assert failed > len(keys)


def test_every_truncation_and_flipped_byte_is_one_plain_line(tmp_path):
    whole = write_gguf(golden.path("deepseek_v3"), tmp_path / "model.gguf").read_bytes()
    damaged = tmp_path / "damaged.gguf"
    for size in range(0, len(whole) - 64, len(whole) // 20):
        damaged.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"truncated|not a GGUF"):
            GGUFFiles(damaged)
    # Flip bytes of the header, which holds the keys, names and shapes.
    rng = np.random.default_rng(0)
    end = whole.index(b"blk.4.nextn.shared_head_norm.weight")
    failed = 0
    for _ in range(200):
        content = bytearray(whole)
        for place in rng.integers(0, end, 2):
            content[place] = rng.integers(0, 256)
        damaged.write_bytes(content)
        try:
            GGUFFiles(damaged).close()
        except CheckpointError as error:
            failed += 1
            assert "\n" not in str(error)
    assert failed > 20


@pytest.mark.parametrize(
    "pre, text, pieces",
    [
        ("deepseek-v3", "Ab12345 漢字かな_x!=\n y", ["Ab", "123", "45", " ", "漢字かな", "_x", "!=\n", " y"]),
        ("glm4", "don't 12345 x", ["don", "'t", " ", "123", "45", " x"]),
    ],
)
def test_text_is_split_as_the_families_do(pre, text, pieces):
    import tokenizers

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    metadata = {f"tokenizer.ggml.{name}": value for name, value in {"model": "gpt2", "pre": pre}.items()}
    metadata |= {"tokenizer.ggml.tokens": letters, "tokenizer.ggml.merges": []}
    made = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_files(metadata)["tokenizer.json"]))
    found = [text[begin:end] for _, (begin, end) in made.pre_tokenizer.pre_tokenize_str(text)]
    assert found == pieces
