"""Runs a command in a child process, so that the parent can turn aborts of JAX's runtime into an exit code.

When the process that coordinates a multi-process run dies, or another process sends no heartbeats, JAX's runtime aborts
the process from a native thread. Native threads also abort it when `ulimit -v` leaves no memory for them. Python code
in the same process cannot prevent this, and schedulers would treat it as a crash.
"""

import ctypes
import os
import signal
import sys

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


LOST_PROCESS = "another process of this run has ended or cannot be reached: JAX's runtime aborted this one"


def continue_in_child(name: str, exit_code: int, message: str, signals: tuple[int, ...] = (signal.SIGABRT,)) -> None:
    """Continues in a child process. The parent waits for it, and exits with its exit code or by the same signal.

    Must run before anything starts threads, and so before JAX is used.

    Args:
        name: the command, which is printed before the message.
        exit_code: the parent's exit code if one of `signals` ends the child.
        message: one line with the reason and what the user can do.
        signals: the signals with which native code may end the child.
    """
    parent = os.getpid()
    child = os.fork()
    if not child:
        _end_with(parent)
        return
    for number in FORWARDED:
        signal.signal(number, lambda number, frame: os.kill(child, number))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if -code in signals:
        print(f"{name}: {message}", file=sys.stderr, flush=True)
        code = exit_code
    if code < 0:  # the child was ended by another signal, so end by the same one
        if -code != signal.SIGKILL:  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(parent, -code)
    os._exit(code)  # the child has run Python's exit handlers


def _end_with(parent: int) -> None:
    """Kills this process when its parent ends, and leaves the parent's process group.

    In the same group, Ctrl-C would reach this process twice, once from the terminal and once from the parent.
    """
    os.setpgid(0, 0)
    if hasattr(libc := ctypes.CDLL(None), "prctl"):  # Linux
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has already ended
        os._exit(1)
