"""Compares logits and tokens for a GGUF file with transformers on the same machine.

    python -m experiments.checkpoints.check_gguf FILE.gguf --texts FOLDER [--digits]

Needs the extras `gguf` and `bench`, and accelerate. Compares the logits for 8 prompts, and the tokens of 1,000 lines
from the text files in FOLDER. transformers 5 reads the byte-level tokenizer of a llama file with GPT-2's pre-tokenizer
and ignores `tokenizer.ggml.pre`; `--digits` makes every digit a token, as the value `smollm` of this key requires.
Prints one JSON object. The exit code is 1 if anything differs.
"""

import argparse
import json
import pathlib
import sys

import numpy as np

PROMPTS = (
    "Hello",
    "The capital of France is",
    "def f(x):\n    return",
    "1 + 1 = 2, 23 * 4 =",
    "Once upon a time there was a king who",
    "The capital of Japan, 日本, is",
    "To be, or not to be: that is",
    "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n",
)
TOLERANCE = 2e-4  # of float32 logits, which have magnitudes up to 30
NUM_LINES = 1000


def main() -> int:
    """Runs the comparison.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=pathlib.Path, help="GGUF file")
    parser.add_argument("--texts", type=pathlib.Path, required=True, help="folder of text files")
    parser.add_argument("--digits", action="store_true", help="let transformers split digits, as SmolLM2 does")
    options = parser.parse_args()
    # Read the file with both.
    import transformers

    import mtpjax
    from mtpjax.data.tokenizer import load_tokenizer

    model, params = mtpjax.load(options.file, dtype=np.float32)
    ours = load_tokenizer(options.file, model.config.vocab_size)
    theirs = transformers.AutoTokenizer.from_pretrained(options.file.parent, gguf_file=options.file.name)
    if options.digits:
        from tokenizers import pre_tokenizers

        digits = pre_tokenizers.Digits(individual_digits=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    report = compare_tokens(ours, theirs, read_lines(options.texts))
    report |= compare_logits(options.file, model, params, ours)
    print(json.dumps(report, indent=1))
    is_equal = report["lines_of_equal_ids"] == report["lines_decoded_back"] == report["lines"]
    return 0 if is_equal and report["largest_difference_of_logits"] <= TOLERANCE else 1


def read_lines(folder: pathlib.Path) -> list[str]:
    """Reads lines of text, evenly from all files in a folder.

    Args:
        folder: the folder.

    Returns:
        `NUM_LINES` non-empty lines.
    """
    files = [file.read_text().splitlines() for file in sorted(folder.iterdir()) if file.suffix in (".txt", ".jsonl")]
    full = [[line for line in lines if line.strip()] for lines in files]
    # Take lines at even distances from each file, because a file may be sorted by topic.
    each = -(-NUM_LINES // len(full))
    chosen = [line for lines in full for line in lines[:: max(1, len(lines) // each)][:each]]
    # A short file contributes all of its lines; the longest file fills up the rest.
    chosen += max(full, key=len)[1 : 1 + max(0, NUM_LINES - len(chosen))]
    return chosen[:NUM_LINES]


def compare_tokens(ours, theirs, lines: list[str]) -> dict[str, int]:
    """Counts lines whose tokens are identical, and lines that decode to themselves.

    Args:
        ours: mtpjax's tokenizer.
        theirs: transformers' tokenizer.
        lines: the texts.

    Returns:
        Counts by name.
    """
    ids = [ours.encode(line) for line in lines]
    equal = [theirs.encode(line, add_special_tokens=False) == tokens for line, tokens in zip(lines, ids, strict=True)]
    without = [same for line, same in zip(lines, equal, strict=True) if not any(letter.isnumeric() for letter in line)]
    return {
        "lines": len(lines),
        "tokens": sum(map(len, ids)),
        "lines_of_equal_ids": sum(equal),
        "lines_without_digits": len(without),
        "lines_without_digits_of_equal_ids": sum(without),
        "lines_decoded_back": sum(ours.decode(tokens) == line for line, tokens in zip(lines, ids, strict=True)),
    }


def compare_logits(file: pathlib.Path, model, params, tokenizer) -> dict[str, float]:
    """Compares the logits of both programs over all positions of all prompts.

    Args:
        file: the GGUF file.
        model: mtpjax's model.
        params: its parameters in float32.
        tokenizer: mtpjax's tokenizer.

    Returns:
        The largest difference and the largest logit, by name.
    """
    import jax.numpy as jnp
    import torch
    import transformers

    from mtpjax.models.forward import forward

    reference = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).eval()
    largest, magnitude = 0.0, 0.0
    for prompt in PROMPTS:
        tokens = tokenizer.encode(prompt)
        with torch.no_grad():
            expected = reference(torch.tensor([tokens])).logits[0].numpy()
        rows = jnp.asarray([tokens], jnp.int32)
        found = np.asarray(forward(params, rows, model=model).logits[0])
        largest = max(largest, float(np.abs(found - expected).max()))
        magnitude = max(magnitude, float(np.abs(expected).max()))
    return {
        "prompts": len(PROMPTS),
        "largest_difference_of_logits": largest,
        "largest_logit": magnitude,
        "tolerance": TOLERANCE,
    }


if __name__ == "__main__":
    sys.exit(main())
