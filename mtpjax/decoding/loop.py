"""The speculation loop: prefill, then propose, verify, accept, commit in one `lax.while_loop`."""

import functools

import jax
import jax.numpy as jnp

from mtpjax.decoding.depth_policy import observe
from mtpjax.decoding.draft import Draft, DraftHead, adjust_logits, draft_head, propose
from mtpjax.decoding.intake import catch_up, keep_hidden, waiting
from mtpjax.decoding.sampling import distribution, draw_target
from mtpjax.decoding.state import RING, WIDE, DecodeState, Plan
from mtpjax.decoding.verify import judge, verify
from mtpjax.models.cache import commit, gather_path, read_rows, write_rows
from mtpjax.models.layers.attend import cached_view
from mtpjax.models.model import MTPModel, bind


def prefill(params: dict, state: DecodeState, *, model: MTPModel, plan: Plan) -> DecodeState:
    """Takes in the prompts, chunk by chunk, over trunk and modules, and commits the first new token of each row.

    The modules' caches cover the prompt but for the slots whose token is not there yet: the first round takes those in.
    """
    apply = bind(model, params)
    capacity, chunk = state.tokens.shape[1], plan.chunk
    in_use = len(state.modules)
    kept = jnp.maximum(state.length - max(in_use, 1), 0)  # position of the first hidden row to keep
    kept_rows = kept[:, None] + jnp.arange(state.hidden.shape[1])[None, :]

    def take_in(carry):
        index, trunk, modules, hidden_kept = carry
        start = jnp.full_like(state.length, index * chunk)
        taken = jnp.clip(state.length - start, 0, chunk)
        view = cached_view(model.config, start, chunk, capacity, taken=taken)
        module_view = cached_view(model.config, start, chunk, capacity, window=plan.window) if plan.window else view
        hidden, before, trunk = apply(read_rows(state.tokens, start, chunk), view, trunk, method="run_trunk")
        entering = carried = apply(hidden, before, method="entering")
        caches = []
        for number, cache in enumerate(modules):
            source = entering if model.config.mtp_chaining == "trunk" else carried
            _, carried, entries = apply(
                source,
                read_rows(state.tokens, start + number + 1, chunk),
                module_view,
                cache.layers[0],
                index=number,
                method="run_module",
            )
            caches.append(cache.replace(layers=(entries,)))
        place = kept_rows - start[:, None]
        found = jnp.take_along_axis(entering, jnp.clip(place, 0, chunk - 1)[:, :, None], axis=1)
        is_here = (place >= 0) & (place < chunk)
        return index + 1, trunk, tuple(caches), jnp.where(is_here[:, :, None], found, hidden_kept)

    num_chunks = (state.length.max() + chunk - 1) // chunk
    _, trunk, modules, hidden = jax.lax.while_loop(
        lambda carry: carry[0] < num_chunks, take_in, (0, state.trunk, state.modules, state.hidden)
    )
    modules = tuple(commit(cache, jnp.maximum(state.length - 1 - index, 0)) for index, cache in enumerate(modules))
    last = read_rows(hidden, state.length - 1 - kept, 1)
    logits = apply(apply(last, method="after_final_norm"), method="logits")
    adjusted = adjust_logits(logits, state, None, jnp.zeros_like(state.length)[:, None], model)
    first = jnp.argmax(adjusted, axis=-1).astype(jnp.int32)
    if plan.rule != "greedy":
        first = draw_target(distribution(adjusted, state.sampling), state.sampling, state.length[:, None])
    state = state.replace(trunk=trunk, modules=modules, hidden=hidden, hidden_start=kept)
    state, _ = _emit(state, first, jnp.ones_like(state.length), logits)
    return state.replace(trunk=commit(trunk, state.length - 1))


def least_rows(batch: int, platform: str, implementation: str) -> int:
    """Fewest rows worth passing through a model: on a GPU a lone one gets another beside it, which is thrown away.

    There XLA writes the product of one row with a matrix out as an elementwise product the size of the matrix. The
    kernels take one row.
    """
    return 2 if batch == 1 and platform != "cpu" and implementation != "triton" else 1


