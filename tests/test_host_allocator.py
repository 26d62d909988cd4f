"""Freed memory stays with a process that asks for it."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource
from mtpjax.host import keep_freed_memory
{call}
for _ in range(3):
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    b"x" * 2**26
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin)
"""


def faults(call: str) -> int:
    """Pages touched for the first time by the third block of 64 MB, each freed before the next."""
    program = PROGRAM.format(call=call)
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_a_block_that_was_freed_is_used_again_without_new_pages():
    assert faults("keep_freed_memory()") < 100
    assert faults("") > 10 * 100
