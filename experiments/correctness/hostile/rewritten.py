"""Cases whose right answer is known, because they are golden checkpoints written in a different form.

Other tools write these forms, and each represents the same model. So the loaded parameters must be the same, or the
logits if norms are stored differently. An error that the library raises passes too, because it is not a wrong result.
The forms in `CHANGED` represent a different model or an unsupported one, so only an error passes.
"""

import dataclasses
import itertools
import json
import pathlib
import random
import shutil
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

from conversion.files import CheckpointFiles
from conversion.weight_files import INDEX, SINGLE
from experiments.common import ROOT

GOLDEN = ROOT / "tests" / "golden"
BASES = ("qwen3", "qwen3_5_tied_bf16", "glm4_moe_lite", "ernie4_5_moe", "hy_v3", "deepseek_v3_fp8", "gpt_oss")
FLOATS = (np.float32, np.float16, np.float64, ml_dtypes.bfloat16)
# Settings of packed formats, and the tensors that they store instead of a weight.
PACKED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "mlx": ({"bits": 4, "group_size": 32}, ("weight", "scales", "biases")),
    "awq": ({"quant_method": "awq", "bits": 4}, ("qweight", "scales", "qzeros")),
    "gptq": ({"quant_method": "gptq", "bits": 4}, ("qweight", "scales", "qzeros", "g_idx")),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ("weight", "weight.absmax")),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ("weight", "weight_scale")),
}
LAYER_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")


@dataclasses.dataclass
class Form:
    """A checkpoint that is about to be written.

    Attributes:
        files: the tensors of each file.
        config: content of `config.json`.
        index: file of each tensor in the index; None: no index is written.
    """

    files: dict[str, dict[str, np.ndarray]]
    config: dict[str, Any]
    index: dict[str, str] | None = None

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        return self.files[SINGLE]


def read_form(folder: pathlib.Path) -> Form:
    """Reads a checkpoint as a `Form` with one file."""
    with CheckpointFiles(folder) as files:
        tensors = {name: files.read(name) for name in files.tensors}
        return Form({SINGLE: tensors}, files.json("config.json"))


def write_form(form: Form, source: pathlib.Path, target: pathlib.Path) -> None:
    """Writes a checkpoint: the weights of `form`, and all other files of `source`."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors", INDEX, "expected*"))
    (target / "config.json").write_text(json.dumps(form.config))
    for file, tensors in form.files.items():
        (target / file).write_bytes(safetensors.numpy.save(tensors, {"format": "pt"}))
    if form.index is not None:
        (target / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": form.index}))


def _norms(form: Form) -> list[str]:
    return [name for name in form.tensors if name.endswith(LAYER_NORMS)]


def _is_of_module(name: str, form: Form) -> bool:
    """Returns whether a tensor belongs to an MTP module, which is `mtp.*` or a layer after the trunk's last layer."""
    num_layers = form.config.get("text_config", form.config)["num_hidden_layers"]
    parts = name.split(".")
    numbers = [int(part) for before, part in itertools.pairwise(parts) if before == "layers"]
    return "mtp" in parts or "mtp_" in name or (bool(numbers) and numbers[0] >= num_layers)


def _as_new_file(form: Form, rng: random.Random) -> None:
    """Writes a new `model.safetensors` next to the index and shards of older weights."""
    older = {name: array.copy() for name, array in form.tensors.items()}
    name = rng.choice(_norms(form))
    older[name] = (older[name].astype(np.float32) + 0.5).astype(older[name].dtype)
    form.files["model-00001-of-00001.safetensors"] = older
    form.index = dict.fromkeys(older, "model-00001-of-00001.safetensors")


def _as_sidecar(form: Form, rng: random.Random) -> None:
    """Moves the modules' tensors to a file that is not in the index."""
    modules = [name for name in form.tensors if _is_of_module(name, form)]
    file = rng.choice(["mtp.safetensors", "model-mtp.safetensors", "model.mtp.safetensors", "nextn.safetensors"])
    form.index = {name: SINGLE for name in form.tensors if name not in modules}
    if modules:
        form.files[file] = {name: form.tensors.pop(name) for name in modules}


