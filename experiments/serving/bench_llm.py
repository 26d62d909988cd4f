"""Compares `LLM.generate` on many prompts of different lengths with static batches.

    python -m experiments.serving.bench_llm [--prompts 500] [--model larger] [--output FILE]

Prompts have 1 to 64 bytes. The limits of the new tokens have the long tail of `bench_engine`: most are short, and a few
fill the context. Every text is compared with that of `speculative_generate` on its prompt alone.

Rounds are counted as in `bench_engine`: the engine's rounds are its decoding calls, and a static batch of 8 takes as
many rounds as its longest text. The time of `LLM.generate` is compared with that of `speculative_generate` on batches
of 8 prompts, whose rows all have the longest limit of their batch; both run once before they are timed.
"""

import argparse
import dataclasses
import pathlib
import sys
import time

import numpy as np
from rich.console import Console

from experiments.common.results import about, write
from experiments.serving.bench_engine import MAX_LENGTH, MODELS, NUM_SLOTS, NUM_STEPS, Trace, make_model
from mtpjax import LLM, DecodeConfig, speculative_generate
from mtpjax.data.tokenizer import ByteTokenizer

GOAL = 0.55
MAX_PROMPT = 64


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=500, help="number of prompts (default: %(default)s)")
    parser.add_argument("--model", choices=list(MODELS), default="tiny", help="(default: %(default)s)")
    parser.add_argument("--output", type=pathlib.Path, default=None, help="JSON file to write")
    options = parser.parse_args(argv)
    # 1. The prompts, and the limit of each text.
    rng = np.random.default_rng(0)
    model, params = make_model(options.model, vocab_size=256)
    prompts = [rng.integers(1, 256, rng.integers(1, MAX_PROMPT + 1)).tolist() for _ in range(options.prompts)]
    longest = MAX_LENGTH - MAX_PROMPT
    limits = np.clip(rng.lognormal(np.log(40), 0.9, options.prompts), 4, longest).astype(int).tolist()
    # 2. All prompts at once. The first run compiles.
    sizes = {"num_slots": NUM_SLOTS, "batch_sizes": (1, NUM_SLOTS), "max_length": MAX_LENGTH, "rounds_per_call": 1}
    settings = {"num_steps": NUM_STEPS, "prefill_chunk": 16, "prefill_tokens": 32, **sizes}
    llm = LLM.from_params(params, model=model, tokenizer=ByteTokenizer(), **settings)
    llm.generate(prompts, max_new_tokens=limits, ignore_eos=True)
    with Trace(llm.engine) as trace:
        begin = time.perf_counter()
        completions = llm.generate(prompts, max_new_tokens=limits, ignore_eos=True)
        seconds = time.perf_counter() - begin
    rounds = sum(not traced.call.is_prefill for traced in trace.calls)
    # 3. Static batches.
    config = DecodeConfig(num_steps=NUM_STEPS, prefill_chunk=16, max_length=MAX_LENGTH, max_new_tokens=longest)
    batches = [slice(begin, begin + NUM_SLOTS) for begin in range(0, options.prompts, NUM_SLOTS)]

    def run_batches() -> float:
        begin = time.perf_counter()
        for batch in batches:
            limited = dataclasses.replace(config, max_new_tokens=max(limits[batch]))
            speculative_generate(params, prompts[batch], model=model, config=limited)
        return time.perf_counter() - begin

    run_batches()
    static_seconds = run_batches()
    num_steps = [completion.finish.num_steps for completion in completions if completion.finish]
    static_rounds = sum(max(num_steps[batch]) for batch in batches)
    # 4. The texts.
    num_same = 0
    for prompt, limit, completion in zip(prompts, limits, completions, strict=True):
        alone = speculative_generate(
            params, [prompt], model=model, config=dataclasses.replace(config, max_new_tokens=limit)
        )
        num_same += alone.rows()[0] == completion.tokens
    llm.close()
    found = {
        "prompts": options.prompts,
        "new_tokens": sum(limits),
        "same_texts": num_same,
        "rounds": rounds,
        "static_rounds": static_rounds,
        "ratio": rounds / static_rounds,
        "seconds": seconds,
        "static_seconds": static_seconds,
        "time_ratio": seconds / static_seconds,
    }
    write(options.output, {**about(argv), **found})
    console = Console(highlight=False)
    console.print(f"{num_same} of {options.prompts} texts equal those of speculative_generate")
    console.print(f"rounds: {rounds}, in static batches {static_rounds}: {found['ratio']:.3f} (goal: <= {GOAL})")
    console.print(f"seconds: {seconds:.2f}, in static batches {static_seconds:.2f}: {found['time_ratio']:.2f}")
    return 0 if num_same == options.prompts and found["ratio"] <= GOAL else 4


if __name__ == "__main__":
    sys.exit(main())
