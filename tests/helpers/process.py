"""One of two processes that load and decode together, as Slurm starts them: `python -m tests.helpers.process DIR...`.

Prints a line of JSON: the GPUs that JAX may use, and for each checkpoint the texts, the bytes that were read and those
that the process holds, copies counted once.
"""

import json
import sys

import jax

from conversion.files import CheckpointFiles
from mtpjax import DecodeConfig, compat, distributed, load, shard_for_decoding, speculative_generate

MESH = {"data": 2, "expert": 2, "tensor": 2}
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]  # `data` does not divide them
SETTINGS = {"max_new_tokens": 12, "num_steps": 2, "prefill_chunk": 8}


def main(*checkpoints: str) -> None:
    """Loads each checkpoint on the mesh of both processes, and decodes."""
    distributed.connect(2)  # Slurm's variables say the rest
    mesh = compat.make_mesh(MESH, distributed.mesh_devices(MESH))
    num_read, read = 0, CheckpointFiles.read

    def counting(files, *arguments):
        nonlocal num_read
        array = read(files, *arguments)
        num_read += array.nbytes
        return array

    CheckpointFiles.read = counting
    results = []
    for checkpoint in checkpoints:
        num_read = 0
        model, params = load(checkpoint, mesh=mesh)
        held = {
            (number, str(shard.index)): shard.data.nbytes
            for number, leaf in enumerate(jax.tree.leaves(params))
            for shard in leaf.addressable_shards
        }
        model, params = shard_for_decoding(model, params, mesh)
        rows = speculative_generate(params, PROMPTS, model=model, config=DecodeConfig(**SETTINGS)).rows()
        results.append({"rows": rows, "read": num_read, "held": sum(held.values())})
    print(json.dumps({"visible": jax.config.values["jax_cuda_visible_devices"], "results": results}))


if __name__ == "__main__":
    main(*sys.argv[1:])
