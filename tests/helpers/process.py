"""One of two processes that load, save and decode together, as Slurm starts them.

`python -m tests.helpers.process OUTPUT DIR...` loads each checkpoint and decodes; it saves the first one at OUTPUT, and
loads that too. Prints a line of JSON: the GPUs that JAX may use, and for each checkpoint the texts, the bytes that were
read and those that the process holds, copies counted once.
"""

import json
import sys

import jax

from conversion.files import CheckpointFiles
from mtpjax import DecodeConfig, compat, distributed, load, save, shard_for_decoding, speculative_generate
from mtpjax.io.checkpoint_reader import CheckpointReader

MESH = {"data": 2, "expert": 2, "tensor": 2}
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]  # `data` does not divide them
SETTINGS = {"max_new_tokens": 12, "num_steps": 2, "prefill_chunk": 8}


def main(output: str, *checkpoints: str) -> None:
    """Loads each checkpoint and what is saved of the first one on the mesh of both processes, and decodes."""
    distributed.connect(2)  # Slurm's variables say the rest
    mesh = compat.make_mesh(MESH, distributed.mesh_devices(MESH))
    num_read = 0

    def count(read):
        def counting(files, *arguments):
            nonlocal num_read
            array = read(files, *arguments)
            num_read += array.nbytes
            return array

        return counting

    CheckpointFiles.read, CheckpointReader.read = count(CheckpointFiles.read), count(CheckpointReader.read)
    results = []
    for number, checkpoint in enumerate([*checkpoints, output]):
        num_read = 0
        model, params = load(checkpoint, mesh=mesh)
        if not number:
            save(output, model, params)
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
