"""How close the adaptive depth comes to the best fixed one, over synthetic rows and cost curves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from mtpjax.decode import policy as P

S = 7
BATCHES, LENGTHS = (1, 4, 16, 64), (64, 256)


def curves(batch):
    W = np.arange(1, S + 2)
    d = W - 1
    def unique(m): return 256 * (1 - (1 - 8 / 256) ** m)
    moe = (16.6 + 2.55 * unique(batch * W)) / (16.6 + 2.55 * unique(batch))
    return {
        "gpu": 1 + 0.02 * d + 0.1 * d,
        "cpu": 1 + 0.5 * d + 0.06 * d,
        "compute": 1 + 0.95 * d + 0.04 * d,
        "moe": moe + 0.05 * d,
    }


PROCESSES = {
    **{f"constant {a}": ("constant", a) for a in (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.98)},
    "falling .8": ("falling", (0.8, 0.65)),
    "falling .9": ("falling", (0.9, 0.8)),
    "cliff": ("cliff", 0.9),
    "markov": ("markov", 0),
    "mixed": ("mixed", 0),
    "drop": ("drop", 0),
    "rise": ("rise", 0),
}


def base_and_fall(name, B, L, rng, N):
    kind, p = PROCESSES[name]
    base = np.ones((N, B, L + S), np.float32)
    fall = np.ones(S, np.float32)
    if kind == "constant": base *= p
    elif kind == "falling": base *= p[0]; fall = p[1] ** np.arange(S)
    elif kind == "cliff": base *= p; fall[1:] = 0.1
    elif kind == "markov":
        state = rng.random((N, B)) < 0.5
        for t in range(L + S):
            base[:, :, t] = np.where(state, 0.95, 0.3)
            state ^= rng.random((N, B)) < 1 / 24
    elif kind == "mixed":
        if B == 1: base *= np.where(rng.random((N, 1, 1)) < 0.5, 0.95, 0.3)
        else: base *= np.where(np.arange(B) % 2 == 0, 0.95, 0.3)[None, :, None]
    else:
        first, second = (0.9, 0.3) if kind == "drop" else (0.3, 0.9)
        base[:, :, : L // 2] = first; base[:, :, L // 2 :] = second
    return base, fall.astype(np.float32)


def correct(name, B, L, N, seed):
    rng = np.random.default_rng(seed)
    base, fall = base_and_fall(name, B, L, rng, N)
    u = rng.random(base.shape, np.float32)
    return base / np.maximum(u, 1e-9), fall  # accepted iff base*fall > u  <=> base/u*fall>1


def step(ratio, fall, pos, depth):
    """ratio [B, L+S]; pos [B]; returns count"""
    idx = pos[:, None] + jnp.arange(S)[None, :]
    r = jnp.take_along_axis(ratio, idx % ratio.shape[1], axis=1)
    ok = (r * fall[None, :] > 1) & (jnp.arange(S)[None, :] < depth)
    return jnp.cumprod(ok, axis=1).sum(1)


@functools.partial(jax.jit, static_argnames=("length", "stream"))
def adaptive(ratio, fall, costs, length, stream):
    def one(ratio):
        B = ratio.shape[0]
        limit = 10**6 if stream else length
        def body(carry, _):
            pos, policy, cost = carry
            active = pos < limit
            going = pos.sum() < B * length
            count = step(ratio, fall, pos, policy.depth)
            cost = cost + jnp.where(going, policy.costs[policy.depth], 0)
            depth = policy.depth
            new = jnp.where(active & going, jnp.minimum(pos + count + 1, limit), pos)
            policy = P.observe(policy, depth, count, active, new < limit, None if stream else limit - new)
            return (new, policy, cost), depth
        (pos, _, cost), depths = jax.lax.scan(body, (jnp.zeros(B, jnp.int32), P.init_policy(costs, B), 0.0), None, length=length)
        return cost / (pos.sum() / B), depths
    return jax.vmap(one)(ratio)


@functools.partial(jax.jit, static_argnames=("length", "stream"))
def fixed(ratio, fall, length, stream):
    """rounds [N, S+1] per token and row"""
    def one(ratio, depth):
        B = ratio.shape[0]
        limit = 10**6 if stream else length
        def body(carry, _):
            pos, rounds = carry
            going = pos.sum() < B * length
            count = step(ratio, fall, pos, depth)
            return (jnp.where(going, jnp.minimum(pos + count + 1, limit), pos), rounds + going), None
        (pos, rounds), _ = jax.lax.scan(body, (jnp.zeros(B, jnp.int32), 0), None, length=length)
        return rounds / (pos.sum() / B)
    return jax.vmap(lambda r: jax.vmap(lambda d: one(r, d))(jnp.arange(S + 1)))(ratio)


def cell(name, batch, length, seeds, seed=0, stream=False):
    ratio, fall = correct(name, batch, length, seeds, seed)
    rounds = np.asarray(fixed(ratio, fall, length, stream))
    out = {}
    for curve, costs in curves(batch).items():
        fx = rounds * costs[None, :]  # [N, S+1]
        mean = fx.mean(0)
        best = int(mean.argmin())
        ad, _ = adaptive(ratio, fall, jnp.asarray(costs, jnp.float32), length, stream)
        diff = np.asarray(ad) - fx[:, best]
        out[curve] = (diff.mean() / mean[best], diff.std() / np.sqrt(seeds) / mean[best], best, mean[0] / mean[best])
    return out

if __name__ == "__main__":
    import sys, time
    batches = eval(sys.argv[1]) if len(sys.argv) > 1 else BATCHES
    stream = len(sys.argv) > 2
    t = time.time()
    allv = []
    for B in batches:
        for L in LENGTHS:
            for name in PROCESSES:
                seeds = {1: 1024, 4: 256, 16: 64, 64: 32}[B]
                out = cell(name, B, L, seeds, stream=stream)
                allv += [v[0] for v in out.values()]
                print(f"{B:3d} {L:4d} {name:14s} " + "  ".join(f"{k} {100*v[0]:6.2f}±{200*v[1]:.2f} d{v[2]} {v[3]:.2f}" for k, v in out.items()), flush=True)
    a = np.array(allv)
    print("mean", a.mean(), "over 3%", (a > .03).sum(), "of", a.size, "max", a.max(), time.time() - t)
