"""A compiled call whose CUDA graph fails."""

import jax

ERROR = "INTERNAL: cuGraphInstantiate failed: conditional nodes do not support EVENT_WAIT nodes"


class _Unreadable:
    """A result whose call fails on the device, after it was dispatched."""

    def block_until_ready(self):
        raise jax.errors.JaxRuntimeError(ERROR)

    def is_deleted(self):
        return True


class FailingCall:
    """Calls a function until its graph fails. The arguments that it donates are lost then.

    Args:
        how: "dispatch": the call raises; "read": waiting for its result does; "wrong": its result is wrong.
        number: of the first call that fails, from 1.
        result: computes the results of the calls before.
        donated: position of the donated argument.
    """

    def __init__(self, how, number, result, donated=0):
        self.how, self.number, self.result, self.donated, self.calls = how, number, result, donated, 0

    def _cache_size(self):
        return 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls < self.number:
            return self.result(*args, **kwargs)
        if self.how == "wrong":
            return jax.numpy.zeros_like(args[0])
        for leaf in jax.tree.leaves(args[self.donated]):
            if isinstance(leaf, jax.Array):
                leaf.delete()
        if self.how == "read":
            return _Unreadable(), None
        raise jax.errors.JaxRuntimeError(ERROR)
