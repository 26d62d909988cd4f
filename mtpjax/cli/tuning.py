"""`mtpjax tune`."""

import sys

from mtpjax.cli.common import add_model_path_flag, check_minimums, set_threads
from mtpjax.cli.config_flags import SHAPE_FIELDS, add_config_flags, decode_settings
from mtpjax.cli.help import command_parser
from mtpjax.errors import printable
from mtpjax.messages import count_of


def add_commands(commands) -> None:
    tune = command_parser(
        "Measure on this GPU whether the kernel or XLA is faster for each op, at the shapes that a model uses when it "
        "decodes. --implementation auto then uses the faster one. The times are saved in the user's cache folder, "
        "for this type of device and these versions of JAX and the kernels. Each time is saved as soon as it is "
        "measured, so you can run the same command again to resume."
    )
    add_model_path_flag(tune)
    add_config_flags(tune, SHAPE_FIELDS, num_steps=3)
    group = tune.flag_group("measurement")
    group.add_argument("--batch-size", type=int, nargs="+", default=[1, 8], help="batch sizes to measure")
    group.add_argument("--context", type=int, default=2048, help="KV cache capacity, in tokens per row")
    group.add_argument("--prefill-chunk", type=int, default=512, help="tokens per row of a prefill pass")
    group.add_argument("--repeats", type=int, default=5, help="measurements per implementation")
    group.add_argument("--dry-run", action="store_true", help="list the shapes to measure, and exit")
    group.add_argument("--again", action="store_true", help="also measure shapes that have already been measured")
    commands.add_subcommand("tune", tune, help="measure which kernels are fastest for a model on this GPU")


def _tune(options) -> int:
    set_threads(options.model_path)
    import jax
    import rich.console

    from mtpjax.console import narrow_table, progress_bar
    from mtpjax.decoding.config import DecodeConfig
    from mtpjax.evaluation import tune
    from mtpjax.io.checkpoint import load
    from pallas_kernels import measurements

    # Check the settings before the model is loaded.
    config = DecodeConfig(**decode_settings(options))
    check_minimums(options, context=1, prefill_chunk=1, repeats=1, batch_size=1)
    model, params = load(options.model_path, model_type=options.model_type)
    # Trace the decoding call to find the ops and shapes, and skip those that already have times.
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
        measured = f"{len(questions) - len(left)} of them already measured"
        print(f"{count_of(len(questions), 'shape')}, {measured}", file=sys.stderr)
        if not is_gpu:
            print("JAX has no GPU here: --implementation auto always uses XLA", file=sys.stderr)
        return 0
    del params  # the measurements need the memory
    # Each time is saved to the user's file before the next shape is measured.
    with progress_bar() as bar:
        task = bar.add_task("measuring", total=len(left))
        for (op, shape), times, failure in tune.measure(left, rounds=options.repeats):
            cells = (f"{times[name]:.4f}" if name in times else "-" for name in ("xla", "triton"))
            table.add_row(op, _shape_text(shape), *cells)
            if failure:
                bar.console.print(f"{op}, {_shape_text(shape)}: {failure}", soft_wrap=True, markup=False)
            bar.update(task, advance=1)
    console.print(table)
    print(f"saved in {printable(str(measurements.path()))}", file=sys.stderr)
    return 0


def _shape_text(shape) -> str:
    return ", ".join(f"{name} {size}" for name, size in shape.items())


COMMANDS = {"tune": _tune}
