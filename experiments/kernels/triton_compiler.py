"""Compiles Triton IR to machine code and counts the resources that it uses.

`machine_code.py` starts this script with an interpreter that has triton and needs no jax. Each line on stdin is a JSON
object {"ir", "num_warps", "num_stages", "platform"}. Each answer is a line on stdout: a dict with `registers`,
`spills`, `shared` (bytes), `mma` and `loads` (counts by instruction), or {"error"}.
"""

import collections
import contextlib
import io
import json
import os
import pathlib
import re
import sys
import tempfile

# Compile every time: the register counts that ptxas prints are not cached.
os.environ["TRITON_ALWAYS_COMPILE"] = "1"
os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"  # as XLA does

import triton  # pyright: ignore[reportMissingImports]
from triton.backends import backends  # pyright: ignore[reportMissingImports]
from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]

TARGETS = {"cuda": GPUTarget("cuda", 90, 32), "rocm": GPUTarget("hip", "gfx942", 64)}


def run_all_passes(backend: type) -> None:
    """Makes a backend's second stage run the passes of the first one too, as XLA does.

    `triton.compile` skips the first stage for IR from a file. Without its passes, `total + dot(a, b)` keeps total and
    product in separate registers and waits for every product.
    """
    add_stages = backend.add_stages

    def with_first(self, stages, *rest):
        add_stages(self, stages, *rest)
        first, second = stages["ttir"], stages["ttgir"]
        stages["ttgir"] = lambda module, metadata: second(first(module, metadata), metadata)

    backend.add_stages = with_first


for backend in backends.values():
    run_all_passes(backend.compiler)


def compile_kernel(job: dict, folder: pathlib.Path) -> dict:
    """Compiles one kernel and counts its resources; `job` is the request's JSON object."""
    path = folder / "kernel.ttir"
    path.write_text(job["ir"])
    options = {"num_warps": job["num_warps"], "num_stages": job["num_stages"]}
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        kernel = triton.compile(str(path), target=TARGETS[job["platform"]], options=options)
    count = {"cuda": count_sm90, "rocm": count_gfx942}[job["platform"]]
    return {"shared": kernel.metadata.shared, **count(kernel.asm, log.getvalue())}


def count_sm90(asm: dict, log: str) -> dict:
    """Counts resources on sm_90 from the PTX and from the log of `ptxas -v`."""
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    products = re.findall(r"\b(wgmma|mma)\S*\.sync\.aligned\.(m\d\S*)", asm["ptx"])
    loads = re.findall(r"\b(ld\.global\S*|cp\.async\.c[ag]\S* .*)", asm["ptx"])
    return {
        "registers": int(re.findall(r"Used (\d+) registers", log)[-1]),
        "spills": sum(map(int, spilled)),
        "mma": collections.Counter(f"{kind} {shape.replace('.row.col', '')}" for kind, shape in products),
        "loads": collections.Counter(_load(load) for load in loads),
    }


def _load(instruction: str) -> str:
    """Shortens `cp.async.cg.shared.global [ %r1 + 0 ], [ %rd5 + 0 ], 0x10, %r2;` to `cp.async 16`; keeps others."""
    if not instruction.startswith("cp.async"):
        return re.sub(r"\.L\S*::\w+", "", instruction)
    return f"cp.async {int(re.findall(r'0x[0-9a-f]+', instruction)[0], 16)}"


def count_gfx942(asm: dict, log: str) -> dict:
    """Counts resources on gfx942 from the assembly and the metadata at its end."""
    del log
    field = {name: int(value) for name, value in re.findall(r"\.(\w+_count):\s+(\d+)", asm["amdgcn"])}
    return {
        "registers": field["vgpr_count"],  # includes accumulation registers
        "spills": field["vgpr_spill_count"],
        "scalar_spills": field["sgpr_spill_count"],
        "mma": collections.Counter(re.findall(r"\b(v_s?mfma\w+)", asm["amdgcn"])),
        "loads": collections.Counter(re.findall(r"\b((?:global|buffer)_load_\w+)", asm["amdgcn"])),
    }


def main() -> None:
    # The compiler also prints to stdout, so answers go to a copy of it and stdout itself becomes stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        for line in sys.stdin:
            try:
                answer = compile_kernel(json.loads(line), pathlib.Path(folder))
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
