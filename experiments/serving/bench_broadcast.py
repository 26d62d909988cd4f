"""Times how the server sends a call to other processes, with frames over TCP and with `broadcast_one_to_all`.

Starts two processes on this machine. Process 0 encodes the call of a round, sends it, and waits until process 1 has
decoded it and answered. Then both processes broadcast the same number of bytes over the devices.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time

import jax
import numpy as np
from jax.experimental import multihost_utils

from mtpjax import distributed
from mtpjax.decoding import session
from mtpjax.decoding.session import Batch
from mtpjax.serving.multihost import plan
from mtpjax.serving.multihost.connection import Followers, connect_processes
from mtpjax.serving.program_set import PendingCall, ProgramKey

SHAPES = ((8, 16), (64, 256))  # (rows, pages per row)


def make_call(rows: int, pages: int) -> PendingCall:
    """Makes the call of a round. The page ids differ, so that all of them are sent."""
    table = np.arange(rows * pages, dtype=np.int32).reshape(1, rows, pages)
    batch = Batch(np.arange(rows, dtype=np.int32)[None], table, np.zeros((1, rows), np.int32))
    return PendingCall(session.advance, (batch, np.int32(2)), ProgramKey("advance", rows, pages, True, 2))


def report(name: str, seconds: list[float]) -> None:
    """Prints the median and the 90th percentile in process 0."""
    if distributed.is_main_process():
        high = sorted(seconds)[len(seconds) * 9 // 10]
        print(f"  {name}: median {statistics.median(seconds) * 1e6:.0f} us, p90 {high * 1e6:.0f} us", flush=True)


def measure(repeats: int) -> None:
    """Measures in both processes."""
    with connect_processes("127.0.0.1:0") as link:
        for rows, pages in SHAPES:
            call = make_call(rows, pages)
            name = call.program.plain.__name__
            size = len(plan.encode(name, *call.arrays, key=call.key))
            if isinstance(link, Followers):
                print(f"{rows} rows x {pages} pages: {size} bytes", flush=True)
            sent, answered = [], []
            for _ in range(repeats):
                if isinstance(link, Followers):
                    begin = time.perf_counter()
                    link.send(plan.encode(name, *call.arrays, key=call.key))
                    sent.append(time.perf_counter() - begin)
                    link.should_drain.wait()
                    link.should_drain.clear()
                    answered.append(time.perf_counter() - begin)
                elif body := link.receive():
                    plan.decode_call(*plan.decode(body))
                    link.ask_to_drain()
            if sent:
                report("TCP, process 0 encodes and sends", sent)
                report("TCP, until process 1 has answered", answered)
            data, seconds = np.zeros(size, np.uint8), []
            multihost_utils.broadcast_one_to_all(data)
            for _ in range(repeats):
                begin = time.perf_counter()
                jax.block_until_ready(multihost_utils.broadcast_one_to_all(data))
                seconds.append(time.perf_counter() - begin)
            report("broadcast_one_to_all", seconds)


def main() -> None:
    """Parses the flags, starts the other process, and measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=400)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        distributed.connect(2, options.rank, options.address)
        return measure(options.repeats)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "experiments.serving.bench_broadcast", "--repeats", str(options.repeats)]
    with subprocess.Popen([*command, "--rank", "1", "--address", address], env=dict(os.environ)) as other:
        distributed.connect(2, 0, address)
        measure(options.repeats)
        jax.distributed.shutdown()
        other.wait(timeout=30)


if __name__ == "__main__":
    main()
