"""Formats of quantized weights that are not read: each is named first, with a tensor and what to do."""

import json

import ml_dtypes
import numpy as np
import pytest

from mtpjax.drafters.architecture import TrunkSizes
from mtpjax.drafters.files.read import read_drafter
from mtpjax.drafters.methods import METHODS
from mtpjax.errors import CheckpointFileError
from mtpjax.io import convert
from mtpjax.io.inspect import format_lines, inspect
from tests.golden import drafter_path, path
from tests.helpers.checkpoints import rewrite

E4M3 = ml_dtypes.float8_e4m3fn
# What each format stores for a matrix of 96 outputs and 48 inputs, and what config.json says.
FORMATS = {
    "compressed-tensors NVFP4": (
        {"weight_packed": ("u1", (96, 24)), "weight_scale": (E4M3, (96, 3)), "weight_global_scale": ("f4", (1,))},
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
    ),
    "compressed-tensors MXFP4": (
        {"weight_packed": ("u1", (96, 24)), "weight_scale": ("u1", (96, 2))},
        {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
    ),
    "compressed-tensors packed integers": (
        {"weight_packed": ("i4", (96, 6)), "weight_scale": ("f4", (96, 2)), "weight_shape": ("i8", (2,))},
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    ),
    "ModelOpt NVFP4": (
        {
            **{"weight": ("u1", (96, 24)), "weight_scale": (E4M3, (96, 3)), "weight_scale_2": ("f4", ())},
            "input_scale": ("f4", ()),
        },
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    ),
    "bitsandbytes 4-bit": (
        {
            **{"weight": ("u1", (2304, 1)), "weight.absmax": ("f4", (72,)), "weight.quant_map": ("f4", (16,))},
            "weight.quant_state.bitsandbytes__nf4": ("u1", (100,)),
        },
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
    ),
    "bitsandbytes 8-bit": (
        {"weight": ("i1", (96, 48)), "SCB": ("f4", (96,))},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
    ),
    "MLX": ({"weight": ("u4", (96, 6)), "scales": ("f2", (96, 1)), "biases": ("f2", (96, 1))}, None),
    "AWQ": (
        {"qweight": ("i4", (48, 12)), "qzeros": ("i4", (2, 12)), "scales": ("f2", (2, 96))},
        {"quant_method": "awq", "bits": 4},
    ),
    "GPTQ": (
        {"qweight": ("i4", (6, 96)), "qzeros": ("i4", (2, 12)), "scales": ("f2", (2, 96)), "g_idx": ("i4", (48,))},
        {"quant_method": "gptq", "bits": 4},
    ),
    "AQLM": (
        {"codes": ("i2", (96, 6, 1)), "codebooks": ("f2", (1, 256, 1, 8)), "scales": ("f2", (96, 1, 1, 1))},
        {"quant_method": "aqlm"},
    ),
    "HQQ": ({"W_q": ("u1", (48, 48)), "scale": ("f2", (72, 1)), "zero": ("f2", (72, 1))}, {"quant_method": "hqq"}),
    "EXL3": ({"trellis": ("i2", (3, 6, 64)), "suh": ("f2", (48,)), "svh": ("f2", (96,))}, {"quant_method": "exl3"}),
    "quanto": ({"weight._data": ("i1", (96, 48)), "weight._scale": ("f4", (96, 1))}, {"quant_method": "quanto"}),
    "integers with a scale per output": (
        {"weight": ("i1", (96, 48)), "weight_scale": ("f4", (96, 1))},
        {"quant_method": "compressed-tensors", "format": "int-quantized"},
    ),
    "packed integers": ({"weight": ("u1", (24, 48))}, {"quant_method": "bitnet"}),
    "fp8 with one scale per tensor": (
        {"weight": (E4M3, (96, 48)), "weight_scale": ("f4", ())},
        {"quant_method": "fp8", "activation_scheme": "static"},
    ),
    "fp8 with one scale per output": (
        {"weight": (E4M3, (96, 48)), "weight_scale": ("f4", (96, 1))},
        {"quant_method": "fp8"},
    ),
    "compressed-tensors": (
        {"weight": (E4M3, (96, 48)), "weight_scale": ("f4", (96, 1))},
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
    ),
}


def quantized(form: str, source, target, matrices=("gate_proj.weight", "up_proj.weight"), **config):
    """Copies a checkpoint whose matrices of 96 outputs and 48 inputs are stored in a format, with zeros."""
    tensors, described = FORMATS[form]

    def change(name, array):
        if not name.endswith(matrices):
            return array
        return {name.removesuffix("weight") + end: np.zeros(shape, kind) for end, (kind, shape) in tensors.items()}

    return rewrite(source, target, change, **({"quantization_config": described} if described else {}), **config)


@pytest.mark.parametrize("form", FORMATS)
def test_the_format_is_named_first(form, tmp_path):
    source = quantized(form, path("qwen3"), tmp_path / "source")
    with pytest.raises(CheckpointFileError) as caught:
        convert.to_mtpjax(source, tmp_path / "ours")
    message = str(caught.value)
    facts = inspect(source)
    assert facts["problems"][0] == message and any("not loadable" in line for line in format_lines(facts))
    assert form in message and "gate_proj" in message and "implies" not in message
    described = FORMATS[form][1]
    if not form.startswith("fp8"):
        assert described is None or described["quant_method"] in message
    assert "What to do:" in message


def test_other_files_may_describe_the_format(tmp_path):
    source = quantized("MLX", path("qwen3"), tmp_path / "mlx", quantization={"group_size": 32, "bits": 4})
    assert "MLX (config.json: group_size 32, bits 4)" in inspect(source)["problems"][0]
    source = quantized("ModelOpt NVFP4", path("qwen3"), tmp_path / "modelopt")
    values = json.loads((source / "config.json").read_text())
    del values["quantization_config"]
    (source / "config.json").write_text(json.dumps(values))
    (source / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert 'hf_quant_config.json: quant_algo "NVFP4"' in inspect(source)["problems"][0]


def test_a_configuration_that_the_tensors_contradict_is_reported(tmp_path, caplog):
    config = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    source = rewrite(path("qwen3"), tmp_path / "source", lambda name, array: array, **config)
    assert not inspect(source)["problems"] and "but the tensors are not" in caplog.text


def test_gpt_oss_in_mxfp4_says_what_to_do(tmp_path):
    def change(name, array):
        if not name.endswith("experts.gate_up_proj"):
            return array
        return {f"{name}_blocks": np.zeros((2, 4, 1, 16), "u1"), f"{name}_scales": np.zeros((2, 4, 1), "u1")}

    config = {"quantization_config": {"quant_method": "mxfp4"}}
    source = rewrite(path("gpt_oss"), tmp_path / "source", change, **config)
    with pytest.raises(CheckpointFileError, match=r"MXFP4 .*Mxfp4Config\(dequantize=True\)"):
        inspect(source)


def test_a_drafter_names_its_format_too(tmp_path):
    source = drafter_path("eagle3") / "draft"

    def change(name, array):
        packed = {name: np.zeros((4, 4), "u4"), name.replace("weight", "scales"): np.zeros(4, "f2")}
        return packed if name.endswith("up_proj.weight") else array

    drafter = rewrite(source, tmp_path / "drafter", change)
    trunk = json.loads((source.parent / "trunk" / "config.json").read_text())
    sizes = TrunkSizes(trunk["vocab_size"], trunk["hidden_size"], trunk["num_hidden_layers"])
    with pytest.raises(CheckpointFileError, match="quantized: MLX"):
        read_drafter(drafter, sizes, methods=METHODS)
