"""Changed copies of Hugging Face checkpoints, as fine-tuning tools write them."""

import json
import pathlib
import shutil

import numpy as np

from conversion.files import CheckpointFiles
from conversion.load_plan import make_plan
from conversion.names import module_prefixes
from conversion.shards import TensorEntry, make_shard, write_shards
from conversion.weight_files import INDEX


def rewrite(source, target, change, **config) -> pathlib.Path:
    """Copies a checkpoint into one file of tensors, each as `change(name, array)` returns it: None drops the tensor.

    `change` may return `(new name, array)` to rename a tensor, or a dict of tensors. `config` changes keys of the
    configuration.
    """
    target = pathlib.Path(target)
    target.mkdir()
    with CheckpointFiles(source) as files:
        for name in files.other_files():
            if name != INDEX:
                shutil.copyfile(files.path / name, target / name)
        tensors = {}
        for name in files.tensors:
            made = change(name, files.read(name))
            if isinstance(made, dict):
                tensors |= made
            elif made is not None:
                new, array = made if isinstance(made, tuple) else (name, made)
                tensors[new] = array
    entries = [TensorEntry(name, array.dtype, array.shape) for name, array in tensors.items()]
    shard = make_shard("model.safetensors", entries, {"format": "pt"})
    write_shards(target, [shard], lambda entry: iter([tensors[entry.name]]))
    values = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(values | config))
    return target


def split(source, target, is_beside, name: str) -> pathlib.Path:
    """Copies a checkpoint into one file, and the tensors that `is_beside(name)` chooses into another file `name`."""
    target = rewrite(source, target, lambda tensor, array: None if is_beside(tensor) else array)
    beside = rewrite(source, f"{target}_beside", lambda tensor, array: array if is_beside(tensor) else None)
    (beside / "model.safetensors").rename(target / name)
    return target


def drop_modules(source, target, change=lambda name, array: array) -> pathlib.Path:
    """Copies a checkpoint without the tensors of its MTP modules; `config.json` still names them."""
    with CheckpointFiles(source) as files:
        plan = make_plan(files, is_copied=True)
    prefixes = module_prefixes(plan.config, plan.layout)
    return rewrite(source, target, lambda name, array: None if name.startswith(prefixes) else change(name, array))


def tune(name: str, array: np.ndarray, *, scale: float = 0.02) -> np.ndarray:
    """Adds noise to the trunk's final norm, embedding and attention outputs: a little, as fine-tuning does."""
    if array.dtype.itemsize > 1 and name.endswith(("o_proj.weight", "embed_tokens.weight", "norm.weight")):
        noise = np.random.default_rng(len(name)).normal(0, scale, array.shape)
        return (array.astype(np.float32) + noise.astype(np.float32)).astype(array.dtype)
    return array
