"""An acceptance rule of a user, in one file: its function and its record."""

import jax.numpy as jnp

from mtpjax.decoding.acceptance.rules import AcceptanceRule


def accept_first(drafts, p, u, num_drafted=None, *, count):
    """Accepts the first `count` drafts, whatever they are."""
    num_accepted = jnp.minimum(count.astype(jnp.int32), len(drafts))
    if num_drafted is not None:
        num_accepted = jnp.minimum(num_accepted, num_drafted)
    return num_accepted, p[num_accepted]


FIRST = AcceptanceRule("first", accept_first, drafts="chain", parameters={"count": 1})
