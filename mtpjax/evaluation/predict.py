"""Predicts accept lengths along a text without decoding it, at the anchors that decoding would have.

An anchor is a position where a round starts. The first is at the end of the prompt, and a round that accepts n drafts
is followed by an anchor n + 1 positions later. A mean over all positions differs from the mean over anchors, because
after a rejection the next anchor is more likely to be in text that is hard to draft.

Let y be the trunk's continuation, p the trunk's distributions and q the modules' distributions, teacher-forced along y.
Under an exact rule, speculative decoding draws y from the same distribution as plain decoding, so its rounds may be
conditioned on y. The drafts accepted at an anchor are then the next tokens of y. With R_i the product of
q_j(y_j) / p_j(y_j) over j <= i:

    P(at least i drafts accepted | y) = [the arg-max of every level 1..i is y's token]    greedy, sample
                                      = prod over j <= i of min(1, q_j(y_j) / p_j(y_j))   token
                                      = min over j <= i of R_j, R_0 = 1                   block

Under `token`, a level commits y_j with probability p(y_j), of which min(p, q)(y_j) comes from an accepted draft
(Leviathan et al., 2211.17192, section 2.3). Under `block`, in the notation of `acceptance.block_chain` (Sun et al.,
2403.10444), w_i is the probability, given drafts 1..i, that the rule accepts at least i drafts. This follows by
induction from the last level down, since E[w_{i+1}] = w_i - r_i and 1 - (1 - E[w_{i+1}]) (1 - h_i) = w_i. The drafts
equal y with probability prod of q_j(y_j), so given y the probability is R_i w_i, and w_i = min(1, w_{i-1} p_i / q_i)
turns it into min(R_i, R_{i-1} w_{i-1}).

Given y, the anchors form a Markov chain, so the expected numbers of rounds and accepted drafts are computed position by
position. At temperature 0 nothing is random, and the predicted counts equal decoding's counts. Above temperature 0, the
predicted counts, averaged over texts from the trunk's distribution, equal the expected counts of decoding.
"""

import numpy as np

PREDICTABLE_RULES = ("greedy", "sample", "token", "block")


def acceptance_probabilities(
    matches_text: np.ndarray, log_ratio: np.ndarray, is_greedy: np.ndarray, *, rule: str
) -> np.ndarray:
    """Computes the probability that a round at each position accepts at least k drafts, given the text.

    Args:
        matches_text: `[B, T, K]` bool, True where level k's arg-max is the text's token.
        log_ratio: `[B, T, K]` log q - log p of that token, -inf past the end of the text.
        is_greedy: `[B]` bool, rows at temperature 0.
        rule: one of `PREDICTABLE_RULES`.

    Returns:
        `[B, T, K]` float64.

    Raises:
        ValueError: `rule` is not in `PREDICTABLE_RULES`.
    """
    # Arg-max drafts are accepted up to the first one that does not match the text.
    matches = np.cumprod(matches_text, axis=-1).astype(np.float64)
    if rule in ("greedy", "sample"):
        return matches
    # For sampled drafts, use the product of min(1, q/p) or the running minimum of the products, both as logarithms.
    log_ratio = log_ratio.astype(np.float64)
    if rule == "token":
        log = np.cumsum(np.minimum(log_ratio, 0), axis=-1)
    elif rule == "block":
        log = np.minimum(np.minimum.accumulate(np.cumsum(log_ratio, axis=-1), axis=-1), 0)
    else:
        raise ValueError(f"acceptance '{rule}' is not one of {', '.join(PREDICTABLE_RULES)}")
    # A row at temperature 0 drafts the arg-max under any rule.
    return np.where(is_greedy[:, None, None], matches, np.exp(log))


def expected_rounds(acceptance: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Computes the expected numbers of rounds and accepted drafts along texts.

    The token at `starts` comes from prefill, and rounds continue until `ends`. Drafts that the last round accepts past
    `ends` count, as in `DecodeStats.accepted`.

    Args:
        acceptance: `[B, T, K]` from `acceptance_probabilities`.
        starts: `[B]` prompt lengths.
        ends: `[B]` text lengths, including the prompt.

    Returns:
        Rounds `[B]` and accepted drafts per level `[B, K]`, float64.
    """
    B, T, K = acceptance.shape
    # is_anchor[:, i]: probability that a round starts at position i, where the newest committed token is i + 1.
    is_anchor = np.zeros((B, T + K + 1))
    is_anchor[np.arange(B), starts - 1] = 1
    rounds, accepted = np.zeros(B), np.zeros((B, K))
    for position in range(starts.min() - 1, ends.max() - 2):
        # A round starts here unless the text is already complete.
        starts_here = np.where(position < ends - 2, is_anchor[:, position], 0)
        # The probabilities of at least 0..K+1 accepted drafts.
        at_least = np.pad(acceptance[:, position], ((0, 0), (1, 1)), constant_values=((0, 0), (1, 0)))
        rounds += starts_here
        accepted += starts_here[:, None] * acceptance[:, position]
        # P(exactly n drafts) = P(at least n) - P(at least n + 1). Such a round moves the anchor by n + 1 positions.
        is_anchor[:, position + 1 : position + K + 2] -= starts_here[:, None] * np.diff(at_least, axis=1)
    return rounds, accepted
