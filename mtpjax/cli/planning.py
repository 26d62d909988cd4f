"""`mtpjax plan`."""

import json
import math
import pathlib
import sys

from mtpjax.atomic import check_output_file
from mtpjax.cli.common import add_model_type_flag, add_plot_formats_flag
from mtpjax.cli.config_flags import flag_names
from mtpjax.cli.help import command_parser
from mtpjax.cli.mesh_flags import add_mesh_flag, parse_mesh
from mtpjax.cli.prediction import DEVICE_NAMES, read_model


def add_plan(commands) -> None:
    """Adds the command and its flags to the subcommands of the `mtpjax` parser."""
    plan = command_parser(
        "Plan a model on many GPUs before you rent them: memory per GPU, the largest batch and context, the time of a "
        "round and the speed-up of drafts, on every mesh that divides the model. Weights, caches and state are "
        "arithmetic. Temporary memory and times are estimates of what the kernels of this package could do, not "
        "measurements; --compile compiles the call for H100s instead, without a GPU."
    )
    group = plan.flag_group("model")
    group.add_argument(
        "model", help="a preset, such as deepseek-v3, a checkpoint, or a folder with nothing but config.json"
    )
    add_model_type_flag(plan)
    group.add_argument(
        "--weights",
        choices=("stored", "fp8", "bfloat16"),
        default="stored",
        help="dtype of the matrices; stored: the checkpoint's, and bfloat16 for a preset",
    )
    group = plan.flag_group("devices")
    group.add_argument(
        "--device",
        default="h100",
        choices=DEVICE_NAMES,
        metavar="NAME",
        help=f"kind of GPU: {', '.join(DEVICE_NAMES)}",
    )
    group.add_argument("--count", type=int, default=8, help="number of GPUs")
    add_mesh_flag(plan, "plan this mesh only (default: all of data x tensor)")
    group.add_argument(
        "--compile",
        action="store_true",
        help="also compile the fastest mesh that fits, for H100s and without one; takes minutes",
    )
    group = plan.flag_group("requests")
    group.add_argument(*flag_names("batch_size"), type=int, default=8, help="rows decoded together")
    group.add_argument(
        "--context", type=int, default=None, help="tokens of a row (default: 4096, if the model has as many positions)"
    )
    group.add_argument(
        "--prefill-chunk", type=int, default=None, help="tokens of a prefill pass (default: as decoding chooses)"
    )
    group = plan.flag_group("drafts")
    group.add_argument(
        *flag_names("num_steps"),
        type=int,
        default=None,
        help="draft levels per round (default: 1, and 0 for a model without MTP modules)",
    )
    group.add_argument(
        "--accept-length",
        type=float,
        default=None,
        help="tokens per round to assume, the bonus token included (default: as if each level were accepted with "
        "probability 0.8, given that the levels before it are)",
    )
    plan.flag_group("training").add_argument(
        "--train",
        nargs="?",
        const="all",
        default=None,
        choices=("all", "modules"),
        help="plan training instead: bytes of parameters and optimiser, for all parameters (default) or for the MTP "
        "modules on a frozen trunk",
    )
    plan.flag_group("output").add_argument(
        "--output", default=None, metavar="FILE", help="JSON file to write; the plot is saved under the same name"
    )
    add_plot_formats_flag(plan)
    commands.add_subcommand("plan", plan, help="what a model needs on many GPUs, and how fast it could be there")


