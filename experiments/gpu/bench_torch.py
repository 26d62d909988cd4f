"""Times PyTorch per token for one row, with the shapes of `bench_gpu`.

    python -m experiments.gpu.bench_torch [--models 1B 8B] [--forms eager compiled tuned] [--output FILE]
    python -m experiments.gpu.bench_torch --quick        # a toy, on any machine: shows that it runs

The recipe follows gpt-fast: random bfloat16 weights, fused query-key-value and gate-up matrices, a static KV cache, and
one decoding step, including the arg-max, as one CUDA graph. There are three forms:

- eager: the graph holds PyTorch's own kernels.
- compiled: one decoder layer and the head are compiled by Inductor. All layers share the layer's code.
- tuned: the same with coordinate descent over the tile sizes.

There is no prefill. The cache holds zeros, because only its length affects the time. Results are written after every
cell.
"""

import argparse
import dataclasses
import importlib.util
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console

from experiments.common import RESULTS
from experiments.common.results import about, write
from experiments.gpu.bench_gpu import MODELS
from mtpjax import ModelConfig, presets

RESULT = RESULTS / "bench_torch.json"
FORMS = ("eager", "compiled", "tuned")
CACHE_STEP = 256  # the number of cache slots is a multiple of this


@dataclasses.dataclass(frozen=True)
class Layer:
    """Weights `[out, in]` of a decoder layer, and its cache `[1, kv heads, slots, head size]`."""

    norm_attention: Any
    qkv: Any
    output: Any
    norm_mlp: Any
    gate_up: Any
    down: Any
    keys: Any
    values: Any

    @property
    def tensors(self) -> tuple:
        """Returns all tensors, in the order of the layer's arguments."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A Llama-like decoder for one row."""

    layers: list[Layer]
    embedding: Any  # [V, D]
    head: Any  # [V, D]
    norm: Any  # [D]


def make_decoder(config: ModelConfig, num_slots: int, device: str) -> Decoder:
    """Makes random weights on the device."""
    import torch

    D, F, V, H = config.hidden_size, config.intermediate_size, config.vocab_size, config.head_dim
    N, K = config.num_attention_heads, config.num_key_value_heads
    kind = {"device": device, "dtype": torch.bfloat16}

    def matrix(rows: int, columns: int):
        return torch.randn(rows, columns, **kind) * columns**-0.5

    def make_layer() -> Layer:
        return Layer(
            norm_attention=torch.ones(D, **kind),
            qkv=matrix((N + 2 * K) * H, D),
            output=matrix(D, N * H),
            norm_mlp=torch.ones(D, **kind),
            gate_up=matrix(2 * F, D),
            down=matrix(D, F),
            keys=torch.zeros(1, K, num_slots, H, **kind),
            values=torch.zeros(1, K, num_slots, H, **kind),
        )

    layers = [make_layer() for _ in range(config.num_hidden_layers)]
    return Decoder(layers, matrix(V, D), matrix(V, D), torch.ones(D, **kind))


def make_functions(config: ModelConfig) -> tuple[Callable, Callable]:
    """Returns the functions of a decoder layer and of the head, for one token of one row."""
    import torch
    from torch.nn import functional

    N, K, H = config.num_attention_heads, config.num_key_value_heads, config.head_dim

    def rms_norm(x, scale):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps)).to(x.dtype) * scale

    def rotate(x, cos, sin):
        first, second = x.float().chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)

    def layer(x, position, mask, cos, sin, norm_attention, qkv, output, norm_mlp, gate_up, down, keys, values):
        # 1. Attention: project, rotate, write the token's entry to the cache, and attend to all slots up to it.
        projected = functional.linear(rms_norm(x, norm_attention), qkv).split((N * H, K * H, K * H), -1)
        query, key, value = (each.view(1, 1, -1, H).transpose(1, 2) for each in projected)
        keys.index_copy_(2, position, rotate(key, cos, sin))
        values.index_copy_(2, position, value)
        attended = functional.scaled_dot_product_attention(
            rotate(query, cos, sin), keys, values, attn_mask=mask, enable_gqa=True
        )
        x = x + functional.linear(attended.transpose(1, 2).reshape(1, 1, -1), output)
        # 2. The gated MLP.
        gate, up = functional.linear(rms_norm(x, norm_mlp), gate_up).chunk(2, -1)
        return x + functional.linear(functional.silu(gate) * up, down)

    def choose_token(x, norm, head):
        return functional.linear(rms_norm(x, norm), head).argmax(-1)

    return layer, choose_token


