"""The training steps that `bench_train` measures, in mtpjax and in PyTorch.

Each engine runs in its own process (`child.Child`), with the same initial parameters and the same batches. A step
consists of the forward pass, the cross-entropies of the trunk and of every depth, the backward pass, clipping by the
global norm, and AdamW. `python -m experiments.training.train_engines NAME THREADS SHAPE FOLDER` reads and writes
JSON.
"""

import dataclasses
import functools
import pathlib
import re
import tempfile
from typing import Any

import numpy as np

from experiments.common.child import serve, version_of
from experiments.common.decode_checkpoints import SHAPES as DECODED
from mtpjax import ModelConfig, TrainConfig
from mtpjax.evaluation.machine import Stopwatch, product_rate
from mtpjax.host import keep_freed_memory

SHAPES = {  # Llama-like, float32
    "5M": ModelConfig(
        vocab_size=4096,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=768,
        tie_word_embeddings=True,
        num_mtp_modules=1,
    ),
    "30M": DECODED["S"],
    "tiny": ModelConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        tie_word_embeddings=True,
        num_mtp_modules=2,
    ),
}
START = "start.npz"
SETTINGS = TrainConfig(learning_rate=1e-3)  # for AdamW, its decay and the clipping; the learning rate is constant


def write_start(folder: pathlib.Path, shape: str) -> None:
    """Writes the initial parameters of every engine by path, in mtpjax's layout with unrolled layers."""
    import jax

    from mtpjax import MTPModel, init_params

    config = SHAPES[shape]
    params = init_params(MTPModel(config), jax.random.key(0))
    params["embedding"] *= config.hidden_size**-0.5  # tied to the head, so the logits have variance 1
    leaves = jax.tree_util.tree_leaves_with_path(params)
    arrays: dict[str, Any] = {".".join(key.key for key in path): np.asarray(leaf) for path, leaf in leaves}
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / START, **arrays)


def batch_tokens(shape: str, number: int, rows: int, length: int) -> np.ndarray:
    """Returns the tokens `[rows, length]` int32 of batch `number`; every row is one document."""
    return np.random.default_rng(number).integers(0, SHAPES[shape].vocab_size, (rows, length), dtype=np.int32)


class Mtpjax:
    """Runs `train_step` with `jax.jit`, as `mtpjax train` does. Every number of depths has its own state."""

    def __init__(self, shape: str, folder: pathlib.Path):
        from mtpjax import MTPModel
        from mtpjax.models.trunk import stack_layers

        params: dict[str, Any] = {}
        for name, array in np.load(folder / START).items():
            *path, last = name.split(".")
            functools.reduce(lambda tree, key: tree.setdefault(key, {}), path, params)[last] = array
        self.shape, self.model = shape, MTPModel(SHAPES[shape], scan_layers=True)
        self.params = stack_layers(params, SHAPES[shape])
        self.running: dict[int, tuple[Any, Any]] = {}  # depths -> the step and its state
        self.versions = {name: version_of(name) for name in ("mtpjax", "jax", "jaxlib")}

    def _begin(self, num_depths: int) -> tuple[Any, Any]:
        import jax
        import jax.numpy as jnp

        from mtpjax.training.gradients import TrainSpec
        from mtpjax.training.step import make_optimizer, train_step
        from mtpjax.training.train_state import init_train_state

        optimizer = make_optimizer(SETTINGS)
        spec = TrainSpec(model=self.model, num_depths=num_depths)
        step = functools.partial(train_step, spec=spec, optimizer=optimizer)
        state = init_train_state(jax.tree.map(jnp.array, self.params), optimizer)
        return jax.jit(step, donate_argnames="state"), state

    def run(
        self, num_depths: int, first: int, steps: int, rows: int, length: int, is_traced: bool = False
    ) -> dict[str, Any]:
        """Runs an update and then `steps` timed ones; returns times and losses, and if traced also `parts_of_step`.

        The system may reclaim memory of an engine that waits for its turn, so the first update is not timed.
        """
        import jax

        step, state = self.running.get(num_depths) or self._begin(num_depths)
        if is_traced:
            batch = self._batch(first, rows, length)
            lowered = step.lower(state, batch, SETTINGS.learning_rate, SETTINGS.mtp_loss_scale)
            with tempfile.TemporaryDirectory() as folder:
                with jax.profiler.trace(folder):
                    result = self.run(num_depths, first, steps, rows, length)
                return {**result, "parts": parts_of_step(pathlib.Path(folder), lowered.compile().as_text(), 1 + steps)}
        losses, clock = [], Stopwatch()
        for number in range(first, first + 1 + steps):
            clock = Stopwatch() if number == first + 1 else clock
            batch = self._batch(number, rows, length)
            state, metrics = step(state, batch, SETTINGS.learning_rate, SETTINGS.mtp_loss_scale)
            assert metrics["is_finite"]  # a training run also checks this in every step
            losses.append(metrics["losses"])
        times = clock.read()
        self.running[num_depths] = (step, state)
        return {**times, "losses": [row.tolist() for row in losses]}

    def _batch(self, number: int, rows: int, length: int):
        from mtpjax.data.packing import Batch

        tokens = batch_tokens(self.shape, number, rows, length)
        return Batch(tokens, np.ones_like(tokens), np.ones_like(tokens, bool))


