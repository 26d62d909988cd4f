"""The shapes that the kernels are for, with the least that each must move: what is lowered, compiled and timed."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import linear_cross_entropy, linear_total_variation, rms_norm


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One op at one shape. `run(*make(key), implementation=...)` is a call of it."""

    op: str  # its name in `pallas_kernels`
    name: str  # the shape in words
    sizes: Mapping[str, int]  # as the op gives them to `pallas_kernels.dispatch.choose`
    run: Callable[..., Any]
    make: Callable[[jax.Array], tuple]  # random arrays; `jax.eval_shape` of it gives the shapes alone
    bytes: int  # each input that is needed read once, each output written once
    operations: int  # multiplications and additions, two for a product
    peers: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)  # others' forms of `run`

    def __str__(self) -> str:
        return f"{self.op}: {self.name}"


def cases() -> list[Case]:
    """All of them, op by op."""
    return [*_rms_norm(), *_linear_cross_entropy(), *_linear_total_variation()]


def _rms_norm() -> Iterator[Case]:
    for rows, width in ((4, 7168), (4096, 7168)):

        def make(key, rows=rows, width=width):
            x, scale = jax.random.split(key)
            return jax.random.normal(x, (rows, width), jnp.bfloat16), jax.random.normal(scale, (width,), jnp.bfloat16)

        yield Case(
            op="rms_norm",
            name=f"{rows} rows of {width}, bfloat16",
            sizes={"rows": rows, "width": width},
            run=rms_norm,
            make=make,
            bytes=2 * (2 * rows * width + width),
            operations=4 * rows * width,
        )


def _linear_cross_entropy() -> Iterator[Case]:
    """Losses and the gradients of hidden and head: three products at least."""
    rows = 4096
    for width, vocabulary in ((4096, 129280), (4096, 151936), (7168, 129280), (7168, 151936)):
        yield Case(
            op="linear_cross_entropy",
            name=f"{rows} rows of {width}, {vocabulary} words, bfloat16, with gradients",
            sizes={"rows": rows, "width": width, "vocabulary": vocabulary},
            run=_of_rows,
            make=functools.partial(_rows_and_head, depths=1, rows=rows, width=width, vocabulary=vocabulary),
            bytes=2 * 2 * (rows * width + width * vocabulary) + 4 * 2 * rows,
            operations=3 * 2 * rows * width * vocabulary,
            peers={"chunks": functools.partial(_by_chunks, compares_with_trunk=False)},
        )


def _linear_total_variation() -> Iterator[Case]:
    """Terms of a trunk and its drafts, and the gradients of hidden and head."""
    rows = 4096
    for drafts, width, vocabulary in ((1, 7168, 129280), (3, 4096, 151936)):
        yield Case(
            op="linear_total_variation",
            name=f"{drafts} drafts, {rows} rows of {width}, {vocabulary} words, bfloat16, with gradients",
            sizes={"rows": rows, "width": width, "vocabulary": vocabulary, "drafts": drafts},
            run=_of_drafts,
            make=functools.partial(_rows_and_head, depths=1 + drafts, rows=rows, width=width, vocabulary=vocabulary),
            bytes=2 * 2 * ((1 + drafts) * rows * width + width * vocabulary) + 4 * (2 + 4 * drafts) * rows,
            operations=3 * 2 * (1 + drafts) * rows * width * vocabulary,
            peers={"chunks": functools.partial(_by_chunks, compares_with_trunk=True)},
        )


def _rows_and_head(key, *, depths, rows, width, vocabulary):
    keys = jax.random.split(key, 3)
    hidden = jax.random.normal(keys[0], (depths, rows, width), jnp.bfloat16)
    head = jax.random.normal(keys[1], (width, vocabulary), jnp.bfloat16) / jnp.bfloat16(width**0.5)
    return hidden, head, jax.random.randint(keys[2], (depths, rows), 0, vocabulary)


def _of_rows(hidden, head, targets, *, implementation):
    def total(hidden, head):
        return linear_cross_entropy(hidden[0], head, targets[0], implementation=implementation).sum()

    return jax.value_and_grad(total, argnums=(0, 1))(hidden, head)


def _of_drafts(hidden, head, targets, *, implementation):
    def total(hidden, head):
        terms = linear_total_variation([hidden], [head], targets, implementation=implementation)
        return terms.cross_entropy.sum() + terms.kl.sum() - terms.overlap.sum()

    return jax.value_and_grad(total, argnums=(0, 1))(hidden, head)


def _by_chunks(hidden, head, targets, *, compares_with_trunk):
    """The trainer's own form, a loop over columns; drafts stand one place apart from the trunk."""
    from mtpjax.train.terms import chunked_terms  # with the trainer come all models

    def total(hidden, head):
        terms = chunked_terms(
            list(hidden[:, None]),
            [head],
            targets[:, None],
            head_of=(0,) * len(hidden),
            vocab_chunk=8192,
            compares_with_trunk=compares_with_trunk,
        )
        return terms.cross_entropy.sum() + terms.kl.sum() - terms.overlap.sum()

    return jax.value_and_grad(total, argnums=(0, 1))(hidden, head)
