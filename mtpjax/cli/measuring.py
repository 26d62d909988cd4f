"""`mtpjax profile`, `eval` and `ablate`."""

import pathlib
import sys
from typing import Any

from mtpjax.atomic import check_output_file
from mtpjax.cli import common, config_flags
from mtpjax.cli.drafter_flags import add_drafter_flags, add_reading_flags, check_no_drafts, load_drafter_of, reading_of
from mtpjax.cli.help import command_parser
from mtpjax.cli.mesh_flags import add_mesh_flags, load_on_mesh, open_mesh
from mtpjax.cli.prediction import add_prediction_flags, print_prediction
from mtpjax.cli.update_profile import add_update_flags, profile_update
from mtpjax.console import progress_bar
from mtpjax.errors import UsageError, printable
from mtpjax.messages import count_of

DEFAULT_PROFILE_STEPS = 5  # deepest draft of `mtpjax profile` with MTP modules


def add_commands(commands) -> None:
    _add_profile(commands)
    _add_eval(commands)
    _add_ablate(commands)


def _add_profile(commands) -> None:
    profile = command_parser(
        "Measure how long decoding rounds with 0 to --num-steps draft levels take on this device, per batch size. "
        "`mtpjax generate --depth-policy adaptive` reads the output. With --train, measure a training update instead."
    )
    common.add_decoding_model_flags(profile, is_required=False)
    profile.flag_group("drafts").add_argument(
        *config_flags.flag_names("num_steps"),
        type=int,
        help=f"maximum number of draft levels to measure (default: {DEFAULT_PROFILE_STEPS} with MTP modules, else the "
        "drafter's number of levels)",
    )
    config_flags.add_config_flags(profile, config_flags.SHAPE_FIELDS[1:])
    add_drafter_flags(profile)
    group = profile.flag_group("measurement")
    group.add_argument("--batch-size", type=int, nargs="+", default=[1], help="batch sizes to measure")
    group.add_argument("--context", type=int, default=512, help="number of tokens in the KV cache")
    group.add_argument("--temperature", type=float, default=0.0, help="temperature of the rounds; 0 is greedy")
    group.add_argument("--repeats", type=int, default=48, help="maximum number of measurements per depth")
    group.add_argument(
        "--acceptance-rates",
        metavar="FILE",
        help="output of `mtpjax eval acceptance` on similar prompts; adaptive depth starts from its acceptance rates",
    )
    profile.flag_group("output").add_argument(
        "--output",
        metavar="FILE",
        help="file to write (default: profile.json in the drafter's or the model's folder; with --train, none)",
    )
    add_prediction_flags(profile)
    add_update_flags(profile)
    commands.add_subcommand("profile", profile, help="measure what drafting costs, or the parts of a training update")


def _add_eval(commands) -> None:
    acceptance = command_parser(
        "Measure the accept length and the acceptance rate per draft level, for each category of prompts and overall, "
        "both by decoding and teacher-forced on the model's own text, with 95 % intervals over prompts. The accept "
        "length is 1 + accepted drafts / rounds. The conditional rate of a level counts only the rounds that accepted "
        "all earlier levels; its survival rate counts all rounds."
    )
    common.add_decoding_model_flags(acceptance)
    _add_prompt_flags(acceptance, required=True, count=64)
    fields = (*config_flags.DRAFT_FIELDS, "kv_cache_dtype", "temperature", "allow_copies")
    config_flags.add_config_flags(acceptance, fields, num_steps=3)
    add_drafter_flags(acceptance)
    add_mesh_flags(acceptance)
    group = acceptance.flag_group("prompts")
    group.add_argument("--batch-size", type=int, default=8, help="number of prompts to decode together")
    config_flags.add_seed_flag(acceptance, "random seed for choosing prompts and for sampling")
    group = acceptance.flag_group("output")
    group.add_argument("--output", metavar="FILE", help="JSON file to write; the plots are saved under the same name")
    common.add_plot_formats_flag(acceptance)
    evaluate = command_parser("Evaluate a trained model. `mtpjax eval WHAT --help` describes a command.")
    commands.add_subcommand("eval", evaluate, help="evaluate a model on prompts")
    kinds = evaluate.add_subcommands(title="commands", metavar="WHAT", dest="what", description=None)
    kinds.add_subcommand("acceptance", acceptance, help="accept length and acceptance rates on prompts")


