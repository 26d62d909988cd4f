"""Times the first and second start of `mtpjax serve` up to the first answer, and counts the compiled programs.

    python -m experiments.serving.bench_start --model runs/quickstart [--starts 2] [--output FILE]

All starts share a new, empty compilation cache, which the first start fills. Each start is a separate process. CPU
seconds (user and system) of the whole process are read when the first completion of 40 tokens has arrived, and when
every program is compiled. XLA's events show how long XLA compiled, and how often it found a program in the cache.
"""

import argparse
import json
import os
import pathlib
import re
import sys
import tempfile
import time

import httpx
from rich.console import Console

from experiments.common.results import about, write
from experiments.serving.bench_servers import server
from mtpjax.console import narrow_table

# Appends XLA's events to a file, because a server that is compiling when it ends runs no exit handlers.
SERVE = """
import json, sys
file = open(sys.argv.pop(1), "a", buffering=1)
from mtpjax import compilation_cache
enable = compilation_cache.enable
def listen():
    folder = enable()
    import jax
    write = lambda event, seconds=0.0, **_: file.write(json.dumps([event, seconds]) + "\\n")
    jax.monitoring.register_event_listener(write)
    jax.monitoring.register_event_duration_secs_listener(write)
    return folder
compilation_cache.enable = listen
from mtpjax.cli.start import main
main()
"""
COMPILING = "/jax/core/compile/backend_compile_duration"  # includes the time to read a cached program
HIT, MISS = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"
BODY = {"prompt": "def ", "max_tokens": 40, "seed": 0}


def cpu_seconds(log: pathlib.Path) -> float:
    """Returns the CPU seconds of the process whose id is in the log's first line."""
    fields = pathlib.Path(f"/proc/{int(log.read_text())}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(model: str, folder: pathlib.Path, flags: list[str]) -> dict:
    """Starts a server; returns the measurements at the first answer and after the last program."""
    events, number = folder / "events", folder / "pid"
    events.write_text("")
    code = f"import os; open({str(number)!r}, 'w').write(str(os.getpid()))\n{SERVE}"
    command = [sys.executable, "-c", code, str(events), "serve", "--model", model, "--enable-metrics", *flags]
    begin = time.perf_counter()
    with server(command, folder / "log") as url:
        httpx.post(f"{url}/v1/completions", json=BODY, timeout=600).raise_for_status()
        found = {"first_answer": cpu_seconds(number), "first_answer_elapsed": time.perf_counter() - begin}
        while not re.search(r"mtpjax:programs_left\{.*\} 0\.0", httpx.get(f"{url}/metrics", timeout=60).text):
            time.sleep(0.2)
        found["all_programs"], found["elapsed"] = cpu_seconds(number), time.perf_counter() - begin
        records = [json.loads(line) for line in events.read_text().splitlines()]
    found["compiling"] = sum(seconds for event, seconds in records if event == COMPILING)
    found["hits"], found["misses"] = (sum(event == name for event, _ in records) for name in (HIT, MISS))
    return found


def main(argv: list[str] | None = None) -> None:
    """Measures the starts, and prints them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a checkpoint, or a run of `mtpjax quickstart`")
    parser.add_argument("--starts", type=int, default=2, help="number of starts, one after the other")
    parser.add_argument("--flags", nargs="*", default=[], help="further flags for `mtpjax serve`, without their dashes")
    parser.add_argument("--output", type=pathlib.Path, default=None, help="JSON file to write")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = name
        flags = [f"--{flag}" for flag in options.flags]
        starts = [measure(options.model, pathlib.Path(name), flags) for _ in range(options.starts)]
    table = narrow_table("Starts: CPU seconds of the process; seconds that XLA compiled or read programs")
    for heading in ("start", "first answer", "all programs", "XLA", "kept", "compiled"):
        table.add_column(heading, justify="right")
    for start, each in enumerate(starts, 1):
        seconds = [f"{each[key]:.1f}" for key in ("first_answer", "all_programs", "compiling")]
        table.add_row(str(start), *seconds, str(each["hits"]), str(each["misses"]))
    Console().print(table)
    write(options.output, about(starts=starts))


if __name__ == "__main__":
    main()
