"""`mtpjax plan`."""

import dataclasses
import math
import pathlib
import sys

from mtpjax.cli.common import add_model_type_flag, add_plot_formats_flag, check_minimums, check_output, write_json
from mtpjax.cli.config_flags import flag_names
from mtpjax.cli.help import command_parser
from mtpjax.cli.mesh_flags import add_mesh_flag, parse_mesh
from mtpjax.cli.prediction import DEVICE_NAMES, read_model


def add_commands(commands) -> None:
    plan = command_parser(
        "Estimate how a model would run on several GPUs before you rent them. For every mesh that divides the model, "
        "show the memory per GPU, the largest batch and context, the time per round and the speedup from drafting. The "
        "sizes of weights, caches and state are exact. Temporary memory and times are estimates, not measurements; "
        "--compile compiles the decoding call for H100s instead, without a GPU."
    )
    group = plan.flag_group("model")
    group.add_argument("model", help="a preset, such as deepseek-v3, a checkpoint, or a folder with only config.json")
    add_model_type_flag(plan)
    group.add_argument(
        "--weights",
        choices=("stored", "fp8", "bfloat16"),
        default="stored",
        help="dtype of the weight matrices; stored: the checkpoint's, or bfloat16 for a preset",
    )
    group = plan.flag_group("devices")
    group.add_argument(
        "--device", default="h100", choices=DEVICE_NAMES, metavar="NAME", help=f"GPU model: {', '.join(DEVICE_NAMES)}"
    )
    group.add_argument("--count", type=int, default=8, help="number of GPUs")
    add_mesh_flag(plan, "mesh to plan (default: every data x tensor mesh; with --train, every fsdp x expert mesh)")
    group.add_argument(
        "--compile",
        action="store_true",
        help="also compile the decoding call for H100s, on the fastest mesh that fits, or with --train the update, on "
        "the first mesh that fits; needs no GPU and takes minutes",
    )
    group = plan.flag_group("requests")
    group.add_argument(
        *flag_names("batch_size"), type=int, default=8, help="number of rows to decode together, or in an update"
    )
    group.add_argument("--context", type=int, help="tokens per row (default: 4096, or the model's maximum if lower)")
    group.add_argument("--prefill-chunk", type=int, help="tokens per prefill pass (default: the same as for decoding)")
    group = plan.flag_group("drafts")
    group.add_argument(
        *flag_names("num_steps"), type=int, help="draft levels per round (default: 1 with MTP modules, else 0)"
    )
    group.add_argument(
        "--accept-length",
        type=float,
        help="accept length to assume, including the bonus token (default: from a conditional acceptance rate of 0.8 "
        "at every level)",
    )
    plan.flag_group("training").add_argument(
        "--train",
        nargs="?",
        const="all",
        choices=("all", "modules"),
        help="plan training instead: the memory of an update for each remat, its time and its utilisation, with all "
        "parameters trained (default) or only the MTP modules on a frozen trunk; --batch-size is spread over the GPUs, "
        "and --num-steps is the number of trained depths",
    )
    group = plan.flag_group("output")
    group.add_argument("--output", metavar="FILE", help="JSON file to write; the plot is saved under the same name")
    add_plot_formats_flag(plan)
    commands.add_subcommand("plan", plan, help="estimate a model's memory and speed on several GPUs")


def _load_of(options, config):
    """Returns the `Load` that the flags describe. Raises ValueError for impossible draft levels or accept lengths."""
    from mtpjax.evaluation.plan_report import Load
    from mtpjax.evaluation.roofline import tokens_per_round

    # One draft level is the default for a model with MTP modules.
    num_steps = min(1, config.num_mtp_modules) if options.num_steps is None else options.num_steps
    check_minimums(options, num_steps=0)
    if num_steps and not config.num_mtp_modules:
        raise ValueError(f"num_steps must be 0 for a model without MTP modules, got {num_steps}")
    positions = config.max_position_embeddings
    context = min(4096, positions) if options.context is None else options.context
    if context > positions:
        limit = f"the model's maximum length of {positions} tokens (max_position_embeddings)"
        print(f"mtpjax plan: --context {context} exceeds {limit}", file=sys.stderr)
    # Without a measured accept length, every level is assumed to be accepted with the same probability.
    accept_length = tokens_per_round(0.8, num_steps) if options.accept_length is None else options.accept_length
    if not 1 <= accept_length <= num_steps + 1:
        limits = f"within 1..{num_steps + 1} with {num_steps} draft levels"
        raise ValueError(f"accept_length must be {limits}, got {accept_length}")
    return Load(options.batch_size, context, num_steps, accept_length, options.prefill_chunk)


