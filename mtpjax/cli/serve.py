"""`mtpjax serve` and `mtpjax serve-router`."""

import contextlib
import functools
import os
from typing import Any

from mtpjax.cli import serve_flags
from mtpjax.cli.common import check_minimums, set_threads
from mtpjax.cli.config_flags import decode_settings, with_num_steps
from mtpjax.cli.drafter_flags import check_no_drafts, chosen_method, load_drafter_of
from mtpjax.cli.expert_flags import check_expert_devices, place_experts_by_flags
from mtpjax.cli.mesh_flags import load_on_mesh, open_mesh
from mtpjax.cli.serve_processes import check_process_flags, check_same_start, connect_followers
from mtpjax.cli.serve_router import add_serve_router, run_serve_router
from mtpjax.cli.serve_settings import (
    api_settings,
    check_used,
    disaggregation_settings,
    engine_sizes,
    load_grammars,
    server_settings,
)
from mtpjax.decoding.acceptance.rules import find_rule
from mtpjax.errors import TokenizerError, UsageError, install_extra
from mtpjax.host import raise_descriptor_limit


def engine_settings(options) -> dict[str, Any]:
    """Returns arguments for `DecodeConfig`, without the drafter. Raises ValueError."""
    settings = decode_settings(options)
    # SGLang has switches for two acceptance rules.
    rules = {"token": options.speculative_use_rejection_sampling, "block": options.speculative_use_block_verification}
    for rule in (rule for rule, is_chosen in rules.items() if is_chosen):
        if settings["acceptance"] not in ("auto", rule):
            raise ValueError(f"the acceptance rule is set twice: {settings['acceptance']} and {rule}")
        settings["acceptance"] = rule
    # If the depth varies, choose a rule with which the text for a seed does not depend on the number of drafts.
    changes_depth = options.speculative_adaptive or options.speculative_disable_by_batch_size is not None
    if changes_depth and settings["acceptance"] == "auto":
        settings["acceptance"] = "sample"
    if ":" not in settings["acceptance"]:  # a user's rule is imported later
        check_lossy(settings["acceptance"], options)
    return settings


def check_lossy(rule: str, options) -> None:
    """Raises `ValueError` for a lossy acceptance rule without `--allow-lossy`. Imports a user's rule."""
    if rule != "auto" and not options.allow_lossy and not find_rule(rule).is_exact:
        raise ValueError(f"acceptance '{rule}' changes the text's distribution: use --allow-lossy")


