"""The matrix products and the attention of a training step, separately in mtpjax and in PyTorch.

Each engine runs in its own process. `python -m experiments.training.train_products NAME THREADS SHAPE FOLDER` reads and
writes JSON, as `train_engines` does.
"""

import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.common.child import serve, version_of
from experiments.training.train_engines import SHAPES
from mtpjax import ModelConfig

REPEATS = 12


def matrices_of(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Returns the inputs and outputs of each matrix of a step."""
    D, F, H = config.hidden_size, config.intermediate_size, config.head_dim
    heads = config.num_attention_heads
    return {
        "qkv": (D, (heads + 2 * config.num_key_value_heads) * H),
        "output": (heads * H, D),
        "gate_up": (D, 2 * F),
        "down": (F, D),
        "head": (D, config.vocab_size),
    }


def fastest(run: Callable[[], Any]) -> float:
    """Returns the seconds of the fastest of `REPEATS` calls, after two calls that are not timed."""
    times = []
    for number in range(REPEATS + 2):
        begin = time.perf_counter()
        run()
        if number > 1:
            times.append(time.perf_counter() - begin)
    return min(times)


class Parts:
    """Answers requests for the times of an engine's parts."""

    def __init__(self, name: str, threads: int, shape: str):
        self.config, self.make = SHAPES[shape], torch_parts if name == "torch" else mtpjax_parts
        self.versions = {"torch": version_of("torch")} if name == "torch" else {"jax": version_of("jax")}
        if name == "torch":
            import torch

            torch.set_num_threads(threads)

    def run(self, rows: int, length: int) -> dict[str, dict[str, float]]:
        """Returns the milliseconds of each part in each direction."""
        parts = self.make(self.config, rows, length)
        return {part: {name: 1e3 * fastest(call) for name, call in calls.items()} for part, calls in parts.items()}


def random_arrays(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def mtpjax_parts(config: ModelConfig, rows: int, length: int) -> dict[str, dict[str, Callable[[], Any]]]:
    """Makes the calls with the functions that the model runs."""
    import jax
    import jax.numpy as jnp

    from mtpjax.models.layers.attend import attend
    from mtpjax.models.masks import full_view
    from pallas_kernels.row_product import multiply_rows

    def timed(function, *arrays):
        jitted = jax.jit(function)
        return lambda: jax.block_until_ready(jitted(*arrays))

    parts = {}
    for name, (D, F) in matrices_of(config).items():
        x, matrix, gradient = map(jnp.asarray, random_arrays((rows, length, D), (D, F), (rows, length, F)))
        parts[name] = {
            "forward": timed(multiply_rows, x, matrix),
            "input gradient": timed(
                lambda x, w, g: jax.vjp(lambda x: multiply_rows(x, w), x)[1](g), x, matrix, gradient
            ),
            "weight gradient": timed(
                lambda x, w, g: jax.vjp(lambda w: multiply_rows(x, w), w)[1](g), x, matrix, gradient
            ),
        }
    K, H = config.num_key_value_heads, config.head_dim
    G = config.num_attention_heads // K
    q, key, value = map(jnp.asarray, random_arrays((rows, K, length, G, H), *[(rows, K, length, H)] * 2))
    mask = full_view(config, jnp.ones((rows, length), jnp.int32)).mask
    attention = lambda q, key, value: attend(q, [(key, value)], (mask,), scale=config.softmax_scale(H))
    both = lambda q, key, value: jax.vjp(attention, q, key, value)[1](q)
    parts["attention"] = {"forward": timed(attention, q, key, value), "forward + backward": timed(both, q, key, value)}
    return parts


def torch_parts(config: ModelConfig, rows: int, length: int) -> dict[str, dict[str, Callable[[], Any]]]:
    """Makes the calls that PyTorch's autograd makes for `linear` and `scaled_dot_product_attention`."""
    import torch

    parts = {}
    for name, (D, F) in matrices_of(config).items():
        arrays = random_arrays((rows * length, D), (F, D), (rows * length, F))
        x, weight, gradient = map(torch.from_numpy, arrays)
        parts[name] = {
            "forward": lambda x=x, w=weight: torch.nn.functional.linear(x, w),
            "input gradient": lambda g=gradient, w=weight: g @ w,
            "weight gradient": lambda x=x, g=gradient: g.T @ x,
        }
    heads, K, H = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    shapes = [(rows, count, length, H) for count in (heads, K, K)]
    operands = [torch.from_numpy(array).requires_grad_() for array in random_arrays(*shapes)]

    def attention():
        return torch.nn.functional.scaled_dot_product_attention(*operands, is_causal=True, enable_gqa=True)

    def forward():
        with torch.no_grad():
            attention()

    def both():
        attention().backward(operands[0].detach())
        for each in operands:
            each.grad = None

    parts["attention"] = {"forward": forward, "forward + backward": both}
    return parts


def _make(name: str, threads: int, shape: str, folder: pathlib.Path) -> Parts:
    del folder  # `train_engines` reads the initial parameters there
    return Parts(name, threads, shape)


if __name__ == "__main__":
    serve(_make)
