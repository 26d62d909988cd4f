"""Checks the flags of a multi-process `mtpjax serve` and whether its processes match, and then connects them."""

import contextlib
import hashlib
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

from mtpjax.errors import UsageError
from mtpjax.version import __version__

# Flags that may differ between processes, and keys, which never leave their process.
OF_ONE_PROCESS = ("node_rank", "dist_init_addr", "host", "port", "api_key", "log_level", "model_path", "tokenizer_path")
WEIGHT_FILES = ("*.safetensors", "*.gguf", "*.bin")
END_BYTES = 1 << 16  # number of bytes to hash at the start and at the end of each weight file


def check_process_flags(options) -> None:
    if options.nnodes == 1:
        return
    given = {
        "--disaggregation-mode": options.disaggregation_mode not in (None, "null"),
        "--speculative-draft-model-path": options.speculative_draft_model_path is not None,
        "--enable-hierarchical-cache": options.enable_hierarchical_cache,
    }
    for flag in (flag for flag, is_given in given.items() if is_given):
        raise UsageError(f"{flag} needs a single-process server: remove --nnodes")


def check_same_start(options, path: pathlib.Path) -> None:
    """Checks that flags, checkpoint and versions are the same in all processes. Raises ValueError if they differ."""
    if options.nnodes == 1:
        return
    import jax

    from mtpjax.distributed import check_same

    flags = {f"--{name.replace('_', '-')}": value for name, value in vars(options).items() if _is_shared(name)}
    versions = {"mtpjax version": __version__, "jax version": jax.__version__}
    check_same({**versions, "checkpoint": _digest(path), **flags})


@contextlib.contextmanager
def connect_followers(options, params: dict, arguments: dict[str, Any], grammars) -> Iterator:
    """Connects the processes of a server. All processes except 0 run the calls of process 0 until it stops.

    Args:
        options: the parsed flags.
        params: model parameters.
        arguments: the arguments of `EngineSession`.
        grammars: compiles the grammars of requests, or None.

    Yields:
        In process 0, the connections to the other processes, or None for a single-process server. In the other
        processes, None once process 0 has stopped.
    """
    if options.nnodes == 1:
        yield None
        return
    import jax

    from mtpjax.distributed import check_same
    from mtpjax.serving.engine_session import EngineSession
    from mtpjax.serving.executor import Executor
    from mtpjax.serving.http_server import tell
    from mtpjax.serving.memory import explain_full_memory
    from mtpjax.serving.multihost.connection import Leader, connect_processes
    from mtpjax.serving.multihost.follower import follow

    # The number of pages depends on a machine's memory, and the grammar backend on its installed packages.
    settings = arguments["settings"]
    check_same({"number of pages": settings.num_pages, "--grammar-backend": grammars is not None})
    with connect_processes(options.dist_init_addr) as link:
        if not isinstance(link, Leader):
            yield link
            return
        tell(f"mtpjax serve: process {jax.process_index()} runs the calls of process 0", sys.stderr)
        with explain_full_memory("lower --max-total-tokens, --max-running-requests or --chunked-prefill-size"):
            executor = Executor(EngineSession(params, **arguments), grammars)
        follow(executor, link)
    yield None


def _is_shared(name: str) -> bool:
    return name not in OF_ONE_PROCESS and not name.startswith(("disaggregation", "cfg", "config"))


def _digest(path: pathlib.Path) -> str:
    """Returns a hash of a checkpoint's description and of the start and end of each weight file."""
    from mtpjax.io.checkpoint_format import checkpoint_digest

    digest = hashlib.sha256()
    if path.is_dir():
        digest.update(checkpoint_digest(path).encode())
        files = sorted(file for pattern in WEIGHT_FILES for file in path.glob(pattern))
    else:
        files = [path]
    for file in files:
        with open(file, "rb") as stream:
            digest.update(stream.read(END_BYTES))
            stream.seek(max(stream.seek(0, 2) - END_BYTES, 0))
            digest.update(stream.read(END_BYTES))
    return digest.hexdigest()
