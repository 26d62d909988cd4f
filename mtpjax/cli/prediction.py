"""`mtpjax profile --predict`."""

import difflib
import json
import pathlib

from mtpjax.atomic import check_output_file
from mtpjax.cli.common import model_type
from mtpjax.cli.help import flag_group
from mtpjax.errors import UsageError

DEVICE_NAMES = ("h100", "h200", "mi300x")  # of `mtpjax.evaluation.roofline.DEVICES`, which imports JAX
MAX_CONFIG_BYTES = 16 * 2**20  # of a config.json


def add_prediction_flags(profile) -> None:
    """Adds the flags of the prediction to the parser of `profile`."""
    predict = flag_group(profile, "prediction, without a GPU and without weights")
    predict.add_argument(
        "--predict",
        action="store_true",
        help="predict the time of rounds on GPUs from bytes, operations and kernel launches instead of measuring it. "
        "--model-path may be a preset, such as deepseek-v3, or a folder that has only a config.json",
    )
    predict.add_argument(
        "--device",
        nargs="+",
        default=list(DEVICE_NAMES),
        choices=DEVICE_NAMES,
        metavar="NAME",
        help=f"GPUs to predict: {', '.join(DEVICE_NAMES)}",
    )
    predict.add_argument("--num-devices", type=int, default=1, help="GPUs that share the model")
    predict.add_argument(
        "--assumed-acceptance",
        type=float,
        default=0.8,
        help="probability that a draft level is accepted, given that the levels before it are",
    )
    predict.add_argument(
        "--weight-bytes", type=float, default=None, help="bytes of a weight (default: the checkpoint's, else 2)"
    )


def run_prediction(options) -> int:
    """Prints predicted rounds, and returns the exit code."""
    import rich.console

    from mtpjax.atomic import write_text
    from mtpjax.evaluation.roofline_report import tables

    # Check the flags: predictions exist for chains of MTP modules only.
    if options.output is not None:
        check_output_file(options.output)
    if options.speculative_draft_model_path is not None:
        raise ValueError(
            "--predict knows the kernels that MTP modules launch, and not those of other drafters: "
            "leave --predict out to measure it on this device"
        )
    if options.num_steps < 0 or options.topk != 1:
        raise ValueError(
            f"--predict takes chains of 0 or more drafts, got num_steps {options.num_steps}, topk {options.topk}"
        )
    # Read shapes only. A preset has no files, so its weights count as bfloat16.
    config, params = read_model(options.model_path, model_type(options))
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
    if options.output is not None:
        write_text(options.output, json.dumps(rows, indent=1) + "\n")
    console = rich.console.Console()
    for table in printed:
        console.print(table)
    return 0


def read_model(path: str, family: str | None):
    """Reads the data for a prediction from a preset, a checkpoint or a folder with only `config.json`.

    Returns:
        The config, and the shapes of the parameters as they are stored; None for a preset, which has no files.

    Raises:
        UsageError: the name is neither that of a preset nor a path.
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
        near = ", ".join(difflib.get_close_matches(path, presets, n=3) or presets)
        raise UsageError(f"{path} does not exist here, and it is not a preset; presets are {near}")
    has_config_alone = (folder / "config.json").is_file() and not any(folder.glob("*.safetensors"))
    if has_config_alone and not is_checkpoint(folder):
        parsed = parse_config(read_json_file(folder / "config.json", max_bytes=MAX_CONFIG_BYTES), family)
        return parsed.model, stored_shapes(parsed.model, has_fp8=parsed.block is not None)
    return stored_params(path, model_type=family)


def _bytes_of_weight(params) -> float:
    """Returns the mean bytes per weight; scales of fp8 blocks count as bytes of their weights."""
    import math

    import jax

    leaves = [
        (leaf, getattr(path[-1], "name", "") != "scales") for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    ]
    nbytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf, _ in leaves)
    return nbytes / sum(math.prod(leaf.shape) for leaf, is_weight in leaves if is_weight)