def compile_functions(functions: tuple[Callable, Callable], form: str) -> tuple[Callable, ...]:
    """Compiles the functions that the form needs."""
    import torch

    if form == "eager":
        return functions
    torch._dynamo.reset()  # discard what earlier forms and models compiled
    options = {"coordinate_descent_tuning": form == "tuned"}
    return tuple(torch.compile(each, fullgraph=True, dynamic=False, options=options) for each in functions)


def measure(
    decoder: Decoder, config: ModelConfig, form: str, *, context: int, new_tokens: int, repeats: int
) -> dict[str, Any]:
    """Measures the time per token.

    Args:
        decoder: the weights.
        config: their shapes.
        form: one of `FORMS`.
        context: tokens in the cache before the first step.
        new_tokens: steps per measurement.
        repeats: number of measurements.

    Returns:
        Seconds until the form was ready, and seconds per token of each measurement.
    """
    import torch

    begin = time.perf_counter()
    device = decoder.embedding.device
    on_gpu = device.type == "cuda"
    layer, choose_token = compile_functions(make_functions(config), form)
    H = config.head_dim
    frequencies = config.rope_theta ** (-torch.arange(0, H, 2, device=device).float() / H)
    token = torch.zeros(1, 1, device=device, dtype=torch.long)
    position = torch.full((1,), context, device=device, dtype=torch.long)
    slots = torch.arange(decoder.layers[0].keys.shape[2], device=device)

    def step() -> None:
        angles = position.float()[:, None] * frequencies
        mask = (slots <= position)[None, None, None]
        x = torch.nn.functional.embedding(token, decoder.embedding)
        for weights in decoder.layers:
            x = layer(x, position, mask, angles.cos(), angles.sin(), *weights.tensors)
        token.copy_(choose_token(x, decoder.norm, decoder.head))
        position.add_(1)

    run = step
    if on_gpu:
        # Compile and warm up on a different stream, as CUDA's capture requires, then record one step.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    else:
        step()
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    wait()
    ready, took = time.perf_counter() - begin, []
    for _ in range(repeats + 1):
        position.fill_(context)
        wait()
        start = time.perf_counter()
        for _ in range(new_tokens):
            run()
        wait()
        took.append((time.perf_counter() - start) / new_tokens)
    return {"ready_seconds": ready, "seconds": took[1:]}  # the first repeat warms up


def main(argv: list[str] | None = None) -> int:
    """Measures models in each form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["8B", "1B"], help="(default: 8B 1B)")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="(default: all)")
    parser.add_argument("--prompt-length", type=int, default=1792, help="tokens in the cache (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=129, help="steps of a measurement (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each form (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a toy on any machine, without compilation")
    parser.add_argument("--output", type=pathlib.Path, default=None, help=f"default: {RESULT.name} in results/")
    options = parser.parse_args(argv)
    if importlib.util.find_spec("torch") is None:
        print("this measures PyTorch, which is not installed: pip install -e '.[bench]'", file=sys.stderr)
        return 3
    import torch

    if not options.quick and not torch.cuda.is_available():
        print("this measures a GPU, and PyTorch has none here; --quick runs anywhere", file=sys.stderr)
        return 3
    configs, device = {name: MODELS[name] for name in options.models}, "cuda"
    if options.quick:
        configs, device, options.forms = {"tiny": presets["tiny"]}, "cpu", ["eager"]
        options.prompt_length, options.new_tokens, options.repeats = 16, 4, 1
    for config in configs.values():
        if config.is_moe or config.attention != "grouped":
            parser.error("only dense models with grouped attention are implemented in PyTorch here")
    output = options.output or (None if options.quick else RESULT)
    found: dict[str, Any] = about(
        argv,
        device="cpu" if options.quick else torch.cuda.get_device_name(),
        torch=torch.__version__,
        context=options.prompt_length + options.new_tokens // 2,
        cells=[],
    )
    console = Console(highlight=False)
    num_slots = -(-(options.prompt_length + options.new_tokens) // CACHE_STEP) * CACHE_STEP
    # The forms that compile fastest come first, so that an interrupted run has a row for each model.
    with torch.inference_mode():
        decoders = {name: make_decoder(config, num_slots, device) for name, config in configs.items()}
        for form in options.forms:
            for name, config in configs.items():
                cell = measure(
                    decoders[name],
                    config,
                    form,
                    context=options.prompt_length,
                    new_tokens=options.new_tokens,
                    repeats=options.repeats,
                )
                found["cells"].append({"model": name, "form": form, "slots": num_slots, **cell})
                write(output, found)
                taken = float(np.median(cell["seconds"]))
                console.print(
                    f"{name}, PyTorch {form}: {1e6 * taken:.0f} us a token, ready after {cell['ready_seconds']:.0f} s"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
