"""Drafts a chain with MTP modules or any other `DraftNetwork`."""

import jax
import jax.numpy as jnp

from mtpjax.decoding import rng
from mtpjax.decoding.decoder import Decoder
from mtpjax.decoding.sampling import PathTokens, distribution, draw
from mtpjax.decoding.state import DecodeState, Draft, view_pass
from mtpjax.drafters.modules import DraftNetwork, extend_and_read, num_pending, run_over_drafts
from mtpjax.models.cache import Cache
from mtpjax.models.view import read_rows, write_rows


def draft_chain(decoder: Decoder, network: DraftNetwork, state: DecodeState) -> tuple[Draft, list[Cache], jax.Array]:
    """Drafts K tokens and writes them after the committed text.

    Level k <= M extends module k over all hidden states of the buffer at once. Its output at the newest slot gives
    draft k, which module k+1 reads as a token. Later levels run module M on its own output, one slot further each time.

    Returns:
        The draft, the modules' caches, and the tokens `[B, L]`.
    """
    # The levels k <= M extend over the same positions, so they share one view.
    spec, tokens, caches = decoder.spec, state.tokens, list(state.drafter.caches)
    num_modules, K = len(caches), spec.num_steps
    sampling = state.settings.sampling
    num_positions = K + num_modules
    extend_view = view_pass(
        state,
        network.config,
        state.drafter.hidden_start,
        num_positions,
        num_used=num_pending(state),
        window=spec.window,
    )
    draft, probabilities = tokens[:, :1], []
    output = newest = chained = None
    for level in range(1, max(K, num_modules) + 1):
        index = min(level, num_modules) - 1
        if level <= num_modules:
            # 1. Draft extend: run a module over the positions that the last round committed. This overwrites entries
            # that the last round computed from drafted tokens.
            output, newest, chained = extend_and_read(
                network, caches, index, chained, state, tokens, num_positions, extend_view
            )
            if level > K:
                continue  # a shallow round of an adaptive call only extends the deeper modules
        else:
            # 2. Past the last module: run it again on its own output and the token that it just drafted.
            slot = state.length - 2 + level - num_modules
            view = view_pass(state, network.config, slot, spec.min_rows, num_used=1, window=spec.window)
            assert newest is not None
            output, newest = run_over_drafts(network, caches, index, newest, draft, view)
        # 3. Score the next token. Penalties also count the tokens drafted so far.
        path = None
        if sampling.has_penalties:
            is_before = jnp.broadcast_to(jnp.arange(K) < level - 1, (len(tokens), 1, K))
            path = PathTokens(read_rows(tokens, state.length, K), is_before)
        assert output is not None
        scores = network.scores(state, output, index, path, level)
        # 4. Choose it: sampled from q where the acceptance rule compares p with q, else the arg-max.
        if spec.is_ratio_rule:
            logits, vocabulary = scores.logits(), scores.vocabulary
            probabilities.append(distribution(logits, sampling, vocabulary))
            V, node = logits.shape[-1], jnp.array([level])
            noise = rng.gumbel(sampling.seed, state.length[:, None], rng.DRAFT, node, V, vocabulary.first_id(V))
            draft = draw(probabilities[-1], noise, vocabulary)
        elif sampling.changes_logits:
            draft = scores.vocabulary.argmax(scores.logits())
        else:
            draft = scores.top_tokens(1)[1][:, :, 0]
        tokens = write_rows(tokens, draft, state.length + level - 1)
    # The nodes to verify are the pending token and the drafts after it.
    nodes = read_rows(tokens, state.length - 1, K + 1)
    return Draft(nodes, jnp.concatenate(probabilities, axis=1) if probabilities else None), caches, tokens