def _load_of(options, config):
    """Returns the `Load` of the flags: draft levels only with MTP modules, and a context that the model has."""
    from mtpjax.evaluation.plan_report import Load
    from mtpjax.evaluation.roofline import tokens_per_round

    # One draft level is the default of a model with MTP modules.
    num_steps = min(1, config.num_mtp_modules) if options.num_steps is None else options.num_steps
    if num_steps < 0:
        raise ValueError(f"num_steps must be at least 0, got {num_steps}")
    if num_steps and not config.num_mtp_modules:
        raise ValueError(f"num_steps must be 0 for a model without MTP modules, got {num_steps}")
    positions = config.max_position_embeddings
    context = min(4096, positions) if options.context is None else options.context
    if context > positions:
        print(
            f"mtpjax plan: --context {context} is more than the {positions} positions of the "
            "model (max_position_embeddings)",
            file=sys.stderr,
        )
    # Without a measured accept length, every level is assumed to be accepted with the same probability.
    accept_length = tokens_per_round(0.8, num_steps) if options.accept_length is None else options.accept_length
    if not 1 <= accept_length <= num_steps + 1:
        raise ValueError(
            f"accept_length must be within 1..{num_steps + 1} with {num_steps} draft levels, got {accept_length}"
        )
    return Load(options.batch_size, context, num_steps, accept_length, options.prefill_chunk)


def _compile_best(result, config, params) -> None:
    """Compiles the fastest mesh that fits, and keeps XLA's own numbers in the result."""
    from mtpjax.evaluation.compiled_call import compile_call, h100_mesh
    from mtpjax.models.sharding import mesh_text

    best = result.best.plan
    print(f"compiling for {mesh_text(best.mesh)}", file=sys.stderr, flush=True)
    found = compile_call(
        config,
        h100_mesh(best.mesh),
        rows=best.rows,
        slots=best.slots,
        num_steps=result.load.num_steps,
        params=params,
        prefill_chunk=best.prefill_chunk,
    )
    result.compiled = {"arguments": found.arguments, "temp": found.temp, "cpu_seconds": found.seconds}
    result.compiled["collectives"] = sum(found.collectives.values())


def run_plan(options) -> int:
    """Prints the plans, and returns the exit code."""
    import rich.console

    from mtpjax.atomic import write_text
    from mtpjax.evaluation import plan, plan_report
    from mtpjax.evaluation.compiled_call import stored_shapes
    from mtpjax.evaluation.plan_plots import plot_plan
    from mtpjax.evaluation.roofline import DEVICES

    # 1. Check the flags before the model is read.
    if options.output is not None:
        check_output_file(options.output)
    if options.count < 1:
        raise ValueError(f"count must be at least 1, got {options.count}")
    if options.compile and options.device != "h100":
        raise ValueError(f"--compile compiles for H100s, not for {options.device}")
    # 2. Read the shapes of the weights, in the requested dtype. No weights are read.
    device, console = DEVICES[options.device], rich.console.Console()
    config, params = read_model(options.model, options.model_type)
    if params is None or options.weights != "stored":
        params = stored_shapes(config, has_fp8=options.weights == "fp8")
    # A plan for training has its own table, and no rounds.
    if options.train is not None:
        rows = plan_report.train_rows(config, params, device, count=options.count, trains=options.train)
        console.print(plan_report.train_table(rows, device, options.count))
        if options.output is not None:
            write_text(options.output, json.dumps(rows, indent=1) + "\n")
        return 0
    # 3. Compare all meshes, or check the one that --mesh names.
    load = _load_of(options, config)
    sizes = parse_mesh(options.mesh)
    if "fsdp" in sizes or (sizes and math.prod(sizes.values()) != options.count):
        raise ValueError(f"--mesh {options.mesh} must cover {options.count} GPUs with data, expert and tensor")
    meshes = [sizes] if sizes else plan.list_meshes(options.count)
    result = plan_report.compare_meshes(config, params, device, meshes, load)
    for line in plan_report.describe(result, device, options.count):
        console.print(line)
    # 4. XLA's own numbers beside the estimates, then JSON and the picture.
    if options.compile and result.best is not None:
        _compile_best(result, config, params)
        console.print(plan_report.compiled_line(result))
    if options.output is not None:
        write_text(options.output, json.dumps(result.to_json(), indent=1) + "\n")
        title = f"Plan of {pathlib.Path(options.model).name} on {options.count} {device.name}: {options.batch_size} "
        title += f"rows of {load.context} tokens\nComputed and estimated, not measured"
        picture = pathlib.Path(options.output).with_suffix("")
        plot_plan(picture, result, device, options.plot_formats, title=title)
    return 0 if result.best is not None else 1