def _with_a_prefix(form: Form, rng: random.Random) -> None:
    """Adds the prefix of a multimodal model to all names or only to the modules' names."""
    prefix, of_modules = rng.choice(["language_model.", "model.", "model.language_model."]), rng.random() < 0.5
    chosen = [name for name in form.tensors if not of_modules or _is_of_module(name, form)]
    form.files[SINGLE] = {(prefix + name if name in chosen else name): array for name, array in form.tensors.items()}


def _in_other_floats(form: Form, rng: random.Random) -> None:
    """Stores some tensors in a different float type that holds their values exactly."""
    for name in rng.sample(sorted(form.tensors), min(len(form.tensors), rng.choice([1, 3, 1000]))):
        array, dtype = form.tensors[name], rng.choice(FLOATS)
        if array.dtype in FLOATS and (array.astype(dtype).astype(array.dtype) == array).all():
            form.tensors[name] = array.astype(dtype)


def _with_powers_of_two(form: Form) -> dict[str, np.ndarray]:
    """Rounds all scales of fp8 weights to powers of two, and returns them."""
    scales = {name: array for name, array in form.tensors.items() if name.endswith("_scale_inv")}
    for name, array in scales.items():
        form.tensors[name] = scales[name] = np.exp2(np.round(np.log2(array))).astype(np.float32)
    return scales


def _with_exponents(form: Form, rng: random.Random) -> Form:
    """Stores scales as the bytes of their exponents. Returns the equivalent form with float32 scales."""
    scales = _with_powers_of_two(form)
    same = dataclasses.replace(form, files={SINGLE: dict(form.tensors)})
    kind = rng.choice([np.uint8, ml_dtypes.float8_e8m0fnu, ml_dtypes.bfloat16])
    for name, array in scales.items():
        exponents = (np.log2(array) + 127).astype(np.uint8)
        form.tensors[name] = array.astype(kind) if kind is ml_dtypes.bfloat16 else exponents.view(kind)
    return same


def _with_other_norms(form: Form, rng: random.Random) -> None:
    """Stores zero-centred norms of the trunk or of the modules as `1 + w` instead of w."""
    of_modules = rng.random() < 0.7
    shifted = ("norm.weight", "layernorm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")
    if not form.config["model_type"].startswith(("qwen3_5", "qwen3_next")):
        return
    for name, array in form.tensors.items():
        # The gated norm of linear attention is not zero-centred.
        if name.endswith(shifted) and "linear_attn" not in name and _is_of_module(name, form) == of_modules:
            form.tensors[name] = (array.astype(np.float32) + 1).astype(np.float32)


def _with_a_repeating_sidecar(form: Form, rng: random.Random) -> None:
    """Moves the modules to an additional file that repeats embedding and head, as exports do."""
    _as_sidecar(form, rng)
    for file, tensors in form.files.items():
        if file != SINGLE:
            shared = [name for name in form.tensors if name.endswith(("embed_tokens.weight", "lm_head.weight"))]
            tensors.update({name: form.tensors[name].copy() for name in shared})


def _with_modules_twice(form: Form, rng: random.Random) -> None:
    """Keeps the modules in the checkpoint, and adds identical copies in an additional file."""
    modules = {name: array.copy() for name, array in form.tensors.items() if _is_of_module(name, form)}
    form.index = dict.fromkeys(form.tensors, SINGLE)
    if modules:
        form.files[rng.choice(["mtp.safetensors", "nextn.safetensors"])] = modules


