"""Does speculation change a token? Compares small models in float32 with three plain ways of decoding.

    python -m experiments.correctness.check_equality [--quick] [--trees]

A cell is one model shape and one draft shape. Its tokens must equal the tokens of `generate`, the tokens of `plain.py`,
and the arg-max of the full uncached pass. This is checked for 64 prompts of different lengths, with weights whose
drafts are right by chance, sometimes, always and never, with a stop token at every position of a run, and with every
limit up to two rounds. Prints one line per cell; the exit code is 4 if anything differs.
"""

import argparse
import dataclasses
import itertools
import sys
import time

import jax
import numpy as np

from mtpjax import DecodeConfig, MTPModel, forward, generate, speculative_generate
from mtpjax.decoding.config import largest_tree
from mtpjax.decoding.reference import plain_generate
from mtpjax.decoding.result import DecodeStats
from tests.helpers.small_models import DRAFT_QUALITIES, constructed_params, small_config

NUM_PROMPTS = 64
NEW_TOKENS = 24
LONGEST_PROMPT = 32
SMALLEST_GAP = 1e-4  # between the two largest logits; reordering float32 sums changes a logit by ~1e-6


@dataclasses.dataclass(frozen=True)
class Cell:
    attention: str
    num_mtp_modules: int
    num_steps: int
    mtp_chaining: str = "chain"
    topk: int = 1
    num_draft_tokens: int | None = None

    def __str__(self):
        tree = f" topk {self.topk} tokens {self.num_draft_tokens}" if self.topk > 1 else ""
        return f"{self.attention:7} modules {self.num_mtp_modules} {self.mtp_chaining:5} steps {self.num_steps}{tree}"


GRID = [
    Cell(attention, modules, steps, chaining)
    for attention, modules, steps, chaining in itertools.product(
        ("grouped", "latent"), (1, 2, 3), (1, 2, 3, 4, 5), ("chain", "trunk")
    )
    if modules > 1 or chaining == "chain"  # chaining does not apply to one module
] + [Cell(attention, modules, steps) for attention in ("sparse", "hybrid") for modules in (1, 2) for steps in (1, 2, 4)]
TREES = [
    Cell(attention, 1, steps, topk=topk, num_draft_tokens=tokens)
    for attention, topk, steps, tokens in itertools.product(
        ("grouped", "latent"), (2, 4, 8), (1, 2, 3, 4, 5), (4, 8, 16, 32)
    )
    if tokens <= largest_tree(topk, steps)
]
COVERING_TREES = [
    Cell("grouped", 1, 1, topk=4, num_draft_tokens=4),
    Cell("grouped", 1, 3, topk=8, num_draft_tokens=32),
    Cell("grouped", 1, 5, topk=2, num_draft_tokens=16),
    Cell("latent", 1, 2, topk=8, num_draft_tokens=16),
    Cell("latent", 1, 4, topk=2, num_draft_tokens=8),
    Cell("sparse", 1, 3, topk=4, num_draft_tokens=16),
]
COVERING = [  # covers nearly every pair of values of the grid's four axes
    Cell("grouped", 1, 3),
    Cell("grouped", 2, 1, "trunk"),
    Cell("grouped", 3, 5, "chain"),
    Cell("grouped", 3, 4, "trunk"),
    Cell("latent", 1, 5),
    Cell("latent", 2, 4, "trunk"),
    Cell("latent", 3, 2, "chain"),
    Cell("sparse", 2, 3),
    Cell("hybrid", 1, 3),
]


@dataclasses.dataclass(frozen=True)
class Reference:
    """Prompts and their continuations: `rows[i]` has NEW_TOKENS tokens."""

    prompts: list[list[int]]
    rows: list[list[int]]

    def until(self, max_new_tokens: int, stop_token_ids: tuple[int, ...] = ()) -> list[list[int]]:
        """Returns the rows, cut at a limit and at stop tokens."""
        ends = ([i + 1 for i, token in enumerate(row) if token in stop_token_ids] + [len(row)] for row in self.rows)
        return [row[: min(end[0], max_new_tokens)] for row, end in zip(self.rows, ends, strict=True)]


def make_reference(
    attention: str,
    draft_quality: str,
    *,
    lengths: tuple[int, ...],
    num_prompts: int = NUM_PROMPTS,
    num_plain: int = NUM_PROMPTS,
    seed: int = 0,
) -> Reference:
    """Decodes prompts of the given lengths, in rotation, with `generate`; raises if another plain way disagrees.

    The texts are checked against the full pass and, for `num_plain` prompts, against `plain.py`. Prompts whose text has
    a near tie are left out.
    """
    model = MTPModel(small_config(attention, num_mtp_modules=3))
    params = constructed_params(model, attention, draft_quality, seed)
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 61, size).tolist() for size, _ in zip(itertools.cycle(lengths), range(num_prompts + 16))]
    rows = generate(params, prompts, model=model, config=DecodeConfig(max_new_tokens=NEW_TOKENS)).rows()

    texts = [prompt + row for prompt, row in zip(prompts, rows, strict=True)]
    padded = np.array([text + [0] * (LONGEST_PROMPT + NEW_TOKENS - len(text)) for text in texts])
    sizes = np.array([len(text) for text in texts])
    logits = np.asarray(forward(params, padded, model=model, lengths=sizes, num_depths=0).logits)
    sorted_logits = np.sort(logits, axis=-1)
    gaps = sorted_logits[:, :, -1] - sorted_logits[:, :, -2]
    kept = []
    for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        where = slice(len(prompt) - 1, len(prompt) + NEW_TOKENS - 1)
        if gaps[number, where].min() < SMALLEST_GAP:
            continue
        _require_equal("forward", logits[number, where].argmax(axis=-1).tolist(), row)
        if len(kept) < num_plain:  # the same capacity for all, so that only one step is compiled
            limit = LONGEST_PROMPT + NEW_TOKENS - len(prompt)
            plain = plain_generate(params, prompt, model=model, max_new_tokens=limit)
            _require_equal("plain_generate", plain[:NEW_TOKENS], row)
        kept.append(number)
    kept = kept[:num_prompts]
    if len(kept) < num_prompts:
        raise AssertionError(
            f"{attention} {draft_quality}: only {len(kept)} of {num_prompts} prompts are free of near ties"
        )
    return Reference([prompts[number] for number in kept], [rows[number] for number in kept])