def run_round(
    params: dict, state: DecodeState, *, model: MTPModel, plan: Plan, head: DraftHead | None = None
) -> DecodeState:
    """One round for every row that is not done: drafts, one trunk pass, acceptance, commit."""
    K = plan.num_steps
    if K:
        draft, state = propose(params, state, model=model, plan=plan, head=head)
    else:
        draft = Draft(read_rows(state.tokens, state.length - 1, 1))
    verified = verify(params, state, draft, model=model, plan=plan)
    verdict = judge(state, draft, verified, model=model, plan=plan)

    length, is_running = state.length, ~state.done
    levels = jnp.arange(1, K + 2)[None, :]
    was_accepted = levels[:, :-1] <= verdict.count[:, None]
    counted = state.proposed.shape[1]  # levels of the deepest round

    def add(counts, new):
        return counts + jnp.pad(new.astype(jnp.int32), ((0, 0), (0, counted - K)))

    trunk, logits, entering = verified.trunk, verified.logits, verified.entering
    if verdict.path is not None:
        trunk = gather_path(trunk, length - 1, verdict.path, draft.tokens.shape[1])
        if logits is not None:
            logits = jnp.take_along_axis(logits, verdict.path[:, :, None], axis=1)
        entering = jnp.take_along_axis(entering, verdict.path[:, :, None], axis=1)
    origin = write_rows(state.origin, jnp.where(levels <= verdict.count[:, None], levels, 0), length)
    state = state.replace(
        steps=state.steps + is_running,
        proposed=add(state.proposed, jnp.broadcast_to(is_running[:, None], was_accepted.shape)),
        accepted=add(state.accepted, was_accepted & is_running[:, None]),
        origin=origin,
    )
    state = keep_hidden(state, entering, length, has_drafted=K > 0)
    state, emitted = _emit(state, verdict.tokens, verdict.count + 1, logits)
    state = state.replace(
        discarded=state.discarded + jnp.where(is_running, verdict.count + 1 - emitted, 0),
        trunk=commit(trunk, state.length - 1),
    )
    if state.policy is not None:
        round_ = {"took_part": is_running, "active": ~state.done, "remaining": state.limit - state.length}
        learn = functools.partial(observe, depth=K, count=verdict.count, **round_)
        in_one_thread = functools.partial(in_one_turn, learn, is_running.any())
        state = state.replace(policy=jax.lax.platform_dependent(state.policy, cpu=in_one_thread, default=learn))
    return state


def in_one_turn(function, is_wanted: jax.Array, carry):
    """`function(carry)` if `is_wanted`, as a loop that turns once.

    Where a loop moves large arrays, XLA on a CPU hands its operations out to threads, small ones too, and waking one
    takes longer than all of the policy: plain steps of a small model took up to 20 % more. A loop of small arrays has
    one thread. XLA must not know that `is_wanted` holds.
    """
    return jax.lax.while_loop(lambda turn: turn[1], lambda turn: (function(turn[0]), ~turn[1]), (carry, is_wanted))[0]


def _emit(
    state: DecodeState, candidates: jax.Array, count: jax.Array, logits: jax.Array | None
) -> tuple[DecodeState, jax.Array]:
    """Commits the first `count [B]` of `candidates [B, W]`, less what lies behind a stop sequence or the row's limit.

    Rows that are done stay as they are. `logits [B, W, V]` are what each candidate came from, where log-probabilities
    are asked for. Returns how many tokens were committed, too.
    """
    W = candidates.shape[1]
    is_end = _ends_here(state, candidates)
    before_stop = jnp.where(is_end.any(axis=1), jnp.argmax(is_end, axis=1) + 1, W + 1)
    emitted = jnp.minimum(jnp.minimum(count, before_stop), state.limit - state.length)
    emitted = jnp.where(state.done, 0, emitted).astype(jnp.int32)
    length = state.length + emitted
    stopped = state.stopped | (~state.done & (before_stop <= emitted))
    logprobs, history = state.logprobs, state.history
    if logprobs is not None:
        assert logits is not None
        chosen = jnp.take_along_axis(logits, candidates[:, :, None], axis=2)[:, :, 0]
        logprobs = write_rows(logprobs, chosen - jax.nn.logsumexp(logits, axis=-1), state.length)
    if history.counts is not None:
        is_new = (jnp.arange(W)[None, :] < emitted[:, None]).astype(jnp.int32)
        counts = jax.vmap(lambda counts, tokens, new: counts.at[tokens].add(new))(history.counts, candidates, is_new)
        history = history.replace(counts=counts)
    return state.replace(
        tokens=write_rows(state.tokens, candidates, state.length),
        logprobs=logprobs,
        history=history,
        length=length,
        stopped=stopped,
        done=state.done | stopped | (length >= state.limit),
    ), emitted