def parts_of_step(folder: pathlib.Path, module: str, steps: int) -> dict[str, dict[str, float]]:
    """Returns the seconds of a step in each part of the model, separately for matrix products and the rest.

    Reads the profiler's trace of `steps` steps in `folder`, and the text of the compiled module, whose instructions
    name the parts.
    """
    import jax

    sources = dict(re.findall(r'^ *(?:ROOT )?%?([\w.\-]+) = .*op_name="([^"]*)"', module, re.MULTILINE))
    parts: dict[str, dict[str, float]] = {}
    for plane in jax.profiler.ProfileData.from_file(str(next(folder.rglob("*.xplane.pb")))).planes:
        for event in (event for line in plane.lines for event in line.events):
            name = str(dict(event.stats).get("hlo_op", ""))
            if name and not name.startswith(("while", "call", "conditional")):  # the instructions in their bodies count
                source = sources.get(name, "")
                is_product = name.startswith("dot") or source.endswith("dot_general")
                seconds = parts.setdefault(_part(source), {"products": 0.0, "rest": 0.0})
                seconds["products" if is_product else "rest"] += event.duration_ns * 1e-9 / steps
    return parts


def _part(source: str) -> str:
    if "/attention/" in source:
        return "attention"
    if "/dense/" in source:
        return "feed-forward"
    if "MTPModel.logits" in source or "jvp()" in source:
        return "head and losses"
    return "norms, embedding, copies" if "jvp(" in source or not source else "optimiser"


class Torch:
    """The same step with `torch.nn.functional`. Each draft depth needs its own module."""

    def __init__(self, shape: str, folder: pathlib.Path, threads: int, *, is_compiled: bool):
        import torch

        torch.set_num_threads(threads)
        self.shape = shape
        self.start = {name: _torch_layout(name, array) for name, array in np.load(folder / START).items()}
        self.loss_of = torch.compile(torch_losses) if is_compiled else torch_losses
        self.running: dict[int, tuple[Any, Any]] = {}  # depths -> the parameters and their optimizer
        self.versions = {"torch": version_of("torch")}

    def _begin(self) -> tuple[Any, Any]:
        import torch

        params = {name: torch.nn.Parameter(torch.tensor(array)) for name, array in self.start.items()}
        is_decayed = {name: leaf.ndim > 1 for name, leaf in params.items()}
        groups = [
            {"params": [params[name] for name in params if is_decayed[name] == decayed], "weight_decay": decay}
            for decayed, decay in ((True, SETTINGS.weight_decay), (False, 0.0))
        ]
        return params, torch.optim.AdamW(groups, lr=SETTINGS.learning_rate, betas=(0.9, 0.95), fused=True)

    def run(self, num_depths: int, first: int, steps: int, rows: int, length: int) -> dict[str, Any]:
        import torch

        if num_depths not in self.running:
            self.running[num_depths] = self._begin()
        params, optimizer = self.running[num_depths]
        config, losses, clock = SHAPES[self.shape], [], Stopwatch()
        for number in range(first, first + 1 + steps):
            clock = Stopwatch() if number == first + 1 else clock
            tokens = torch.from_numpy(batch_tokens(self.shape, number, rows, length)).long()
            each = self.loss_of(params, tokens, config, num_depths)
            total = each[0] + SETTINGS.mtp_loss_scale * each[1:].mean() if num_depths else each[0]
            optimizer.zero_grad(set_to_none=True)
            total.backward()
            torch.nn.utils.clip_grad_norm_(params.values(), SETTINGS.gradient_clip)
            optimizer.step()
            losses.append(each.detach())
        return {**clock.read(), "losses": [row.tolist() for row in losses]}


def _torch_layout(name: str, array: np.ndarray) -> np.ndarray:
    """Returns a weight as `[out, in]`, as `torch.nn.functional.linear` requires."""
    if name == "embedding" or array.ndim == 1:
        return array
    return np.ascontiguousarray(array.reshape(array.shape[0], -1).T)


