"""The engines that `bench_decode` measures. Each runs in its own process and answers one request per line.

`python -m experiments.decoding.decode_engines NAME THREADS SHAPE FOLDER` reads JSON from stdin and writes JSON to
stdout. With one thread, the process pins itself to one core before it loads the engine.
"""

import pathlib
import time
from typing import Any

from experiments.common.child import serve, version_of
from mtpjax.evaluation.machine import Stopwatch


class Mtpjax:
    """Decodes with `mtpjax.generate` and `mtpjax.speculative_generate`."""

    def __init__(self, shape: str, folder: pathlib.Path):
        import mtpjax

        loaded = {name: mtpjax.load(folder / name) for name in ("random", "rigged")}
        self.model = loaded["random"][0]
        self.params = {name: params for name, (_, params) in loaded.items()}
        self.versions = {name: version_of(name) for name in ("mtpjax", "jax", "jaxlib")}

    def run(self, weights: str, prompts: list[list[int]], num_steps: int, new_tokens: int) -> dict[str, Any]:
        from mtpjax import DecodeConfig, generate, speculative_generate

        # With one prefill pass, a call for one token has the same cache size as a call for all tokens, so both run the
        # same program.
        config = DecodeConfig(max_new_tokens=new_tokens, num_steps=num_steps, prefill_chunk=len(prompts[0]))
        call = speculative_generate if num_steps else generate
        clock = Stopwatch()
        result = call(self.params[weights], prompts, model=self.model, config=config)
        return {**clock.read(), "tokens": result.rows(), "accept_length": result.stats.accept_length}


class Transformers:
    """Decodes with transformers' `generate()`, with `use_mtp` for drafts (DeepSeek, batch 1, one draft per step)."""

    def __init__(self, shape: str, folder: pathlib.Path, threads: int):
        import torch
        import transformers

        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.models = {}
        for name in ("random", "rigged"):
            model = transformers.AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
            layers = model.config.num_hidden_layers
            # transformers finds MTP weights by this pattern. The class fixes it to the 61 layers of the published
            # model.
            model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layers}\..*"]
            self.models[name] = model.eval()
        self.versions = {name: version_of(name) for name in ("torch", "transformers")}

    def run(self, weights: str, prompts: list[list[int]], num_steps: int, new_tokens: int) -> dict[str, Any]:
        import torch

        ids = torch.tensor(prompts)
        options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
        if num_steps:
            options["use_mtp"] = True
        clock = Stopwatch()
        with torch.inference_mode():
            output = self.models[weights].generate(ids, attention_mask=torch.ones_like(ids), **options)
        return {**clock.read(), "tokens": output[:, ids.shape[1] :].tolist()}


class Memory:
    """Measures how fast these threads read memory. Not an engine."""

    def __init__(self, threads: int):
        from concurrent.futures import ThreadPoolExecutor

        import numpy as np

        self.pool = ThreadPoolExecutor(threads)
        self.parts = np.array_split(np.ones(512 * 2**18, np.float32), threads)  # 512 MB
        self.versions = {"numpy": np.__version__}

    def run(self) -> dict[str, Any]:
        """Returns the bytes per second of the fastest of three passes over 512 MB."""

        def measure() -> float:
            begin = time.perf_counter()
            list(self.pool.map(lambda part: part.max(), self.parts))  # NumPy releases the interpreter lock
            return sum(part.nbytes for part in self.parts) / (time.perf_counter() - begin)

        return {"bandwidth": max(measure() for _ in range(3))}


def _make(name: str, threads: int, shape: str, folder: pathlib.Path) -> Any:
    if name == "mtpjax":
        return Mtpjax(shape, folder)
    return Transformers(shape, folder, threads) if name == "transformers" else Memory(threads)


if __name__ == "__main__":
    serve(_make)
