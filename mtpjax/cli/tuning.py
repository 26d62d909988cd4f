"""`mtpjax tune`."""

import sys

from mtpjax.cli.common import add_model_path_flag, model_type, set_threads
from mtpjax.cli.config_flags import SHAPE_FIELDS, add_config_flags, decode_settings
from mtpjax.cli.help import command_parser, flag_group
from mtpjax.console import progress_bar
from mtpjax.errors import printable
from mtpjax.messages import count_of


def add_tune(commands) -> None:
    """Adds the command and its flags to the subcommands of the `mtpjax` parser."""
    tune = command_parser(
        "Measure on this GPU whether each kernel or XLA is faster at the shapes that a model uses when it decodes. "
        "--implementation auto then chooses by these times, which are kept in the user's cache folder, for this kind "
        "of device, version of JAX and version of the kernels. Each time is kept as soon as it is measured: run the "
        "same command again to continue."
    )
    add_model_path_flag(tune)
    add_config_flags(tune, SHAPE_FIELDS, num_steps=3)
    group = flag_group(tune, "measurement")
    group.add_argument("--batch-size", type=int, nargs="+", default=[1, 8], help="batch sizes to measure")
    group.add_argument("--context", type=int, default=2048, help="tokens of a row that the KV cache has room for")
    group.add_argument("--prefill-chunk", type=int, default=512, help="tokens per row of a prefill pass")
    group.add_argument("--repeats", type=int, default=5, help="measurements of each kernel and of XLA")
    group.add_argument("--dry-run", action="store_true", help="list what would be measured, and measure nothing")
    group.add_argument("--again", action="store_true", help="measure again what was measured before")
    commands.add_subcommand("tune", tune, help="measure which kernels are fastest for a model on this GPU")


def run_tune(options) -> int:
    """Measures the shapes that have no times yet, and returns the exit code."""
    set_threads(options.model_path)
    import jax
    import rich.console

    from mtpjax.console import narrow_table
    from mtpjax.decoding.config import DecodeConfig
    from mtpjax.evaluation import tune
    from mtpjax.io.checkpoint import load
    from pallas_kernels import measurements

    # Check the settings before the model is loaded.
    config = DecodeConfig(**decode_settings(options))
    for name in ("context", "prefill_chunk", "repeats"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(options, name)}")
    if min(options.batch_size) < 1:
        raise ValueError(f"batch_size must be at least 1, got {min(options.batch_size)}")
    model, params = load(options.model_path, model_type=model_type(options))
    # Trace the decoding call to find the ops and shapes, and drop those that have times already.
    questions = tune.find_questions(
        params,
        model=model,
        config=config,
        batches=options.batch_size,
        context=options.context,
        prefill_chunk=options.prefill_chunk,
    )
    left = questions if options.again else tune.not_measured(questions)
    console = rich.console.Console()
    table = narrow_table()
    for heading in ("op", "shape", "xla, ms", "triton, ms"):
        table.add_column(heading)
    is_gpu = jax.default_backend() == "gpu"
    # Without a GPU, or in a dry run, only list the shapes.
    if options.dry_run or not is_gpu:
        for op, shape in left:
            table.add_row(op, _shape_text(shape), "", "")
        console.print(table)
        print(
            f"{count_of(len(questions), 'shape')}, {len(questions) - len(left)} of them measured before",
            file=sys.stderr,
        )
        if not is_gpu:
            print("the kernels run on a GPU, and JAX has none here: 'auto' is always XLA", file=sys.stderr)
        return 0
    del params  # the measurements need the memory
    # Each time is in the user's file before the next shape is measured.
    with progress_bar() as bar:
        task = bar.add_task("measuring", total=len(left))
        for (op, shape), times, failure in tune.measure(left, rounds=options.repeats):
            table.add_row(
                op, _shape_text(shape), *(f"{times[name]:.4f}" if name in times else "-" for name in ("xla", "triton"))
            )
            if failure:
                bar.console.print(f"{op}, {_shape_text(shape)}: {failure}", soft_wrap=True, markup=False)
            bar.update(task, advance=1)
    console.print(table)
    print(f"kept in {printable(str(measurements.path()))}", file=sys.stderr)
    return 0


def _shape_text(shape) -> str:
    """Returns a shape in one line."""
    return ", ".join(f"{name} {size}" for name, size in shape.items())