def _add_ablate(commands) -> None:
    ablate = command_parser(
        "Decode the same prompts with every combination of drafter and settings, alternating with plain decoding at "
        "the same batch size and temperature, and recommend the best. Finished cells are kept: run the same command "
        "again to resume. Writes cells.jsonl, cells.csv, recommendation.md and the plots heatmap, pareto and, with "
        "several drafters, positions."
    )
    common.add_decoding_model_flags(ablate)
    _add_prompt_flags(ablate, required=False, count=12)
    ablate.flag_group("drafts").add_argument(
        "--drafters",
        nargs="+",
        default=["mtp"],
        metavar="DRAFTER",
        help="drafters to compare: mtp (the model's MTP modules), lookup or ngram (n-grams of the text), or a folder, "
        "training run or Hub repository with an EAGLE-3, Medusa, DFlash or DSpark drafter for this model",
    )
    add_reading_flags(ablate)
    # The grid is the product of these flags' values.
    grid: list[tuple[str, type, list, str]] = [
        ("num_steps", int, [1, 2, 3], "draft levels per round"),
        ("topk", int, [1, 2], "candidates per node and level; 1 drafts a chain"),
        ("num_draft_tokens", int, [0], "nodes verified per round; 0: as many as depth and --topk allow, up to 64"),
        (
            "acceptance",
            str,
            ["auto"],
            "acceptance rules; auto: the default for the temperature and draft shape; exact: all exact rules; "
            "package.module:RECORD: your own AcceptanceRule",
        ),
        ("temperature", float, [0.0, 1.0], "softmax temperatures; 0 is greedy"),
        ("batch_size", int, [1, 4], "number of prompts to decode together"),
    ]
    grid_flags = ablate.flag_group("grid: every combination is measured")
    for name, kind, default, meaning in grid:
        flag: dict[str, Any] = {"type": kind, "nargs": "+", "default": default, "help": meaning}
        if name == "acceptance":
            flag |= {"choices": config_flags.rule_choices("auto", "exact"), "metavar": "RULE"}
        grid_flags.add_argument(*config_flags.flag_names(name), **flag)
    group = ablate.flag_group("measurement")
    group.add_argument("--repeats", type=int, default=5, help="measurements per combination")
    config_flags.add_seed_flag(ablate, "random seed for choosing prompts and for sampling")
    group.add_argument(
        "--threads", type=int, default=0, help="XLA's CPU threads; 0: one for models below 16 MiB, else all cores"
    )
    group = ablate.flag_group("output")
    group.add_argument("--output", required=True, metavar="FOLDER", help="folder to write or resume")
    common.add_plot_formats_flag(ablate)
    commands.add_subcommand("ablate", ablate, help="measure a grid of draft settings and recommend one")


def _add_prompt_flags(parser, *, required: bool, count: int) -> None:
    # Without a file, `mtpjax ablate` uses held-out files of the model's own training data.
    default = "" if required else " (default: held-out files of the training data, for byte-level models)"
    group = parser.flag_group("prompts")
    group.add_argument("--prompts", required=required, metavar="FILE", help=common.PROMPT_FILE_HELP + default)
    group.add_argument("--num-prompts", type=int, default=count, help="number of prompts, spread over the categories")
    group.add_argument("--categories", nargs="+", default=[], metavar="NAME", help="categories to use (default: all)")
    group.add_argument("--prompt-tokens", type=int, help="cut prompts to N tokens (default: to the model's limit)")
    common.add_chat_flag(group)
    group.add_argument("--max-new-tokens", type=int, default=96, help="new tokens per prompt")


def _prompt_choice(options):
    from mtpjax.evaluation.prompt_choice import PromptChoice

    categories = tuple(options.categories)
    return PromptChoice(options.prompts, options.num_prompts, categories, options.prompt_tokens, options.chat)