def _with_other_scales(form: Form, rng: random.Random) -> Form:
    """Stores scales in a different type that holds them exactly, or under the other name."""
    scales = _with_powers_of_two(form)
    same = dataclasses.replace(form, files={SINGLE: dict(form.tensors)})
    kind, end = rng.choice([ml_dtypes.bfloat16, np.float32]), rng.choice(["_scale", "_scale_inv"])
    for name, array in scales.items():
        form.tensors.pop(name)
        form.tensors[name.removesuffix("_scale_inv") + end] = array.astype(kind)
    return same


def _with_another_tie(form: Form, rng: random.Random) -> None:
    """Stores a tied head only under its own name, under both names, or declared at the other level of the config."""
    text = form.config.get("text_config", form.config)
    if not text.get("tie_word_embeddings", form.config.get("tie_word_embeddings")):
        return
    embedding = next(name for name in form.tensors if name.endswith("embed_tokens.weight"))
    how = rng.choice(["head", "both", "top", "text"])
    if how in ("head", "both"):
        form.tensors["lm_head.weight"] = form.tensors[embedding]
    if how == "head":
        del form.tensors[embedding]
    if "text_config" in form.config and how in ("top", "text"):
        removed = form.config if how == "text" else text
        removed.pop("tie_word_embeddings", None)
        (text if how == "text" else form.config)["tie_word_embeddings"] = True


def _without_a_tensor(form: Form, rng: random.Random) -> None:
    form.tensors.pop(rng.choice(_norms(form)))


def _with_integer_scales(form: Form, rng: random.Random) -> None:
    scales = [name for name in form.tensors if name.endswith("_scale_inv")]
    for name in scales:
        form.tensors[name] = (np.log2(form.tensors[name]) + 127).astype(rng.choice([np.int32, np.int8, np.int16]))
    if not scales:
        _without_a_tensor(form, rng)


def _with_integer_weights(form: Form, rng: random.Random) -> None:
    name = rng.choice([*_norms(form), *(name for name in form.tensors if name.endswith("o_proj.weight"))])
    form.tensors[name] = np.round(form.tensors[name].astype(np.float32) * 100).astype(rng.choice([np.int8, np.int32]))


def _with_a_bias(form: Form, rng: random.Random) -> None:
    """Adds a bias that the configuration does not mention."""
    names = [name for name in form.tensors if name.endswith(("o_proj.weight", "down_proj.weight", "gate_proj.weight"))]
    names = [name for name in names if name.removesuffix("weight") + "bias" not in form.tensors]
    name = rng.choice(names or _norms(form))
    form.tensors[name.removesuffix("weight") + "bias"] = np.full(len(form.tensors[name]), 0.5, np.float32)