def _mesh_text(options) -> str:
    """Returns the mesh that `--mesh` or SGLang's size flags describe."""
    has_sizes = options.tp_size is not None or options.dp_size != 1 or options.ep_size is not None
    if options.mesh and has_sizes:
        raise ValueError("--mesh cannot be combined with --tp-size, --dp-size or --ep-size")
    if not has_sizes:
        return options.mesh
    size, parts = options.tp_size or 1, options.dp_size
    if parts > 1 and not options.enable_dp_attention:
        raise ValueError("--dp-size needs --enable-dp-attention; to replicate the whole model, start several servers")
    if min(size, parts) < 1 or size % parts:
        raise ValueError(f"--tp-size ({size}) must be a multiple of --dp-size ({parts})")
    # Experts are split over data and expert together, and their columns over tensor.
    experts = parts if options.ep_size is None else options.ep_size
    if experts < 1 or experts % parts or size % experts:
        raise ValueError(
            f"--ep-size ({experts}) must divide --tp-size ({size}) and be a multiple of --dp-size ({parts})"
        )
    axes = {"data": parts, "expert": experts // parts, "tensor": size // experts}
    return ",".join(f"{axis}={count}" for axis, count in axes.items() if count > 1 or axis != "expert")


def run_serve(options) -> int:
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UsageError(f"{error.name} is missing: {install_extra('serve')}") from error
    check_process_flags(options)
    if options.wait_for_warm_up and options.skip_server_warmup:
        raise UsageError("--wait-for-warm-up and --skip-server-warmup cannot be combined")
    options.mesh = _mesh_text(options)
    # Check the flags before the model is loaded, which may take minutes.
    check_minimums(options, ep_num_redundant_experts=0, eplb_rebalance_num_iterations=1)
    check_used(options)
    check_no_drafts(options)
    engine_settings(options)
    # Set the number of threads and the compilation cache first, because a user's rule may import JAX.
    set_threads(options.model_path)
    check_lossy(options.acceptance, options)
    chosen_method(options)
    disaggregation = disaggregation_settings(options)
    raise_descriptor_limit()
    with open_mesh(options) as mesh:
        return _serve_on(mesh, options, disaggregation)


def _serve_on(mesh, options, disaggregation) -> int:
    import logging

    from mtpjax.data.prompts import read_text
    from mtpjax.data.tokenizer import load_tokenizer
    from mtpjax.decoding.config import DecodeConfig
    from mtpjax.distributed import is_main_process
    from mtpjax.drafters.methods import uses_mtp_modules
    from mtpjax.evaluation.self_check import check_acceptance
    from mtpjax.io.checkpoint_format import find_checkpoint
    from mtpjax.serving.app import make_app
    from mtpjax.serving.disaggregation.setup import set_up
    from mtpjax.serving.engine import Engine
    from mtpjax.serving.http_server import listen
    from mtpjax.serving.launch import running_engine, serve
    from mtpjax.serving.loading import open_port
    from mtpjax.serving.memory import explain_full_memory

    logging.getLogger("mtpjax").setLevel(options.log_level.upper())
    check_expert_devices(options, mesh)
    server = server_settings(options)
    with contextlib.ExitStack() as stack:
        # 1. Open the port first, so that clients are told that the server is loading.
        listener = stack.enter_context(listen(options.host, options.port)) if is_main_process() else None
        loading = stack.enter_context(contextlib.ExitStack())
        report = loading.enter_context(open_port(listener, "mtpjax serve")).report
        # 2. Load the model, its tokenizer and its drafter.
        path = find_checkpoint(options.model_path)
        template = None if options.chat_template is None else read_text(options.chat_template)
        check_same_start(options, path)
        report("loading the weights")
        with explain_full_memory("use more devices: raise --tp-size"):
            model, params, loaded_config = load_on_mesh(
                path, options, mesh, rearrange=lambda params: place_experts_by_flags(params, options, mesh)
            )
        if options.tokenizer_path and not os.path.exists(options.tokenizer_path):
            raise TokenizerError(f"--tokenizer-path {options.tokenizer_path} does not exist")
        tokenizer = load_tokenizer(options.tokenizer_path or path, model.config.vocab_size, chat_template=template)
        with explain_full_memory("use more devices: raise --tp-size"):
            chosen, draft_params = load_drafter_of(options, engine_settings(options), model)
        config = DecodeConfig(**with_num_steps(chosen, loaded_config))
        if config.num_steps and uses_mtp_modules(config.drafter):
            report("checking the drafts")
            check_acceptance(path, model, params)
        # 3. Make the engine, whose calls the other processes also run. Pages from a prefill server are in host memory.
        uses_host = options.enable_hierarchical_cache or disaggregation is not None
        grammars = load_grammars(options.grammar_backend, tokenizer, model.config.vocab_size)
        settings = engine_sizes(options, params, model=model, config=config, uses_host=uses_host)
        api = api_settings(options, path, config, has_grammars=grammars is not None)
        arguments = {"model": model, "config": config, "settings": settings, "draft_params": draft_params}
        if listener is None:
            loading.close()
        followers = stack.enter_context(connect_followers(options, params, arguments, grammars))
        if listener is None:
            return 0
        # 4. Run the server.
        started = {"server": server, "model_name": api.model_name, "followers": followers, "report": report}
        make_engine = functools.partial(Engine, params, **arguments, grammars=grammars)
        engine, metrics = stack.enter_context(running_engine(make_engine, **started))
        shown = metrics if options.enable_metrics else None
        app = make_app(engine, tokenizer, api, shown)
        app.state.server.readers.warm()
        if disaggregation is not None:
            set_up(app, engine, disaggregation, shown)
        serve(app, engine, server, listener=listener, loading=loading)
    return 0


def add_commands(commands) -> None:
    text = "serve a model over HTTP, with OpenAI's and SGLang's routes"
    commands.add_subcommand("serve", serve_flags.make_parser(), help=text)
    add_serve_router(commands)


COMMANDS = {"serve": run_serve, "serve-router": run_serve_router}