def _profile(options) -> int:
    if options.train is not None:
        return profile_update(options)
    if options.model_path is None:
        raise UsageError("--model-path is missing; see --help")
    drafter_path = options.speculative_draft_model_path
    # This default is for MTP modules. Other drafters have different defaults.
    check_no_drafts(options)
    if options.num_steps is None and drafter_path is None:
        options.num_steps = DEFAULT_PROFILE_STEPS
    if options.predict:
        common.check_output(options)
        common.write_json(options.output, print_prediction(options))
        return 0
    common.set_threads(options.model_path)
    import rich.console

    from mtpjax.console import print_parts
    from mtpjax.decoding.config import DecodeConfig
    from mtpjax.drafters.methods import uses_mtp_modules
    from mtpjax.evaluation import profile, profile_file, profile_report
    from mtpjax.io.checkpoint import load

    # Check the shape and the files before the model is loaded.
    if options.num_steps is not None:
        profile.shapes_up_to(options.num_steps, options.topk, options.num_draft_tokens)
    rates = None if options.acceptance_rates is None else profile_file.read_acceptance(options.acceptance_rates)
    conditions = profile.Conditions(
        tuple(options.batch_size), options.context, options.temperature, repeats=options.repeats
    )
    common.check_output(options)
    model, params = load(options.model_path, model_type=options.model_type, implementation=options.implementation)
    settings = {name: options[name] for name in config_flags.SHAPE_FIELDS}
    settings, draft_params = load_drafter_of(options, settings, model)
    drafter = settings.get("drafter", "mtp")
    if isinstance(drafter, str) and not uses_mtp_modules(drafter):
        raise ValueError(f"only MTP modules and drafters in files can be profiled, not {drafter}")
    output = options.output or profile_file.default_path(drafter_path or options.model_path)
    with progress_bar() as bar:
        # Compile a loop per shape and batch size, then time the loops in rotation.
        task = bar.add_task("compiling and measuring", total=None)
        measured = profile.measure(
            params,
            model=model,
            config=DecodeConfig(**settings),
            conditions=conditions,
            draft_params=draft_params,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    measured["acceptance"] = rates
    if measured.get("context", options.context) < options.context:
        limit = f"the model's maximum length of {model.config.max_position_embeddings} tokens"
        problem = f"--context {options.context} leaves no room within {limit}"
        print(f"mtpjax profile: {problem}: measured with {measured['context']}", file=sys.stderr)
    # Save before printing, because the tables are only a summary of the file.
    profile_file.save(output, measured)
    print_parts(rich.console.Console(), profile_report.tables(measured))
    print(f"wrote {printable(output)}", file=sys.stderr)
    return 0


def _eval(options) -> int:
    options = options[options.what]
    common.set_threads(options.model_path)
    with open_mesh(options) as mesh:
        return _eval_acceptance(mesh, options)


def _eval_acceptance(mesh, options) -> int:
    import rich.console

    from mtpjax.data.tokenizer import load_tokenizer
    from mtpjax.decoding.config import DecodeConfig
    from mtpjax.distributed import is_main_process
    from mtpjax.evaluation.acceptance import measure_acceptance
    from mtpjax.evaluation.counts import AcceptanceCounts
    from mtpjax.evaluation.machine import describe_device
    from mtpjax.evaluation.metrics import print_report, report, to_json
    from mtpjax.evaluation.plot_style import picture_paths
    from mtpjax.evaluation.plots import plot_acceptance
    from mtpjax.evaluation.self_check import check_acceptance
    from mtpjax.io.checkpoint_format import find_checkpoint

    # Check the settings and read the prompts before the model is loaded.
    settings = config_flags.decode_settings(options)
    DecodeConfig(**settings)
    common.check_minimums(options, batch_size=1)
    choice = _prompt_choice(options)
    chosen = choice.read(options.seed)
    common.check_output(options)
    if options.output is not None:
        picture_paths(pathlib.Path(options.output).stem, options.plot_formats)  # warns early if plots are impossible
    path = find_checkpoint(options.model_path)
    model, params, _ = load_on_mesh(path, options, mesh)
    tokenizer = load_tokenizer(path, model.config.vocab_size)
    settings, draft_params = load_drafter_of(options, settings, model)
    prompts, limit, cut = choice.encode(chosen, tokenizer, model.config, options.max_new_tokens)
    config = DecodeConfig(**settings, stop_token_ids=tokenizer.eos_token_ids)
    # Warn if the MTP modules draft worse than they did in training.
    if draft_params is None:
        check_acceptance(path, model, params)
    console = rich.console.Console()
    # Cut prompts change the measurement, so print how many there are.
    if cut:
        print(f"cut to {count_of(limit, 'token')}: {cut} of {count_of(len(prompts), 'prompt')}", file=sys.stderr)
    with progress_bar() as bar:
        task, batches = bar.add_task("prompts", total=len(prompts)), []
        for begin in range(0, len(prompts), options.batch_size):
            batch = prompts[begin : begin + options.batch_size]
            sampling = {"temperature": options.temperature, "seed": options.seed + begin, "batch_size": len(batch)}
            arguments = {"model": model, "config": config, "draft_params": draft_params, **sampling}
            batches.append(measure_acceptance(params, batch, **arguments))
            bar.update(task, advance=len(batch))
        acceptance = AcceptanceCounts.concatenate(batches)
    # Summarise per category and over all prompts, with intervals.
    figures = report(acceptance, [prompt.category for prompt in chosen])
    # Check that speculation did not change the text. Above temperature 0, only the rule "sample" draws the same tokens
    # as plain decoding.
    identical = int(acceptance.is_identical.sum())
    is_compared = not options.temperature or config.acceptance == "sample"
    code = 4 if is_compared and identical < len(prompts) else 0
    # All processes have the results, but only one writes and prints them.
    if not is_main_process():
        return code
    # The file also records the settings, so that two files can be compared.
    if options.output is not None:
        settings = {name: value for name, value in vars(options).items() if isinstance(value, (str, int, float, list))}
        content = {"settings": settings, "prompts_cut": cut, "figures": to_json(figures)}
        common.write_json(options.output, content, allow_nan=False)
        title = f"Acceptance of {pathlib.Path(options.model_path).name} on {len(prompts)} prompts of "
        title += f"{pathlib.Path(options.prompts).name}, temperature {options.temperature:g}\n"
        title += describe_device(1 if mesh is None else mesh.size)
        plot_acceptance(pathlib.Path(options.output).with_suffix(""), figures, options.plot_formats, title=title)
    print_report(console, figures)
    if is_compared:
        print(f"identical to plain decoding: {identical} of {len(prompts)}")
    return code


def _ablate(options) -> int:
    common.set_threads(options.model_path, options.threads)
    import rich.console

    from mtpjax.ablation import run
    from mtpjax.evaluation.plot_style import picture_paths

    # The grid's axes; every other setting is the same in all cells.
    settings = run.Settings(
        depths=tuple(options.num_steps),
        topk=tuple(options.topk),
        num_draft_tokens=tuple(options.num_draft_tokens),
        rules=tuple(options.acceptance),
        temperatures=tuple(options.temperature),
        batch_sizes=tuple(options.batch_size),
        max_new_tokens=options.max_new_tokens,
        repeats=options.repeats,
        seed=options.seed,
    )
    output = pathlib.Path(options.output)
    check_output_file(output / "cells.jsonl")
    picture_paths(output / "heatmap", options.plot_formats)  # warns early if plots are impossible
    subject = run.load_subject(
        options.model_path,
        options.drafters,
        model_type=options.model_type,
        implementation=options.implementation,
        reading=reading_of(options),
    )
    console, formats = rich.console.Console(), options.plot_formats
    return run.run(subject, settings, _prompt_choice(options), output, console=console, plot_formats=formats)


COMMANDS = {"profile": _profile, "eval": _eval, "ablate": _ablate}