def _compile_best(result, config, params) -> None:
    """Compiles the decoding call for the fastest mesh that fits, and stores XLA's numbers in the result."""
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


def _plan(options) -> int:
    import rich.console

    from mtpjax.evaluation import plan, plan_report
    from mtpjax.evaluation.compiled_call import stored_shapes
    from mtpjax.evaluation.plan_plots import plot_plan
    from mtpjax.evaluation.roofline import DEVICES

    # 1. Check the flags before the model is read.
    check_output(options)
    check_minimums(options, count=1)
    if options.compile and options.device != "h100":
        raise ValueError(f"--compile compiles for H100s, not for {options.device}")
    # 2. Read the shapes of the weights, in the requested dtype. No weights are read.
    device, console, sizes = DEVICES[options.device], rich.console.Console(), parse_mesh(options.mesh)
    config, params = read_model(options.model, options.model_type)
    if params is None or options.weights != "stored":
        params = stored_shapes(config, has_fp8=options.weights == "fp8")
    load = _load_of(options, config)
    # A plan for training has a different table, and no rounds.
    if options.train is not None:
        return _plan_training(options, config, params, load, sizes)
    # 3. Compare all meshes, or only the one in --mesh.
    if sizes.keys() & {"fsdp", "context"} or (sizes and math.prod(sizes.values()) != options.count):
        raise ValueError(
            f"--mesh {options.mesh}: data * expert * tensor must be {options.count} (--count), without fsdp and context"
        )
    meshes = [sizes] if sizes else plan.list_meshes(options.count)
    result = plan_report.compare_meshes(config, params, device, meshes, load)
    for line in plan_report.describe(result, device, options.count):
        console.print(line)
    # 4. Add XLA's numbers to the estimates, and then write the JSON file and the plot.
    if options.compile and result.best is not None:
        _compile_best(result, config, params)
        console.print(plan_report.compiled_line(result))
    if options.output is not None:
        write_json(options.output, result.to_json())
        title = f"Plan of {pathlib.Path(options.model).name} on {options.count} {device.name}: {options.batch_size} "
        title += f"rows of {load.context} tokens\nComputed and estimated, not measured"
        plot_plan(pathlib.Path(options.output).with_suffix(""), result, device, options.plot_formats, title=title)
    return 0 if result.best is not None else 1


def _plan_training(options, config, params, load, sizes) -> int:
    import rich.console

    from mtpjax.evaluation.compiled_call import h100_mesh
    from mtpjax.evaluation.roofline import DEVICES
    from mtpjax.training import update_plan
    from mtpjax.training.compiled_update import compile_update
    from mtpjax.training.initial_model import check_mesh_fits
    from mtpjax.training.update_memory import REMATS, UpdateShape

    if "tensor" in sizes or (sizes and math.prod(sizes.values()) != options.count):
        raise ValueError(
            f"--mesh {options.mesh}: data * fsdp * expert * context must be {options.count} (--count), without tensor"
        )
    device, console = DEVICES[options.device], rich.console.Console()
    # The axis "context" splits each row by tokens, and the other axes split the rows.
    check_mesh_fits(sizes, config)
    parts = sizes.get("context", 1)
    if parts > 1 and load.context % (2 * parts):
        raise ValueError(f"--context {load.context} must be a multiple of {2 * parts} for --mesh {options.mesh}")
    shape = UpdateShape(
        tokens=-(-options.batch_size * parts // options.count) * load.context // parts,
        row_length=load.context,
        trains=options.train,
        num_depths=load.num_steps,
        remat=REMATS[-1],
    )
    meshes = [sizes] if sizes else list(update_plan.list_train_meshes(config, options.count))
    rows = update_plan.train_rows(config, params, device, meshes, shape)
    console.print(update_plan.train_table(rows, device, shape))
    fitting = [row for row in rows if row["fits"]]
    if options.compile and fitting:
        best = fitting[0]
        chosen = dataclasses.replace(shape, remat=best["remat"])
        found = compile_update(config, params, h100_mesh(best["mesh"]), chosen)
        best["compiled"] = {"arguments": found.arguments, "temp": found.temp, "cpu_seconds": found.seconds}
        console.print(update_plan.compiled_line(best, found))
    write_json(options.output, rows)
    return 0 if fitting else 1


COMMANDS = {"plan": _plan}