def _require_equal(name: str, found: list[int], wanted: list[int]) -> None:
    if found != wanted:
        raise AssertionError(f"{name} gives {found}, generate {wanted}")


def check_cell(
    cell: Cell, draft_quality: str, reference: Reference, seed: int = 0
) -> tuple[list[str], int, DecodeStats]:
    """Returns differences (one line each), the number of calls compared, and the statistics of the uncut call."""
    model = MTPModel(small_config(cell.attention, num_mtp_modules=cell.num_mtp_modules, mtp_chaining=cell.mtp_chaining))
    params = constructed_params(model, cell.attention, draft_quality, seed)
    max_tokens = 2 * (cell.num_steps + 1)
    calls: list[dict] = [{"max_new_tokens": NEW_TOKENS}]
    if draft_quality in ("mixed", "right"):  # the others accept almost nothing, so there is no run to cut
        calls += [{"max_new_tokens": limit} for limit in range(1, max_tokens + 1)]
        calls += [
            {"max_new_tokens": NEW_TOKENS, "stop_token_ids": (token,)} for token in reference.rows[0][:max_tokens]
        ]
    # Only for chains. In a tree, the right token may be missing, and the second choice of a wrong drafter may be right.
    expected_length = {"right": cell.num_steps + 1, "wrong": 1}.get(draft_quality) if cell.topk == 1 else None
    differences, stats = [], None
    for call in calls:
        shape = {"num_steps": cell.num_steps, "topk": cell.topk, "num_draft_tokens": cell.num_draft_tokens}
        config = DecodeConfig(**shape, **call)
        result = speculative_generate(params, reference.prompts, model=model, config=config)
        result.stats.check()
        stats = stats or result.stats
        if expected_length and result.stats.rounds.any() and result.stats.accept_length != expected_length:
            differences.append(
                f"{cell} {draft_quality} {call}: accept length {result.stats.accept_length}, not {expected_length}"
            )
        for number, (found, wanted) in enumerate(zip(result.rows(), reference.until(**call), strict=True)):
            if found != wanted:
                differences.append(f"{cell} {draft_quality} {call} prompt {number}: {found}, not {wanted}")
    assert stats is not None
    return differences, len(calls), stats


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a covering subset of the grid, with fewer prompt lengths")
    parser.add_argument("--trees", action="store_true", help="trees instead of chains")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    jax.config.update("jax_default_matmul_precision", "highest")
    began = time.monotonic()

    lengths = (1, 2, 7, 16, 17, LONGEST_PROMPT) if options.quick else tuple(range(1, LONGEST_PROMPT + 1))
    if options.trees:
        cells = COVERING_TREES if options.quick else TREES
    else:
        cells = COVERING if options.quick else GRID
    references, differing, compared = {}, 0, 0
    for attention, draft_quality in itertools.product(dict.fromkeys(cell.attention for cell in cells), DRAFT_QUALITIES):
        references[attention, draft_quality] = make_reference(
            attention, draft_quality, lengths=lengths, seed=options.seed
        )
        print(
            f"{attention:7} {draft_quality:6} generate == plain == forward ({time.monotonic() - began:.0f} s)",
            flush=True,
        )
    for number, cell in enumerate(cells, start=1):
        found, lengths_by_quality = [], []
        for draft_quality in DRAFT_QUALITIES:
            differences, calls, stats = check_cell(
                cell, draft_quality, references[cell.attention, draft_quality], options.seed
            )
            found += differences
            compared += calls * NUM_PROMPTS
            lengths_by_quality.append(f"{draft_quality} {stats.accept_length:.2f}")
        differing += len(found)
        verdict = f"DIFFERS in {len(found)} rows" if found else "equal"
        seconds = time.monotonic() - began
        print(
            f"{number:2}/{len(cells)} {cell} {verdict}; accept length {', '.join(lengths_by_quality)} ({seconds:.0f} s)"
        )
        print("\n".join(found[:3]), end="\n" if found else "", flush=True)
        jax.clear_caches()  # or the programs of the whole grid stay in memory
    print(f"{len(cells)} cells, {compared} rows compared, {differing} differ ({time.monotonic() - began:.0f} s)")
    return 4 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
