"""Times plain decoding, every draft depth and transformers on the same prompts, one at a time, in turns."""

import importlib.util
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.common.smollm2_settings import NUM_DEPTHS
from mtpjax import DecodeConfig, MTPModel, speculative_generate
from mtpjax.evaluation.machine import Stopwatch
from mtpjax.evaluation.profile import break_even_rate

Engine = Callable[[list[int], int], tuple[list[int], int]]
PREFILL = "prefill"


class Timing(NamedTuple):
    """One call of an engine: wall, CPU and waiting time, and verification passes."""

    seconds: float
    cpu_seconds: float
    waited_seconds: float
    steps: int


def make_engines(
    params: dict, gguf: pathlib.Path | None, *, model: MTPModel, draft_vocabulary: Sequence[int], threads: int
) -> dict[str, Engine]:
    """Makes the engines by name: "plain", "1" to "3" draft levels, and "transformers" if it is installed.

    Args:
        params: parameters of `model`.
        gguf: the model's file, for transformers; None: without transformers.
        model: the model with its module.
        draft_vocabulary: token ids that the module may draft.
        threads: threads of transformers.

    Returns:
        Functions from a prompt and a number of new tokens to the tokens and the number of steps.
    """

    def ours(num_steps: int) -> Engine:
        def run(prompt: list[int], new_tokens: int):
            vocabulary = tuple(draft_vocabulary) if num_steps else None
            config = DecodeConfig(max_new_tokens=new_tokens, num_steps=num_steps, draft_vocabulary=vocabulary)
            result = speculative_generate(params, [prompt], model=model, config=config)
            return result.rows()[0], int(result.stats.rounds[0])

        return run

    engines = {"plain": ours(0)} | {str(depth): ours(depth) for depth in range(1, NUM_DEPTHS + 1)}
    if gguf is None:
        return engines
    if all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers", "accelerate")):
        engines["transformers"] = _transformers(gguf, threads)
    else:
        print("speed: no comparison with transformers: pip install torch 'transformers>=5' accelerate", flush=True)
    return engines


def _transformers(gguf: pathlib.Path, threads: int) -> Engine:
    """Loads the same file in float32 with transformers."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    model = loaded.eval()

    def run(prompt: list[int], new_tokens: int):
        ids = torch.tensor([prompt])
        # All engines decode the same number of tokens, so no token ends the text.
        options = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        with torch.inference_mode():
            output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return output[0, len(prompt) :].tolist(), new_tokens - 1

    return run


def measure_speed(engines: dict[str, Engine], prompts: Sequence[list[int]], new_tokens: int, rounds: int) -> dict:
    """Times the engines in turns.

    Args:
        engines: result of `make_engines`.
        prompts: tokens of each prompt.
        new_tokens: tokens to decode.
        rounds: timings of each prompt and engine, after one that only compiles.

    Returns:
        Figures by engine (`summarise`), and the seconds that threads waited for a core in each timed second.
    """
    timings: dict[str, list[Timing]] = {name: [] for name in (PREFILL, *engines)}
    texts: dict[str, list[list[int]]] = {name: [] for name in engines}
    for number in range(rounds + 1):
        for place, prompt in enumerate(prompts, start=1):
            # Prefill and one token first: what a round's cost must leave out.
            calls = [(PREFILL, engines["plain"], 1), *((name, run, new_tokens) for name, run in engines.items())]
            # Engines take turns, so that other programs slow down all of them alike.
            for name, run, count in calls:
                clock = Stopwatch()
                tokens, steps = run(prompt, count)
                if number:
                    timings[name].append(Timing(**clock.read(), steps=steps))
                elif name != PREFILL:
                    texts[name].append(tokens)
            turn = f"timing {number} of {rounds}" if number else "compiling"
            print(f"speed: {turn}, prompt {place} of {len(prompts)}, {len(prompt)} tokens", flush=True)
    found = [timing for each in timings.values() for timing in each]
    waited = sum(timing.waited_seconds for timing in found) / sum(timing.seconds for timing in found)
    return {"engines": summarise(timings, texts, new_tokens), "new_tokens": new_tokens, "waited_share": waited}


def summarise(timings: dict[str, list[Timing]], texts: dict[str, list[list[int]]], new_tokens: int) -> dict[str, Any]:
    """Computes ratios and costs from the timings.

    Other programs change wall times much and CPU times little. With one thread, CPU time is the time that an
    undisturbed call takes.

    Args:
        timings: timings by engine, all in the same order, those of prefill and one token under `PREFILL`.
        texts: texts by engine, one for each prompt.
        new_tokens: tokens of each call.

    Returns:
        Figures by engine, as JSON.
    """

    def read(name: str, field: str) -> np.ndarray:
        return np.array([getattr(timing, field) for timing in timings[name]])

    def round_seconds(name: str) -> np.ndarray:
        return (read(name, "cpu_seconds") - read(PREFILL, "cpu_seconds")) / read(name, "steps")

    report = {}
    for name in texts:
        # Ratios within a turn vary less than times, because disturbances last longer than a turn.
        wall, cpu = (read("plain", field) / read(name, field) for field in ("seconds", "cpu_seconds"))
        report[name] = {
            "tokens_per_second": float(np.median(new_tokens / read(name, "seconds"))),
            "tokens_per_cpu_second": float(np.median(new_tokens / read(name, "cpu_seconds"))),
            "speed_up": float(np.median(wall)),
            "range": [float(wall.min()), float(wall.max())],
            "cpu_speed_up": float(np.median(cpu)),
            "cpu_range": [float(cpu.min()), float(cpu.max())],
            "equal_texts": sum(text == other for text, other in zip(texts[name], texts["plain"], strict=True)),
            "texts": len(texts[name]),
        }
        if name.isdecimal():
            # A round that costs c plain rounds breaks even at accept length c.
            cost = float(np.median(round_seconds(name) / round_seconds("plain")))
            report[name] |= {
                "accept_length": float(read("plain", "steps").sum() / read(name, "steps").sum()),
                "cost": cost,
                "break_even_rate": break_even_rate(cost, int(name)),
            }
    return report
