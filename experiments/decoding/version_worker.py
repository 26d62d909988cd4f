"""Runs the part of `bench_versions` that uses one checkout. Uses public names only.

It is run by its path, with `PYTHONPATH` set to the checkout, and answers one JSON request per line.
"""

import json
import os
import pathlib
import sys
import time
from typing import Any

import mtpjax

MODELS: dict[str, Any] = {}  # loaded models by folder


def decode(
    folder: str, prompts: list[list[int]], num_steps: int, new_tokens: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Decodes once and measures it.

    Args:
        folder: the checkpoint.
        prompts: token lists of one length.
        num_steps: draft levels; 0 for plain decoding.
        new_tokens: tokens per row.
        options: other fields of `DecodeConfig`.

    Returns:
        Seconds, tokens, and the dumped HLO files that the call added.
    """
    if folder not in MODELS:
        MODELS[folder] = mtpjax.load(folder)
    model, params = MODELS[folder]
    config = mtpjax.DecodeConfig(
        max_new_tokens=new_tokens, num_steps=num_steps, prefill_chunk=len(prompts[0]), **options
    )
    call = mtpjax.speculative_generate if num_steps else mtpjax.generate
    dumped = pathlib.Path(os.environ["MTPJAX_HLO_DUMP"])
    before = set(dumped.glob("*after_optimizations.txt"))
    begin = time.perf_counter()
    result = call(params, prompts, model=model, config=config)
    tokens = result.rows()
    seconds = time.perf_counter() - begin
    added = [str(file) for file in set(dumped.glob("*after_optimizations.txt")) - before]
    return {"seconds": seconds, "tokens": tokens, "modules": added}


def main() -> None:
    # Libraries may print to stdout, so replies go to a copy of it and stdout itself becomes stderr.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps({"mtpjax": str(pathlib.Path(mtpjax.__path__[0]).parent)}), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(decode(**json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    main()
