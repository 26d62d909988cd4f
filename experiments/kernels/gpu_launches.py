"""Counts the kernels that one layer launches in a decoding round on an H100, with and without our kernels.

    PYTHONPATH=DIRECTORY_OF_THE_PLUGIN JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m experiments.kernels.gpu_launches
    python -m experiments.kernels.gpu_launches --models M --drafts 3

Nothing runs: a round is compiled ahead of time for an H100 from shapes alone, with two and with three layers of a kind.
The difference is the number of kernels that one layer launches; copies between device buffers count too.
"""

import argparse
import collections
import dataclasses
import re
import sys

import jax
from jax.sharding import NamedSharding, PartitionSpec, use_abstract_mesh
from rich.console import Console
from rich.table import Table

from experiments.kernels.bytes_moved import SUBJECTS, Subject, round_of
from experiments.kernels.gpu_thunks import compile_thunks
from mtpjax import compat
from mtpjax.decoding.gpu_graph import GRAPH_OPTIONS
from mtpjax.models.config import Implementation

MOST = {"dense": 9, "experts": 14}  # launches per layer at batch 1, with kernels


def kinds_of(subject: Subject) -> list[str]:
    """Returns the kinds of feed-forward layers in the model: "dense", "experts" or both."""
    config = subject.config
    if not config.n_routed_experts:
        return ["dense"]
    return ["dense", "experts"] if config.first_k_dense_replace else ["experts"]


def launches_per_layer(
    subject: Subject, kind: str, implementation: Implementation, *, batch: int = 1, num_steps: int = 0
) -> list[str]:
    """Compiles a round and returns what one more trunk layer launches.

    Args:
        subject: the model; its vocabulary is reduced, which saves compile time.
        kind: "dense" or "experts".
        implementation: "xla" or "triton".
        batch: number of rows.
        num_steps: draft levels of the round.

    Returns:
        Names of the kernels without the numbers that XLA gives them, in alphabetical order.
    """
    short, long = (
        _launches(_with_layers(subject, kind, layers), implementation, batch, num_steps) for layers in (2, 3)
    )
    return sorted((collections.Counter(long) - collections.Counter(short)).elements())


def _with_layers(subject: Subject, kind: str, layers: int) -> Subject:
    """Returns the model with this many layers, either all dense, or all with experts except the first."""
    changes = {"num_hidden_layers": layers, "vocab_size": 4096}
    if subject.config.n_routed_experts:
        changes["first_k_dense_replace"] = layers if kind == "dense" else min(1, subject.config.first_k_dense_replace)
    return dataclasses.replace(subject, config=dataclasses.replace(subject.config, **changes))


def _launches(subject: Subject, implementation: Implementation, batch: int, num_steps: int) -> list[str]:
    """Compiles a round and returns the names of all kernels that it launches."""
    function, shapes = round_of(subject, batch, num_steps, implementation)
    mesh = compat.make_mesh({"data": 1}, compat.h100_devices())
    sharding = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)
    with use_abstract_mesh(mesh.abstract_mesh):
        steps = compile_thunks(function.lower(*shapes), GRAPH_OPTIONS)
    names = [step.name or step.kind for top in steps for step in top.walk() if not step.inner]
    return [re.sub(r"(_+\d+)+$", "", name) for name in names]


def main(argv: list[str] | None = None) -> int:
    """Prints launches per layer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--drafts", type=int, default=0, help="draft levels of the round")
    arguments = parser.parse_args(argv)
    table = Table("model", "layer", "xla", "with kernels", "kernels", title="launches per layer on an H100: not run")
    for name in arguments.models:
        for kind in kinds_of(SUBJECTS[name]):
            settings = {"batch": arguments.batch_size, "num_steps": arguments.drafts}
            xla, kernels = (
                launches_per_layer(SUBJECTS[name], kind, implementation, **settings)
                for implementation in ("xla", "triton")
            )
            table.add_row(name, kind, str(len(xla)), str(len(kernels)), ", ".join(kernels))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