def torch_losses(params: dict[str, Any], tokens, config: ModelConfig, num_depths: int):
    """Returns the cross-entropies `[1 + num_depths]` of tokens `[B, T]`, as in `mtpjax.training.losses`."""
    import torch
    import torch.nn.functional as F

    T, H = tokens.shape[1], config.head_dim
    K = config.num_key_value_heads
    G = config.num_attention_heads // K
    positions = torch.arange(T, dtype=torch.float32)
    angles = positions[:, None] * config.rope_theta ** (-torch.arange(0, H, 2, dtype=torch.float32) / H)
    cos, sin = angles.cos(), angles.sin()

    def norm(x, name):
        return F.rms_norm(x, x.shape[-1:], params[f"{name}.scale"], config.rms_norm_eps)

    def rotate(x):  # [B, N, T, H]
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def block(x, name):
        made = F.linear(norm(x, f"{name}.norm_attention"), params[f"{name}.attention.qkv"])
        q, k, v = made.unflatten(-1, (K, G + 2, H)).split([G, 1, 1], dim=3)
        q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in (q, k, v))
        attended = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        x = x + F.linear(attended.transpose(1, 2).flatten(2), params[f"{name}.attention.output"])
        made = F.linear(norm(x, f"{name}.norm_feed_forward"), params[f"{name}.dense.gate_up"])
        gate, up = made.chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, params[f"{name}.dense.down"])

    def cross_entropy(hidden, depth):
        logits = F.linear(hidden, params["embedding"])
        targets = F.pad(tokens[:, depth + 1 :], (0, depth + 1), value=-100)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    x = F.embedding(tokens, params["embedding"])
    for index in range(config.num_hidden_layers):
        x = block(x, f"trunk.layer_{index}")
    hidden = norm(x, "norm_final")
    losses = [cross_entropy(hidden, 0)]
    for depth in range(1, num_depths + 1):
        name = f"mtp_{depth - 1}"
        embedding = F.embedding(F.pad(tokens[:, depth:], (0, depth)), params["embedding"])
        pair = [norm(embedding, f"{name}.norm_embedding"), norm(hidden, f"{name}.norm_hidden")]
        hidden = norm(
            block(F.linear(torch.cat(pair, dim=-1), params[f"{name}.project"]), f"{name}.block"), f"{name}.norm_output"
        )
        losses.append(cross_entropy(hidden, depth))
    return torch.stack(losses)


class Products:
    """Measures how fast XLA multiplies matrices with these threads, in FLOP/s. Not an engine."""

    def __init__(self):
        self.versions: dict[str, str] = {}

    def run(self) -> dict[str, Any]:
        """Returns the rate of the fastest of ten products of `[2048, 1024]` and `[1024, 1024]`."""
        return {"rate": product_rate()}


def step_flops(config: ModelConfig, num_depths: int, rows: int, length: int) -> float:
    """Returns the model FLOPs of a step on rows that each hold one document (`mtpjax.evaluation.update_flops`)."""
    from mtpjax.evaluation.update_flops import Trained, total_flops, update_flops
    from mtpjax.models.flops import RowCounts
    from mtpjax.models.params import param_shapes

    trained = Trained(num_depths=num_depths)
    parts = update_flops(config, param_shapes(config), RowCounts.full(rows, length), trained)
    assert parts is not None, "MTP modules are always counted"
    return total_flops(parts)


def loss_memory(
    shape: str, vocab_size: int, mix: str, vocab_chunk: int, num_depths: int, rows: int, length: int
) -> int:
    """Returns the temporary bytes that a compiled step needs according to XLA. Nothing runs."""
    import jax
    import jax.numpy as jnp

    from mtpjax import MTPModel, Objective, init_params
    from mtpjax.data.packing import Batch
    from mtpjax.training.gradients import TrainSpec
    from mtpjax.training.step import make_optimizer, train_step
    from mtpjax.training.train_state import init_train_state

    model = MTPModel(dataclasses.replace(SHAPES[shape], vocab_size=vocab_size), scan_layers=True)
    optimizer = make_optimizer(SETTINGS)
    objective = Objective(mix={mix: 1.0}, vocab_chunk=vocab_chunk)
    spec = TrainSpec(model=model, num_depths=num_depths, objective=objective)
    step = functools.partial(train_step, spec=spec, optimizer=optimizer)

    def begin():
        return init_train_state(init_params(model, jax.random.key(0)), optimizer)

    integers, is_target = (jax.ShapeDtypeStruct((rows, length), dtype) for dtype in (jnp.int32, bool))
    batch: Any = Batch(integers, integers, is_target)  # pyright: ignore[reportArgumentType]
    compiled = jax.jit(step, donate_argnames="state").lower(jax.eval_shape(begin), batch, 0.0, 0.0).compile()
    memory: Any = compiled.memory_analysis()
    return memory.temp_size_in_bytes


def _make(name: str, threads: int, shape: str, folder: pathlib.Path) -> Any:
    if name == "mtpjax":
        return Mtpjax(shape, folder)
    if name == "products":
        return Products()
    return Torch(shape, folder, threads, is_compiled=name == "torch compiled")


if __name__ == "__main__":
    # `mtpjax train` does this too; PyTorch gets the same advantage.
    keep_freed_memory()
    serve(_make)
