"""Makes the settings of the engine and the server from the flags of `mtpjax serve`."""

import dataclasses
import logging
import os
import pathlib
import sys
from typing import Any

from mtpjax.cli.disaggregation_flags import SECRET_VARIABLE
from mtpjax.cli.serve_flags import ADMIN_KEY_VARIABLE, DEFAULT_HOST_GB, KEY_VARIABLE
from mtpjax.errors import UsageError

log = logging.getLogger("mtpjax.serve")


def engine_sizes(options, params: dict, *, model, config, uses_host: bool):
    """Makes the `EngineSettings`.

    Args:
        options: the parsed flags.
        params: parameters of the model, already on their devices, because the page pool uses the remaining memory.
        model: the model.
        config: the `DecodeConfig` of every request.
        uses_host: whether pages may be in host memory.

    Raises:
        MemoryTooSmall: there is no room for the pages of one text.
    """
    from mtpjax.serving.memory import choose_num_pages
    from mtpjax.serving.sizes import EngineSettings

    limit = model.config.max_position_embeddings
    if (options.context_length or 0) > limit:
        log.warning(
            "--context-length %d exceeds the model's maximum length of %d tokens (max_position_embeddings in "
            "config.json): a text has at most %d tokens",
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
        rebalance_experts_every=options.eplb_rebalance_num_iterations if options.enable_eplb else None,
    )
    if options.max_total_tokens is not None:
        num_pages = max(options.max_total_tokens // options.page_size, 1)
    else:
        num_pages = choose_num_pages(params, model, config, settings, options.mem_fraction_static)
    return dataclasses.replace(settings, num_pages=num_pages)


def server_settings(options):
    from mtpjax.serving.server_settings import ServerSettings

    return ServerSettings(
        watchdog_seconds=options.watchdog_timeout or None,
        drain_seconds=options.drain_timeout,
        warm_up="none" if options.skip_server_warmup else "all" if options.wait_for_warm_up else "first",
    )


def api_settings(options, path, config, *, has_grammars: bool):
    """Makes the `ApiSettings`. Warns on stderr if the server is open to everybody."""
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
            "max_running_requests": options.max_running_requests,
            "page_size": options.page_size,
            "grammar_backend": "llguidance" if has_grammars else "none",
        },
    )


def disaggregation_settings(options) -> Any:
    """Returns the `DisaggregationSettings`, or None for a server that does both prefill and decode.

    With a mode, this imports JAX, so the number of threads must be set first.

    Raises:
        UsageError: a flag is missing, or contradicts another.
        ValueError: the secret is too short.
        OSError: the secret's file cannot be read.
    """
    mode, url = options.disaggregation_mode, options.disaggregation_prefill_url
    if mode in (None, "null"):  # SGLang's default
        return None
    from mtpjax.serving.disaggregation.protocol import DisaggregationSettings

    if options.disable_radix_cache:
        raise UsageError("--disaggregation-mode needs the prefix cache: remove --disable-radix-cache")
    if mode == "decode" and not (url or "").startswith(("http://", "https://")):
        raise UsageError("--disaggregation-mode decode needs --disaggregation-prefill-url http://HOST:PORT")
    if options.disaggregation_secret_file is not None:
        secret = pathlib.Path(options.disaggregation_secret_file).read_bytes().strip()
    else:
        secret = os.environ.get(SECRET_VARIABLE, "").encode()
    if not secret:
        raise UsageError(f"--disaggregation-mode needs --disaggregation-secret-file, or {SECRET_VARIABLE}")
    return DisaggregationSettings(
        prefill_url=url if mode == "decode" else None,
        secret=secret,
        backend=options.disaggregation_transfer_backend,
        host=options.host,
        port=options.disaggregation_bootstrap_port,
        timeout=options.disaggregation_timeout,
    )


def load_grammars(backend: str | None, tokenizer, vocab_size: int):
    """Makes the grammar compiler. If it is unavailable, returns None, or raises UsageError if a flag requests it."""
    from mtpjax.serving.grammar import Grammars

    try:
        return None if backend == "none" else Grammars(tokenizer, vocab_size)
    except (ImportError, ValueError) as error:
        if backend is None:
            return None
        raise UsageError(f"--grammar-backend {backend}: {error}") from error


def check_used(options) -> None:
    """Raises UsageError if a flag has no effect because of another flag."""
    uses_host = options.enable_hierarchical_cache or options.disaggregation_mode in ("prefill", "decode")
    if options.hicache_size is not None and not uses_host:
        raise UsageError("--hicache-size has no effect without --enable-hierarchical-cache")
    if options.enable_hierarchical_cache and options.disable_radix_cache:
        raise UsageError("--enable-hierarchical-cache has no effect with --disable-radix-cache")


def _read_keys(flag: str | None, variable: str) -> tuple[str, ...]:
    given = flag or os.environ.get(variable, "")
    return tuple(filter(None, (key.strip() for key in given.split(","))))


def _drafter_name(options, config) -> str | None:
    """Returns SGLang's name for the active draft method, the user's name for it, or None without drafts."""
    from mtpjax.drafters.methods import method_of

    if not config.num_steps:
        return None
    method = method_of(config.drafter)
    return method.algorithms[0] if method and method.algorithms else options.speculative_algorithm
