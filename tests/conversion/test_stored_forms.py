"""Checkpoints as people's tools leave them: ties, norms, dtypes, scales and files unlike the published ones."""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mtpjax
from conversion.export_mtp import export_mtp
from conversion.files import CheckpointFiles
from conversion.fp8_blocks import quantized_blocks
from conversion.load_plan import make_plan
from conversion.names import EXPORT_FILE
from conversion.read_params import decode_scales, read_scale_blocks
from conversion.safetensors_header import E8M0
from mtpjax.errors import CheckpointFileError
from mtpjax.io import convert
from mtpjax.io.inspect import format_lines, inspect
from mtpjax.io.merge import merge_mtp
from tests.golden import path
from tests.helpers.checkpoints import drop_modules, rewrite, split

TIED = "qwen3_5_tied_bf16"
EMBEDDING, HEAD = "model.language_model.embed_tokens.weight", "lm_head.weight"


def content(folder: pathlib.Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def assert_same(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def assert_round_trip(source: pathlib.Path, tmp_path: pathlib.Path):
    """Converts there and back: the same bytes in every file, and the same parameters in between."""
    convert.to_mtpjax(source, tmp_path / "ours")
    convert.to_hugging_face(tmp_path / "ours", tmp_path / "back")
    assert content(tmp_path / "back") == content(source)
    assert_same(mtpjax.load(tmp_path / "ours")[1], mtpjax.load(source)[1])


def problem_of(source, **options) -> str:
    """Returns what loading raises, and checks that inspect says the same."""
    with pytest.raises(CheckpointFileError) as caught:
        convert.to_mtpjax(source, pathlib.Path(source).parent / "none", **options)
    if not options:
        assert inspect(source)["problems"][0] == str(caught.value)
    return str(caught.value)


def edit_config(folder: pathlib.Path, **changes):
    values = json.loads((folder / "config.json").read_text())
    for keys, value in changes.items():
        *outer, key = keys.split("__")
        level = values
        for name in outer:
            level = level[name]
        level[key] = value
    (folder / "config.json").write_text(json.dumps(values))


# Ties


@pytest.mark.parametrize(("outer", "inner"), [(True, False), (True, None), (None, True)])
def test_the_outer_configuration_says_whether_the_head_is_tied(outer, inner, tmp_path):
    source = rewrite(path(TIED), tmp_path / "source", lambda name, array: array)
    edit_config(source, tie_word_embeddings=outer, text_config__tie_word_embeddings=inner)
    model, params = mtpjax.load(source)
    assert model.config.tie_word_embeddings and "head" not in params
    edit_config(source, tie_word_embeddings=False, text_config__tie_word_embeddings=True)
    assert HEAD in problem_of(source)


def test_a_head_that_differs_from_a_tied_embedding_is_used(tmp_path, caplog):
    """As in transformers 5: both are loaded, with a warning."""
    source = rewrite(
        path(TIED),
        tmp_path / "source",
        lambda name, array: {name: array} | ({HEAD: array[::-1]} if name == EMBEDDING else {}),
    )
    model, params = mtpjax.load(source)
    assert not model.config.tie_word_embeddings and f"{HEAD} differs from {EMBEDDING}" in caplog.text
    np.testing.assert_array_equal(params["head"], np.asarray(params["embedding"])[::-1].T)
    assert_round_trip(source, tmp_path)


def test_a_tied_tensor_may_be_stored_as_the_head_alone(tmp_path):
    source = rewrite(path(TIED), tmp_path / "source", lambda name, array: (HEAD, array) if name == EMBEDDING else array)
    model, params = mtpjax.load(source)
    assert model.config.tie_word_embeddings
    assert_same(params, mtpjax.load(path(TIED))[1])
    assert_round_trip(source, tmp_path)


# Norms


def is_shifted_norm(name: str) -> bool:
    is_plain = "linear_attn" in name or "visual" in name or "embed_tokens" in name
    return name.endswith(("norm.weight", "layernorm.weight", "embedding.weight", "hidden.weight")) and not is_plain


@pytest.mark.parametrize("part", ["modules", "trunk"])
def test_trunk_and_modules_may_store_their_norms_differently(part, tmp_path, caplog):
    """Either part holds 1 + w: the same logits as from the original, and the same bytes back."""

    def change(name, array):
        array = array.astype(np.float32)
        return array + 1 if is_shifted_norm(name) and name.startswith("mtp.") == (part == "modules") else array

    shifted = rewrite(path(TIED), tmp_path / "shifted", change)
    original = mtpjax.load(path(TIED), dtype=jnp.float32)
    found = mtpjax.load(shifted)
    assert found[0].config.mtp_norm_differs and "both are handled" in caplog.text
    assert not inspect(shifted)["problems"]
    mine, wanted = (mtpjax.forward(params, jnp.arange(12)[None], model=model) for model, params in (found, original))
    np.testing.assert_allclose(mine.logits, wanted.logits, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(mine.mtp_logits[0], wanted.mtp_logits[0], rtol=1e-4, atol=1e-3)
    assert_round_trip(shifted, tmp_path)


def test_norms_that_show_no_convention_are_reported(tmp_path, caplog):
    half = lambda name, array: array.astype(np.float32) * 0.1 + 0.5 if is_shifted_norm(name) else array
    model, _ = mtpjax.load(rewrite(path(TIED), tmp_path / "half", half))
    assert model.config.zero_centred_norm and not model.config.mtp_norm_differs
    assert caplog.text.count("neither near 0 nor near 1") == 2
    one = lambda name, array: np.full_like(array, 1) if name.endswith("language_model.norm.weight") else array
    mtpjax.load(rewrite(path(TIED), tmp_path / "one", one))
    assert "model.language_model.norm.weight has a mean of 1.00" in caplog.text


def test_modules_that_disagree_about_their_norms_are_refused(tmp_path):
    """The model has one convention for all modules."""
    second = lambda name, array: array + 1 if name.startswith("model.layers.5.") and is_shifted_norm(name) else array
    shifted = rewrite(path("step3p5"), tmp_path / "shifted", second)
    with pytest.raises(CheckpointFileError, match=r"others as 1 \+ w: module 0: w, module 1: 1 \+ w$"):
        mtpjax.load(shifted)


def test_modules_of_the_other_convention_are_not_merged(tmp_path):
    change = lambda name, array: array + 1 if is_shifted_norm(name) and name.startswith("mtp.") else array
    shifted = rewrite(path("qwen3_next"), tmp_path / "shifted", change)
    base = drop_modules(path("qwen3_next"), tmp_path / "base")
    convert.to_mtpjax(shifted, tmp_path / "ours")
    export_mtp(shifted, tmp_path / "export")
    for modules in (shifted, tmp_path / "ours", tmp_path / "export"):
        with pytest.raises(CheckpointFileError, match=r"store norm weights as 1 \+ w, but those of"):
            merge_mtp(base, modules, tmp_path / "merged")


# Dtypes


def fp8_source(tmp_path, kind: str) -> pathlib.Path:
    """The fp8 golden with scales that are powers of two, stored as `kind`."""
    made = {"U8": lambda scales: scales.astype(E8M0).view(np.uint8), "F8_E8M0": lambda scales: scales.astype(E8M0)}
    made |= {"I32": lambda scales: np.log2(scales).astype(np.int32), "F32": lambda scales: scales}
    made |= {"BF16": lambda scales: scales.astype(ml_dtypes.bfloat16)}

    def change(name, array):
        return made[kind](np.exp2(np.round(np.log2(array)))) if name.endswith("_scale_inv") else array

    return rewrite(path("deepseek_v3_fp8"), tmp_path / kind, change)


@pytest.mark.parametrize("kind", ["U8", "F8_E8M0", "BF16"])
def test_scales_may_be_exponents_or_short_floats(kind, tmp_path):
    found = []
    for each in (kind, "F32"):
        with CheckpointFiles(fp8_source(tmp_path, each)) as files:
            names = make_plan(files).scales.names.values()
            found.append({name: read_scale_blocks(files, name, 0, files.tensors[name].shape[0]) for name in names})
    assert found[0]
    assert_same(*found)


def test_exponents_are_written_back(tmp_path):
    source = fp8_source(tmp_path, "U8")
    assert_round_trip(source, tmp_path)
    export_mtp(source, tmp_path / "mtp")
    assert merge_mtp(source, tmp_path / "mtp", tmp_path / "merged").replaced == 0


def test_other_scales_are_refused(tmp_path):
    assert "has scales of unsupported dtype int32" in problem_of(fp8_source(tmp_path, "I32"))
    nan = rewrite(fp8_source(tmp_path, "U8"), tmp_path / "nan", lambda name, a: a | 255 if "_scale_inv" in name else a)
    with pytest.raises(CheckpointFileError, match="255, which is NaN"):
        mtpjax.load(nan)


@pytest.mark.parametrize("dtype", [np.uint8, E8M0, ml_dtypes.bfloat16])
def test_new_scales_are_those_that_the_file_can_hold(dtype):
    values = np.random.default_rng(0).normal(size=(200, 150)).astype(np.float32)
    made, scales = zip(*quantized_blocks(iter([values]), (128, 128), np.dtype(dtype)), strict=True)
    scales = np.concatenate([decode_scales(part) for part in scales])
    found = np.concatenate(made).astype(np.float32) * np.kron(scales, np.ones((128, 128)))[:200, :150]
    assert np.abs(found - values).max() <= np.abs(values).max() / 16


@pytest.mark.parametrize(
    ("name", "dtype", "word"),
    [
        ("model.norm.weight", np.int32, "int32"),
        ("model.layers.0.self_attn.q_norm.weight", ml_dtypes.float8_e4m3fn, "for matrices with scales"),
        ("lm_head.weight", ml_dtypes.float8_e5m2, "float8_e5m2"),
        ("model.layers.1.mlp.up_proj.weight", np.float64, "--dtype float32"),
        ("model.layers.1.mlp.up_proj.weight", bool, "bool"),
    ],
)
def test_every_tensor_has_a_dtype_that_is_read(name, dtype, word, tmp_path):
    source = rewrite(path("qwen3"), tmp_path / "source", lambda n, a: a.astype(dtype) if n == name else a)
    message = problem_of(source)
    assert name in message and word in message
    if dtype != np.float64:
        problem_of(source, dtype=np.float32)


def test_q_k_and_v_of_several_dtypes_become_float32(tmp_path, caplog):
    kinds = {"q_proj": ml_dtypes.bfloat16, "k_proj": np.float16}
    change = lambda name, array: array.astype(next((kinds[k] for k in kinds if k in name), array.dtype))
    source = rewrite(path("qwen3"), tmp_path / "source", change)
    _, params = mtpjax.load(source)
    assert "of different dtypes, read as float32" in caplog.text
    with CheckpointFiles(source) as files:
        name = "model.layers.0.self_attn.{}_proj.weight"
        stored = [files.read(name.format(each)).astype(np.float32) for each in "qkv"]
    qkv = np.asarray(params["trunk"]["layer_0"]["attention"]["qkv"])  # [D, K, G + 2, H]
    assert qkv.dtype == np.float32
    for part, weight in zip((qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]), stored, strict=True):
        np.testing.assert_array_equal(part.reshape(len(qkv), -1), weight.T)
    assert any("of different dtypes" in line for line in format_lines(inspect(source)))
    assert_round_trip(source, tmp_path)


def test_fp8_beside_bfloat16_in_one_parameter_is_dequantized(tmp_path):
    """The gate stays fp8, the up projection is bfloat16: each has the values that the files hold."""
    name = "model.layers.0.mlp.up_proj.weight"

    def change(tensor, array):
        if tensor == f"{name}_scale_inv":
            return None
        return array.astype(ml_dtypes.bfloat16) if tensor == name else array

    source = rewrite(path("deepseek_v3_fp8"), tmp_path / "source", change)
    _, params = mtpjax.load(source)
    found = np.asarray(params["trunk"]["layer_0"]["dense"]["gate_up"])
    with CheckpointFiles(source) as files:
        np.testing.assert_array_equal(found[:, 1].T, files.read(name).astype(np.float32))
    whole = mtpjax.load(path("deepseek_v3_fp8"), dtype=jnp.float32)[1]["trunk"]["layer_0"]["dense"]["gate_up"]
    np.testing.assert_array_equal(found[:, 0], whole[:, 0])
    # The way back keeps the values; this layer's fp8 tensors become float32, and the others stay fp8.
    convert.to_mtpjax(source, tmp_path / "ours")
    convert.to_hugging_face(tmp_path / "ours", tmp_path / "back")
    assert_same(mtpjax.load(tmp_path / "back")[1], params)


# Files


def test_a_single_file_beside_another_index_is_not_chosen_silently(tmp_path, caplog):
    source = pathlib.Path(shutil.copytree(path("qwen3"), tmp_path / "source"))
    new = rewrite(path("qwen3"), tmp_path / "new", lambda name, array: array * 2)
    shutil.copy(new / "model.safetensors", source / "model.safetensors")
    with pytest.raises(CheckpointFileError, match=r"Delete model\.safetensors\.index\.json and its files to read"):
        mtpjax.load(source)
    for file in source.glob("model-*"):
        file.unlink()
    _, params = mtpjax.load(source)
    assert "the index is ignored" in caplog.text
    assert_same(params, mtpjax.load(new)[1])


def test_an_index_may_name_the_single_file(tmp_path):
    source = rewrite(path("qwen3"), tmp_path / "source", lambda name, array: array)
    with CheckpointFiles(source) as files:
        names = dict.fromkeys(files.tensors, "model.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert_same(mtpjax.load(source)[1], mtpjax.load(path("qwen3"))[1])


@pytest.mark.parametrize(
    ("name", "file"), [("qwen3_next", "mtp.safetensors"), ("deepseek_v3", "model-mtp.safetensors")]
)
def test_modules_may_lie_in_a_file_that_the_index_lacks(name, file, tmp_path, caplog):
    prefix = "mtp." if name == "qwen3_next" else "model.layers.4."
    source = split(path(name), tmp_path / "source", lambda tensor: tensor.startswith(prefix), file)
    model, params = mtpjax.load(source)
    assert model.config.num_mtp_modules == 1 and f"{file} is not in the index" in caplog.text
    assert_same(params, mtpjax.load(path(name))[1])
    assert not inspect(source)["problems"] and file in inspect(source)["shards"]
    assert_round_trip(source, tmp_path)
    base = drop_modules(path(name), tmp_path / "base")
    assert merge_mtp(base, source, tmp_path / "merged").added
    assert_same(mtpjax.load(tmp_path / "merged")[1], params)


def test_a_further_file_may_repeat_tensors_but_not_change_them(tmp_path, caplog):
    """An export of Qwen's modules holds embedding and head too."""
    source = rewrite(path("qwen3_next"), tmp_path / "source", lambda n, a: None if n.startswith("mtp.") else a)
    export_mtp(path("qwen3_next"), tmp_path / "mtp")
    shutil.copy(tmp_path / "mtp" / EXPORT_FILE, source / EXPORT_FILE)
    assert_same(mtpjax.load(source)[1], mtpjax.load(path("qwen3_next"))[1])
    assert_round_trip(source, tmp_path)
    changed = rewrite(source, tmp_path / "changed", lambda n, a: a * 2 if n == HEAD else a)
    shutil.copy(tmp_path / "mtp" / EXPORT_FILE, changed / EXPORT_FILE)
    assert mtpjax.load(changed)[0].config.num_mtp_modules == 0
    assert f"but its {HEAD} differs from the one in model.safetensors" in caplog.text


def test_the_file_of_the_modules_alone_can_be_merged(tmp_path):
    source = split(path("qwen3_next"), tmp_path / "source", lambda name: name.startswith("mtp."), "mtp.safetensors")
    (source / "model.safetensors").unlink()
    base = drop_modules(path("qwen3_next"), tmp_path / "base")
    assert merge_mtp(base, source, tmp_path / "merged").added
    assert_same(mtpjax.load(tmp_path / "merged")[1], mtpjax.load(path("qwen3_next"))[1])
    assert "lacks" in problem_of(source)


def test_other_files_are_reported_and_not_read(tmp_path, caplog):
    source = rewrite(path("qwen3"), tmp_path / "source", lambda name, array: array)
    shutil.copy(source / "model.safetensors", source / "other.safetensors")
    shutil.copy(source / "model.safetensors", source / "consolidated.safetensors")
    (source / "damaged.safetensors").write_bytes(b"x")
    mtpjax.load(source)
    assert "are not read: other.safetensors" in caplog.text and "consolidated" not in caplog.text
    assert any("other.safetensors" in line for line in format_lines(inspect(source)))


def test_tensors_that_the_index_lacks_are_read(tmp_path, caplog):
    source = rewrite(path("qwen3_next"), tmp_path / "source", lambda name, array: array)
    with CheckpointFiles(source) as files:
        names = {name: "model.safetensors" for name in files.tensors if not name.startswith("mtp.")}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert mtpjax.load(source)[0].config.num_mtp_modules == 1
    assert "they are read: mtp." in caplog.text
    assert_round_trip(source, tmp_path)


@pytest.mark.parametrize("prefix", ["language_model.", "model.", "model.language_model."])
def test_modules_may_have_another_prefix(prefix, tmp_path):
    moved = lambda name, array: (f"{prefix}{name}", array) if name.startswith("mtp.") else array
    source = rewrite(path("qwen3_5"), tmp_path / "source", moved)
    wanted = mtpjax.load(path("qwen3_5"))[1]
    assert_same(mtpjax.load(source)[1], wanted)
    assert_round_trip(source, tmp_path)
    export_mtp(source, tmp_path / "mtp")
    with CheckpointFiles(tmp_path / "mtp") as files:
        assert "mtp.fc.weight" in files.tensors
    base = drop_modules(path("qwen3_5"), tmp_path / "base")
    for modules in (source, tmp_path / "mtp"):
        assert merge_mtp(base, modules, tmp_path / f"merged_{modules.name}").added
        assert_same(mtpjax.load(tmp_path / f"merged_{modules.name}")[1], wanted)
    assert merge_mtp(source, tmp_path / "mtp", tmp_path / "again").replaced == 0


# Tensors that the model does not compute


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.self_attn.q_proj.bias", "model.norm.bias", "lm_head.bias", "model.layers.1.new_norm.weight"],
)
def test_no_flag_leaves_out_tensors_of_the_model(name, tmp_path):
    source = rewrite(path("qwen3"), tmp_path / "s", lambda n, a: {n: a, name: a} if n == "model.norm.weight" else a)
    for options in ({}, {"allow_extra": True}):
        message = problem_of(source, **options)
        assert name in message and "does not use" in message and "allow" not in message


def test_unrelated_tensors_are_kept_on_request(tmp_path):
    source = rewrite(
        path("qwen3"), tmp_path / "s", lambda n, a: {n: a, "audio.x": a} if n == "model.norm.weight" else a
    )
    assert "--allow-extra" in problem_of(source)
    convert.to_mtpjax(source, tmp_path / "ours", allow_extra=True)
    convert.to_hugging_face(tmp_path / "ours", tmp_path / "back")
    assert content(tmp_path / "back") == content(source)
