"""`mtpjax profile --predict`."""

import pathlib

from mtpjax.errors import UsageError
from mtpjax.messages import did_you_mean

DEVICE_NAMES = ("h100", "h200", "mi300x")  # keys of `mtpjax.evaluation.roofline.DEVICES`, which imports JAX
MAX_CONFIG_BYTES = 16 * 2**20  # maximum size of a config.json


def add_prediction_flags(profile) -> None:
    predict = profile.flag_group("prediction (needs no GPU and no weights)")
    predict.add_argument(
        "--predict",
        action="store_true",
        help="instead of measuring, estimate round times on GPUs from bytes, FLOPs and kernel launches. "
        "--model-path may then be a preset, such as deepseek-v3, or a folder with only config.json",
    )
    predict.add_argument(
        "--device",
        nargs="+",
        default=list(DEVICE_NAMES),
        choices=DEVICE_NAMES,
        metavar="NAME",
        help=f"GPU models: {', '.join(DEVICE_NAMES)}",
    )
    predict.add_argument("--num-devices", type=int, default=1, help="number of GPUs that the model is sharded over")
    predict.add_argument(
        "--assumed-acceptance",
        type=float,
        default=0.8,
        help="conditional acceptance rate to assume for every draft level",
    )
    predict.add_argument("--weight-bytes", type=float, help="bytes per weight (default: the checkpoint's, else 2)")


def print_prediction(options) -> list:
    """Prints the predicted round times, and returns their rows."""
    import rich.console

    from mtpjax.evaluation.roofline_report import tables

    # Check the flags, because predictions exist only for chains of MTP modules.
    if options.speculative_draft_model_path is not None:
        raise ValueError("--predict supports MTP modules only; without --predict, other drafters can be measured")
    if options.num_steps < 0 or options.topk != 1:
        raise ValueError(f"--predict needs --num-steps 0 or more and --topk 1, got {options.num_steps}, {options.topk}")
    # Read shapes only. A preset has no files, so its weights count as bfloat16.
    config, params = read_model(options.model_path, options.model_type)
    weight_bytes = 2.0 if params is None else _bytes_of_weight(params)
    rows, printed = tables(
        config,
        devices=options.device,
        batches=options.batch_size,
        num_steps=options.num_steps if config.num_mtp_modules else 0,
        acceptance_rate=options.assumed_acceptance,
        context=options.context,
        weight_bytes=weight_bytes if options.weight_bytes is None else options.weight_bytes,
        num_devices=options.num_devices,
    )
    console = rich.console.Console()
    for table in printed:
        console.print(table)
    return rows


def read_model(path: str, family: str | None):
    """Reads the config and shapes for a prediction from a preset, a checkpoint or a folder with only `config.json`.

    Returns:
        The config, and the shapes of the stored parameters, which are None for a preset because it has no files.

    Raises:
        UsageError: the name is neither a preset nor a path.
        CheckpointError: the checkpoint is missing, damaged or not supported.
    """
    from conversion.hf_config import parse_config
    from mtpjax.evaluation.compiled_call import stored_shapes
    from mtpjax.io.checkpoint_format import is_checkpoint
    from mtpjax.io.inspect import stored_params
    from mtpjax.models.presets import presets
    from mtpjax.safe_open import read_json_file

    folder = pathlib.Path(path)
    if path in presets and not folder.exists():
        return presets[path], None
    if "/" not in path and not folder.exists():
        hint = did_you_mean(path, presets) or f": the presets are {', '.join(presets)}"
        raise UsageError(f"{path} is neither an existing path nor a preset{hint}")
    has_config_alone = (folder / "config.json").is_file() and not any(folder.glob("*.safetensors"))
    if has_config_alone and not is_checkpoint(folder):
        parsed = parse_config(read_json_file(folder / "config.json", max_bytes=MAX_CONFIG_BYTES), family)
        return parsed.model, stored_shapes(parsed.model, has_fp8=parsed.block is not None)
    return stored_params(path, model_type=family)


def _bytes_of_weight(params) -> float:
    """Returns the mean bytes per weight, in which the bytes of fp8 block scales count towards their weights."""
    import math

    import jax

    leaves = jax.tree_util.tree_leaves_with_path(params)
    nbytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for _, leaf in leaves)
    return nbytes / sum(math.prod(leaf.shape) for path, leaf in leaves if getattr(path[-1], "name", "") != "scales")