def _packed(form: Form, rng: random.Random) -> None:
    """Stores one layer's matrices in a packed format, with or without declaring it in the configuration."""
    method = rng.choice(sorted(PACKED))
    settings, parts = PACKED[method]
    for name in [name for name in form.tensors if name.endswith(("o_proj.weight", "down_proj.weight"))]:
        rows, columns = form.tensors.pop(name).shape[-2:]
        stem = name.removesuffix("weight")
        words = np.zeros((rows, columns // 8 + 1), np.uint32 if method == "mlx" else np.uint8)
        form.tensors.update({f"{stem}{parts[0]}": words})
        form.tensors.update({f"{stem}{part}": np.zeros((rows, 2), np.float16) for part in parts[1:]})
    if rng.random() < 0.7:
        form.config["quantization" if method == "mlx" else "quantization_config"] = settings


SAME: dict[str, Callable[[Form, random.Random], Form | None]] = {
    "a new file beside an old index": _as_new_file,
    "modules in a file that the index lacks": _as_sidecar,
    "names with a prefix": _with_a_prefix,
    "several types of floats": _in_other_floats,
    "scales as exponents": _with_exponents,
    "norms stored otherwise": _with_other_norms,
    "a tie written otherwise": _with_another_tie,
    "a further file that repeats embedding and head": _with_a_repeating_sidecar,
    "modules twice": _with_modules_twice,
    "scales of another type or name": _with_other_scales,
}
CHANGED: dict[str, Callable[[Form, random.Random], None]] = {
    "a tensor is missing": _without_a_tensor,
    "integer scales": _with_integer_scales,
    "integer weights": _with_integer_weights,
    "a bias that the configuration does not name": _with_a_bias,
    "packed weights": _packed,
}


def draw(rng: random.Random, sandbox: pathlib.Path) -> dict[str, Any]:
    """Draws a case: a base, a form, and the seed for the form's random choices."""
    base, how = rng.choice(BASES), rng.choice([*SAME, *CHANGED])
    case = {"action": "rewritten", "what": f"{base}: {how}", "base": base, "how": how, "is_slow": True}
    return {**case, "seed": rng.randrange(2**31)}


def rewritten(case: dict[str, Any], folder: pathlib.Path) -> str | None:
    """Writes and loads the case's checkpoint.

    Args:
        case: as `draw` makes it.
        folder: an empty folder.

    Returns:
        What is wrong with the answer; None if nothing is wrong.

    Raises:
        ValueError: the checkpoint is rejected.
    """
    import mtpjax

    rng, source = random.Random(case["seed"]), GOLDEN / case["base"]
    form = read_form(source)
    expected = (SAME | CHANGED)[case["how"]](form, rng) or read_form(source)
    write_form(form, source, folder / "rewritten")
    write_form(expected, source, folder / "expected")
    # An error ends the case here, and `worker` judges its message.
    found = mtpjax.load(folder / "rewritten")
    if case["how"] in CHANGED:
        return "loads, but the files mean another model"
    return _compare(found, mtpjax.load(folder / "expected")) or _convert_and_back(folder)


def _convert_and_back(folder: pathlib.Path) -> str | None:
    """Converts the rewritten checkpoint and back, which must give the same files except for unread ones."""
    from mtpjax.io import convert
    from mtpjax.io.inspect import inspect

    convert.to_mtpjax(folder / "rewritten", folder / "ours")
    convert.to_hugging_face(folder / "ours", folder / "back")
    before, after = (
        {file.name: file.read_bytes() for file in (folder / name).iterdir()} for name in ("rewritten", "back")
    )
    names = (before.keys() | after.keys()) - set(inspect(folder / "rewritten")["unread"])
    differing = sorted(name for name in names if before.get(name) != after.get(name))
    return f"conversion there and back changes {', '.join(differing)}" if differing else None


def _compare(found: tuple[Any, Any], expected: tuple[Any, Any]) -> str | None:
    """Compares parameters, or logits if the configurations differ."""
    import jax
    import jax.numpy as jnp

    import mtpjax

    as_float32 = lambda params: jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), params)
    (model, params), (model_0, params_0) = ((model, as_float32(params)) for model, params in (found, expected))
    if model.config == model_0.config:
        if jax.tree.structure(params) != jax.tree.structure(params_0):
            return "loads other parameters"
        differs = jax.tree.leaves(jax.tree.map(lambda a, b: not np.array_equal(a, b), params, params_0))
        return "loads other values" if any(differs) else None
    if model.config.num_mtp_modules != model_0.config.num_mtp_modules:
        return f"loads {model.config.num_mtp_modules} MTP modules of {model_0.config.num_mtp_modules}"
    tokens = jnp.arange(12)[None, :] % model.config.vocab_size
    outputs = [mtpjax.forward(params, tokens, model=model) for model, params in ((model, params), (model_0, params_0))]
    for name in ("logits", "mtp_logits"):
        gap = (
            max(
                float(np.abs(np.asarray(a) - np.asarray(b)).max(initial=0))
                for a, b in zip(*(jax.tree.leaves(getattr(output, name)) for output in outputs), strict=True)
            )
            if jax.tree.leaves(getattr(outputs[0], name))
            else 0.0
        )
        if gap > 1e-3:
            return f"{name} differ by {gap:.3g}"
    return None
