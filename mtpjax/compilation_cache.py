"""The folder where commands keep compiled programs between runs. Imports no JAX, which reads these settings only once.

    $XDG_CACHE_HOME/mtpjax/compiled/KEY/    (~/.cache if XDG_CACHE_HOME is not set)

JAX's cache key covers versions and flags. Programs for CPUs also depend on the processor's features and the number of
threads, so KEY is a digest of these. Only the commands call `enable`; importing mtpjax changes no setting.
"""

import hashlib
import os
import pathlib
import platform
import stat
import sys
import warnings

from mtpjax.host import num_threads

# JAX's environment variables. The user's values take precedence.
FOLDER_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
SWITCH_VARIABLE = "JAX_ENABLE_COMPILATION_CACHE"
MIN_SECONDS_VARIABLE = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
MIN_COMPILE_SECONDS = 0.1  # programs that compile faster are not kept
MAX_BYTES = 2 << 30  # maximum total size of all programs; beyond it, the oldest are removed


def enable() -> pathlib.Path | None:
    """Lets JAX keep compiled programs in the user's cache folder. Call it after the number of threads is set.

    It does nothing if JAX is already imported, `JAX_COMPILATION_CACHE_DIR` is set, or `JAX_ENABLE_COMPILATION_CACHE` is
    off. A folder that is not writable, or that other users can write to, is not used.

    Returns:
        The folder; None if the cache was not enabled.
    """
    is_off = os.environ.get(SWITCH_VARIABLE, "").lower() in ("0", "false", "no", "off", "n", "f")
    if is_off or FOLDER_VARIABLE in os.environ or "jax" in sys.modules:
        return None
    try:
        folder = root() / machine_key()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(folder):
            return None
        prune(root(), MAX_BYTES)
    # Compile without a cache if there is no home folder or it is not writable.
    except (OSError, RuntimeError):
        return None
    # If the disk is full or a file is damaged, programs are simply compiled again, so suppress JAX's warnings.
    warnings.filterwarnings("ignore", message="Error (reading|writing) persistent compilation cache entry")
    os.environ[FOLDER_VARIABLE] = str(folder)
    os.environ.setdefault(MIN_SECONDS_VARIABLE, str(MIN_COMPILE_SECONDS))
    return folder


def follow_threads() -> None:
    """Switches a command's child process to the folder for its number of threads."""
    inherited = os.environ.get(FOLDER_VARIABLE)
    # Keep a folder that the user has chosen.
    if inherited and pathlib.Path(inherited).parent == root():
        del os.environ[FOLDER_VARIABLE]
        enable()


def root() -> pathlib.Path:
    """Returns the folder that contains all compiled programs.

    Raises:
        RuntimeError: the user has no home folder.
    """
    # The XDG specification says that relative paths are invalid and must be ignored.
    configured = pathlib.Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = configured if configured.is_absolute() else pathlib.Path.home() / ".cache"
    return base / "mtpjax" / "compiled"


def machine_key() -> str:
    """Returns a digest of the processor's features and the number of threads, on which CPU programs depend."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    # The line starts with "flags" on x86 and "Features" on ARM, and is the same for all cores.
    features = next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())
    content = f"{platform.system()} {platform.machine()} {features} {num_threads()}"
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def prune(folder: pathlib.Path, max_bytes: int) -> None:
    """Removes the oldest programs until the remaining ones take at most `max_bytes`."""
    found = []
    for path in folder.glob("*/*"):
        # Another process may remove files at the same time.
        try:
            status = path.lstat()
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode):
            found.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found, key=lambda each: each[0]):
        if total <= max_bytes:
            return
        path.unlink(missing_ok=True)
        total -= size


def _is_private(folder: pathlib.Path) -> bool:
    """Returns whether only this user can write to the folder, so that no one else can replace the programs in it."""
    status = folder.stat()
    is_own = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    return is_own and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and os.access(folder, os.W_OK | os.X_OK)
