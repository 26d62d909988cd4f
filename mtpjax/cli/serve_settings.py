"""Makes the settings of the engine and the server from the flags of `mtpjax serve`."""

import dataclasses
import logging
import os
import sys

from mtpjax.errors import UsageError

DEFAULT_HOST_GB = 4.0
KEY_VARIABLE, ADMIN_KEY_VARIABLE = "MTPJAX_API_KEY", "MTPJAX_ADMIN_API_KEY"

log = logging.getLogger("mtpjax.serve")


def engine_sizes(options, params: dict, *, model, config, grammars, uses_host: bool):
    """Makes the `EngineSettings`.

    Args:
        options: the parsed flags.
        params: parameters of the model, already on their devices: the pool of pages takes the memory that is left.
        model: the model.
        config: the `DecodeConfig` of every request.
        grammars: what `load_grammars` returned.
        uses_host: pages may be in host memory.

    Raises:
        MemoryTooSmall: there is no room for the pages of one text.
    """
    from mtpjax.serving.launch import choose_num_pages
    from mtpjax.serving.sizes import EngineSettings

    limit = model.config.max_position_embeddings
    if (options.context_length or 0) > limit:
        log.warning(
            "--context-length %d is more than the %d positions of the model (max_position_embeddings in config.json): "
            "a text has at most %d tokens",
            *(options.context_length, limit, limit),
        )
    settings = EngineSettings(
        num_slots=options.max_running_requests,
        max_length=options.context_length,
        page_size=options.page_size,
        prefill_tokens=options.chunked_prefill_size,
        rounds_per_call=options.num_continuous_decode_steps,
        disable_drafts_at=options.speculative_disable_by_batch_size,
        adapts_depth=options.speculative_adaptive,
        batch_sizes=tuple(options.precompile_bs_paddings) or None,
        max_waiting=options.max_queued_requests,
        max_queue_seconds=options.max_queue_seconds,
        max_run_seconds=options.max_run_seconds,
        max_tick_seconds=options.watchdog_timeout / 2 or None,
        shares_prefixes=not options.disable_radix_cache,
        num_snapshots=options.max_mamba_cache_size,
        host_bytes=int((DEFAULT_HOST_GB if options.hicache_size is None else options.hicache_size) * 1e9) * uses_host,
        grammars=grammars,
        rebalance_experts_every=options.eplb_rebalance_num_iterations if options.enable_eplb else None,
    )
    if options.max_total_tokens is not None:
        num_pages = max(options.max_total_tokens // options.page_size, 1)
    else:
        num_pages = choose_num_pages(params, model, config, settings, options.mem_fraction_static)
    return dataclasses.replace(settings, num_pages=num_pages)


def server_settings(options):
    from mtpjax.serving.launch import ServerSettings

    return ServerSettings(
        host=options.host,
        port=options.port,
        watchdog_seconds=options.watchdog_timeout or None,
        drain_seconds=options.drain_timeout,
        warm_up="none" if options.skip_server_warmup else "all" if options.wait_for_warm_up else "first",
    )


def api_settings(options, path, config, settings):
    """Makes the `ApiSettings`; `settings` are the engine's. Warns on stderr if the server is open to everybody."""
    from mtpjax.serving.api.settings import ApiSettings

    folder = path.parent.name if path.name == "checkpoint" else path.name
    keys = _read_keys(options.api_key, KEY_VARIABLE)
    if not keys and options.host not in ("127.0.0.1", "localhost", "::1"):
        print(f"mtpjax serve: everyone who can reach {options.host} can use the model: set --api-key", file=sys.stderr)
    return ApiSettings(
        model_name=options.served_model_name or folder,
        api_keys=keys,
        admin_api_keys=_read_keys(options.admin_api_key, ADMIN_KEY_VARIABLE),
        server_info={
            "model_path": str(options.model_path),
            "speculative_algorithm": _drafter_name(options, config),
            "speculative_draft_model_path": options.speculative_draft_model_path,
            "speculative_num_steps": config.num_steps,
            "speculative_eagle_topk": config.topk,
            "speculative_num_draft_tokens": config.num_nodes,
            "acceptance": str(config.acceptance),
            "max_running_requests": settings.num_slots,
            "page_size": settings.page_size,
            "grammar_backend": "none" if settings.grammars is None else "llguidance",
        },
    )


def load_grammars(backend: str | None, tokenizer, vocab_size: int):
    """Makes the compiler of grammars; None if it is missing and not requested. Raises UsageError if it is."""
    from mtpjax.serving.grammar import Grammars

    try:
        return None if backend == "none" else Grammars(tokenizer, vocab_size)
    except (ImportError, ValueError) as error:
        if backend is None:
            return None
        raise UsageError(f"--grammar-backend {backend}: {error}") from error


def check_used(options) -> None:
    """Raises UsageError if a flag has no effect because of another flag."""
    unused = []
    uses_host = options.enable_hierarchical_cache or options.disaggregation_mode in ("prefill", "decode")
    if options.hicache_size is not None and not uses_host:
        unused.append("--hicache-size has no effect without --enable-hierarchical-cache")
    if options.enable_hierarchical_cache and options.disable_radix_cache:
        unused.append("--enable-hierarchical-cache has no effect with --disable-radix-cache")
    if (options.speculative_algorithm or "").upper() == "NONE":
        given = {"--num-steps": options.num_steps, "--num-draft-tokens": options.num_draft_tokens}
        names = [name for name, value in (given | {"--topk": (options.topk or 1) - 1}).items() if value]
        unused += [f"{name} has no effect with --speculative-algorithm NONE" for name in names]
    if unused:
        raise UsageError("; ".join(unused))


def _read_keys(flag: str | None, variable: str) -> tuple[str, ...]:
    given = flag or os.environ.get(variable, "")
    return tuple(filter(None, (key.strip() for key in given.split(","))))


def _drafter_name(options, config) -> str | None:
    """Returns SGLang's name of the draft method that runs, or a user's name; None: nothing is drafted."""
    from mtpjax.drafters.methods import method_of

    if not config.num_steps:
        return None
    method = method_of(config.drafter)
    return method.algorithms[0] if method and method.algorithms else options.speculative_algorithm
