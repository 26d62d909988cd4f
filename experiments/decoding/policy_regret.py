"""Measures the regret of the adaptive depth policy against the best fixed depth, on simulated rows.

`python -m experiments.decoding.policy_regret [--measured] [--output FILE]` prints one cell for each
acceptance process, cost curve, batch size and length. Regret is the policy's additional time per token, compared with
the fixed depth (0 included) that is best for the process. The policy knows the costs, and with `--measured` also
acceptance rates that were measured on other rows from the same process.

There are two modes. In "batch", all rows end at `length` tokens, and time counts until the last row has ended. In
"stream", a new row replaces each row that ends, and time counts until the batch has made the same number of tokens.

A draft's acceptance is drawn beforehand for every position, so that all depths see the same rows: a round from position
t accepts the run of positions whose random number is below `rate[t] * fall[level]`.
"""

import argparse
import functools
import itertools
import pathlib
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table

from experiments.common.results import write
from mtpjax.console import narrow_table
from mtpjax.decoding.depth_policy import init_policy, update_policy
from mtpjax.evaluation.profile_file import MIN_RATE

LEVELS = 7
BATCHES, LENGTHS, MODES = (1, 4, 16, 64), (64, 256), ("batch", "stream")
SEEDS = {1: 1024, 4: 384, 16: 128, 64: 48}
HARD, EASY, DWELL = 0.3, 0.95, 24  # two rates, and the mean number of tokens in a stretch with one of them
PROCESSES = {
    **{f"constant {rate}": {"rate": rate} for rate in (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.98)},
    "falling 0.8": {"rate": 0.8, "fall": 0.65},  # the rate is multiplied by this factor at each level
    "falling 0.9": {"rate": 0.9, "fall": 0.8},
    "cliff": {"rate": 0.9, "beyond": 0.1},  # the rate of level 1, and the factor for all later levels
    "regimes": {},  # stretches of easy and hard text
    "mixed rows": {},  # every second row is easy, the others are hard
    "drops": {"first": 0.9, "second": 0.3},  # the rates in the first and in the second half of the row
    "rises": {"first": 0.3, "second": 0.9},
    "period 3": {"rate": 1.0, "period": 3},  # every third token is unpredictable, the others are certain
    "period 4": {"rate": 1.0, "period": 4},
    "period 4, noisy": {"rate": 0.9, "period": 4},
}


class Cell(NamedTuple):
    """The policy's result for one process and cost curve. Regret and error are relative to the best fixed depth."""

    mode: str
    batch: int
    length: int
    process: str
    curve: str
    best: int
    speedup: float  # time of plain decoding over time of the best fixed depth
    regret: float
    error: float  # standard error of the regret


def cost_curves(batch: int) -> dict[str, np.ndarray]:
    """Returns the cost of a round at depths 0..LEVELS in units of plain rounds, by kind of hardware."""
    depth = np.arange(LEVELS + 1)

    def bytes_read(tokens):  # DeepSeek-V3: 8 of 256 experts per token
        return 16.6 + 20.4 / 8 * 256 * (1 - (1 - 8 / 256) ** tokens)

    return {
        "gpu": 1 + 0.02 * depth + 0.1 * depth,  # memory-bound: more tokens are nearly free
        "cpu": 1 + 0.5 * depth + 0.06 * depth,
        "compute": 1 + 0.95 * depth + 0.04 * depth,  # compute-bound: each token adds its share
        "moe": bytes_read(batch * (depth + 1)) / bytes_read(batch) + 0.05 * depth,
    }