def _ends_here(state: DecodeState, candidates: jax.Array) -> jax.Array:
    """Whether a stop sequence ends with each of `candidates [B, W]`, which follow the committed tokens: `[B, W]`."""
    W, Z = candidates.shape[1], state.stops.shape[1]
    place = state.length[:, None] - (Z - 1) + jnp.arange(Z - 1)[None, :]
    tail = jnp.take_along_axis(state.tokens, jnp.maximum(place, 0), axis=1)
    tail = jnp.where(place >= state.prompt_length[:, None], tail, -2)  # sequences are of new tokens
    joined = jnp.concatenate([tail, candidates], axis=1)
    windows = joined[:, jnp.arange(W)[:, None] + jnp.arange(Z)[None, :]]  # [B, W, Z]
    stops = state.stops[None, None]
    is_same = (windows[:, :, None] == stops) | (stops == -1)
    is_end = (is_same.all(axis=-1) & (stops != -1).any(axis=-1)).any(axis=-1)
    if state.sampling.min_new is not None:
        num_new = (state.length - state.prompt_length)[:, None] + jnp.arange(W)[None, :]
        is_end &= num_new >= state.sampling.min_new[:, None]
    return is_end


@functools.partial(jax.jit, static_argnames=("model", "plan"), donate_argnames=("state",))
def decode(
    params: dict, state: DecodeState, draft_ids: jax.Array | None = None, *, model: MTPModel, plan: Plan
) -> DecodeState:
    """From prompts to the end of every row, in one call without a trip to the host. `state` is donated.

    An adaptive depth is an outer loop around one loop per depth, which runs while the choice is its own: choosing
    within one loop would copy the caches. At depth 0 the modules' rows wait in a ring; where it is full before the
    policy means to look at drafting again, the call drafts no more.
    """
    state = prefill(params, state, model=model, plan=plan)
    head = None
    if draft_ids is not None:
        head = draft_head(params, draft_ids, model=model, dtype=state.hidden.dtype)
    round_ = functools.partial(run_round, params, model=model, head=head)
    if not plan.is_adaptive:
        return jax.lax.while_loop(lambda state: ~state.done.all(), functools.partial(round_, plan=plan), state)

    def depth(state: DecodeState) -> jax.Array:
        assert state.policy is not None
        return jnp.where(state.is_closed, 0, state.policy.depth)

    def has_room(state: DecodeState, num_steps) -> jax.Array:
        """Whether a round of this depth can take in, or leave, the rows that wait for the modules."""
        most = jnp.where(num_steps == 0, state.hidden.shape[1] - 1, num_steps + len(state.modules))
        return state.is_closed | (waiting(state).max() <= most)

    def is_chosen(state: DecodeState, num_steps: int) -> jax.Array:
        return has_room(state, num_steps) & (depth(state) == num_steps) & ~state.done.all()

    def choose(state: DecodeState) -> DecodeState:
        assert state.policy is not None
        is_over = (depth(state) == 0) & ~has_room(state, 0) & (state.policy.interval > RING)
        state = state.replace(is_closed=state.is_closed | is_over)
        in_use = len(state.modules)
        for rows, least in ((WIDE, WIDE + in_use), (plan.num_steps + in_use, 0)):
            state = jax.lax.while_loop(
                lambda state, least=least: ~has_room(state, depth(state)) & (waiting(state).max() >= least),
                lambda state, rows=rows: catch_up(params, state, model=model, plan=plan, rows=rows),
                state,
            )
        for num_steps in range(plan.num_steps + 1):
            state = jax.lax.while_loop(
                functools.partial(is_chosen, num_steps=num_steps),
                functools.partial(round_, plan=plan.at_depth(num_steps)),
                state,
            )
        return state

    return jax.lax.while_loop(lambda state: ~state.done.all(), choose, state)