def draw(process: str, batch: int, length: int, seeds: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Draws rows from a process.

    Args:
        process: a name in `PROCESSES`.
        batch: number of rows B.
        length: tokens per row.
        seeds: number of batches.
        seed: random seed.

    Returns:
        `margin [seeds, B, positions]` and `fall [LEVELS]`. A draft is accepted if their product is above 1.
    """
    # Compute the acceptance rate at each position, by process.
    rng, kind = np.random.default_rng(seed), PROCESSES[process]
    positions = length + LEVELS
    rate = np.full((seeds, batch, positions), kind.get("rate", 0.0), np.float32)
    fall = kind.get("fall", 1.0) ** np.arange(LEVELS)
    if "beyond" in kind:
        fall[1:] = kind["beyond"]
    if process == "regimes":
        ends = rng.random((seeds, batch, positions)) < 1 / DWELL
        first = rng.integers(2, size=(seeds, batch, 1))
        rate[:] = np.where((first + ends.cumsum(axis=2)) % 2, EASY, HARD)
    if process == "mixed rows":
        is_easy = np.arange(batch)[None, :] % 2 == rng.integers(2, size=(seeds, 1))
        rate[:] = np.where(is_easy, EASY, HARD)[:, :, None]
    if "first" in kind:
        rate[:, :, : length // 2], rate[:, :, length // 2 :] = kind["first"], kind["second"]
    if "period" in kind:
        phase = rng.integers(kind["period"], size=(seeds, batch, 1))
        rate[(np.arange(positions) + phase) % kind["period"] == 0] = 0
    return rate / np.maximum(rng.random(rate.shape, np.float32), 1e-9), fall.astype(np.float32)


def _accepted(margin, fall, position, depth):
    """Counts the drafts `[B]` that a round of `depth` levels at `position [B]` accepts; texts wrap around."""
    place = (position[:, None] + jnp.arange(LEVELS)[None, :]) % margin.shape[1]
    is_good = jnp.take_along_axis(margin, place, axis=1) * fall[None, :] > 1
    return jnp.cumprod(is_good & (jnp.arange(LEVELS) < depth)[None, :], axis=1).sum(axis=1)


def _decode(margin, fall, costs, length: int, mode: str, policy, choose):
    """Decodes one batch, with `choose` as the policy's update after each round.

    Returns:
        The time per token and row, and the depth of every round (-1 after the end).
    """
    batch = margin.shape[0]
    limit = length if mode == "batch" else 10**6

    def round_(carry, _):
        position, policy, spent = carry
        depth, is_going = policy.depth, position.sum() < batch * length
        count = _accepted(margin, fall, position, depth)
        after = jnp.where(is_going, jnp.minimum(position + count + 1, limit), position)
        policy = choose(
            policy,
            depth,
            count,
            was_active=position < limit,
            is_active=after < limit,
            remaining=limit - after if mode == "batch" else None,
        )
        return (after, policy, spent + jnp.where(is_going, costs[depth], 0)), jnp.where(is_going, depth, -1)

    carry = (jnp.zeros(batch, jnp.int32), policy, 0.0)
    (position, _, spent), depths = jax.lax.scan(round_, carry, None, length=length)
    return spent * batch / position.sum(), depths


@functools.partial(jax.jit, static_argnames=("length", "mode"))
def adaptive(margin, fall, costs, prior=None, *, length: int, mode: str):
    """Decodes under the policy.

    Returns:
        The time per token `[seeds]`, and the depths `[seeds, rounds]` (-1 after the end).
    """
    policy = init_policy(costs, margin.shape[1], prior=prior)
    return jax.vmap(lambda rows: _decode(rows, fall, costs, length, mode, policy, update_policy))(margin)


@functools.partial(jax.jit, static_argnames=("length", "mode"))
def rounds_at_fixed(margin, fall, *, length: int, mode: str):
    """Returns the rounds per token `[seeds, LEVELS + 1]` at every fixed depth."""
    ones = jnp.ones(LEVELS + 1)

    def at(rows, depth):
        policy = init_policy(ones, margin.shape[1]).replace(depth=depth)
        return _decode(rows, fall, ones, length, mode, policy, lambda policy, *_, **__: policy)[0]

    return jax.vmap(lambda rows: jax.vmap(lambda depth: at(rows, depth))(jnp.arange(LEVELS + 1)))(margin)


@functools.partial(jax.jit, static_argnames="length")
def acceptance(margin, fall, *, length: int) -> tuple[jax.Array, jax.Array]:
    """Measures acceptance on rows from a process.

    Returns:
        The acceptance rate of each level `[LEVELS]`, given the levels before it, in rounds of all levels; and the
        accept lengths `[LEVELS]` at depths 1..LEVELS.
    """
    rows = margin.reshape(-1, margin.shape[-1])

    def at(depth):
        def round_(position, _):
            count = _accepted(rows, fall, position, depth)
            reached = jnp.where(position < length, count + 1, 0)[:, None] >= jnp.arange(1, LEVELS + 2)[None, :]
            return jnp.minimum(position + count + 1, length), reached.sum(axis=0)

        return jax.lax.scan(round_, jnp.zeros(len(rows), jnp.int32), None, length=length)[1].sum(axis=0)

    reached = jax.vmap(at)(jnp.arange(1, LEVELS + 1))
    rates = jnp.maximum(reached[-1, 1:] / jnp.maximum(reached[-1, :-1], 1), MIN_RATE)
    return rates, reached.sum(axis=1) / reached[:, 0]


def measure(
    process: str, batch: int, length: int, mode: str, seeds: int | None = None, *, is_measured: bool = False
) -> list[Cell]:
    """Measures one process at one batch size, length and mode. Returns a cell for every cost curve."""
    seeds = seeds or SEEDS[batch]
    margin, fall = draw(process, batch, length, seeds)
    # Measure rates on other rows from the same process.
    known = acceptance(*draw(process, batch, length, seeds, seed=1), length=length)[0] if is_measured else None
    rounds = np.asarray(rounds_at_fixed(margin, fall, length=length, mode=mode))
    cells = []
    for curve, costs in cost_curves(batch).items():
        fixed = rounds * costs[None, :]
        best = int(fixed.mean(axis=0).argmin())
        spent, _ = adaptive(margin, fall, jnp.asarray(costs, jnp.float32), known, length=length, mode=mode)
        least = fixed[:, best].mean()
        more = (np.asarray(spent) - fixed[:, best]) / least
        error = float(more.std() / np.sqrt(seeds))
        speedup, regret = float(fixed[:, 0].mean() / least), float(more.mean())
        cells.append(Cell(mode, batch, length, process, curve, best, speedup, regret, error))
    return cells


def _table(mode: str, batch: int, length: int, cells: list[Cell]) -> rich.table.Table:
    """Makes a table with a row per process and a column per cost curve."""
    table = narrow_table(
        f"{mode}, {batch} rows, {length} tokens: best depth, its speed-up, regret in % (± 2 standard errors)"
    )
    curves = list(cost_curves(batch))
    for heading in ("rows", *curves):
        table.add_column(heading, no_wrap=True)
    for process in PROCESSES:
        own = {cell.curve: cell for cell in cells if cell.process == process}
        texts = []
        for curve in curves:
            cell = own[curve]
            text = f"{cell.best} {cell.speedup:.2f} {100 * cell.regret:5.1f} ±{200 * cell.error:.1f}"
            texts.append(f"[bold red]{text}[/]" if cell.regret > 0.03 else text)
        table.add_row(process, *texts)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--batch-size", type=int, nargs="+", default=BATCHES, choices=BATCHES, help="batch sizes (default: all)"
    )
    parser.add_argument("--measured", action="store_true", help="give the policy the acceptance rates of other rows")
    parser.add_argument("--output", type=pathlib.Path, default=None, help="JSON file to write, with all cells")
    options = parser.parse_args()
    console, begin, every = rich.console.Console(), time.perf_counter(), []
    for mode in MODES:
        for batch, length in itertools.product(options.batch_size, LENGTHS):
            if mode == "stream" and batch == 1:
                continue  # with one row, the two modes differ only in the last round
            measured = [measure(name, batch, length, mode, is_measured=options.measured) for name in PROCESSES]
            cells = [cell for of_process in measured for cell in of_process]
            console.print(_table(mode, batch, length, cells))
            every += cells
    regrets = np.array([cell.regret for cell in every])
    over = sorted((cell for cell in every if cell.regret > 0.03), key=lambda cell: -cell.regret)
    console.print(
        f"{len(every)} cells in {time.perf_counter() - begin:.0f} s: mean regret {100 * regrets.mean():.2f} %, "
        f"worst {100 * regrets.max():.1f} %, {len(over)} above 3 %:"
    )
    for cell in over:
        where = f"{cell.mode} {cell.batch} x {cell.length}"
        console.print(f"  {100 * cell.regret:4.1f} % {where:16} {cell.process:14} {cell.curve}", highlight=False)
    if options.output is not None:
        write(options.output, [cell._asdict() for cell in every])


if __name__ == "__main__":
    main()
