"""Accept lengths predicted along a text, without drafting: at the anchors that decoding would have.

An anchor is a place where a round begins: the first is a prompt's end, and behind a round that accepts n drafts the
next is n + 1 further. A mean over all places is another figure: after a rejection the next anchor stands in a harder
stretch than most places do.

Let the text y be the trunk's own continuation, p the trunk's distributions and q the modules', teacher-forced along
y. Speculative decoding gives y the same law as plain decoding does, so its rounds may be conditioned on y. At an anchor
the drafts that are accepted are then y's own next tokens; with R_i the product of q_j(y_j) / p_j(y_j) over j <= i:

    P(at least i drafts accepted | y) = [every draft 1..i, an arg-max, is y's token]      greedy, sample
                                      = prod over j <= i of min(1, q_j(y_j) / p_j(y_j))   token
                                      = min over j <= i of R_j, R_0 = 1                   block

For `token`: of the probability p(y_j) that a level commits y_j, min(p, q)(y_j) is that of an accepted draft (Leviathan
et al., 2211.17192, section 2.3). For `block`, in the letters of `acceptance.block_chain` (Sun et al., 2403.10444):
given drafts 1..i at least i are accepted with probability w_i, from the last level down, since E[w_{i+1}] = w_i - r_i
and 1 - (1 - E[w_{i+1}]) (1 - h_i) = w_i. They are y's with probability prod of q_j(y_j), so given y it is R_i w_i, and
w_i = min(1, w_{i-1} p_i / q_i) makes that min(R_i, R_{i-1} w_{i-1}).

Given y the anchors are a Markov chain, and its expected numbers of rounds and of accepted drafts follow place by place.
At temperature 0 all of this is certain: rounds and drafts are those of decoding, one by one. Above, expectations over
several texts of the same law come to those of decoding.
"""

import numpy as np


def acceptance_along(is_text: np.ndarray, log_ratio: np.ndarray, is_greedy: np.ndarray, *, rule: str) -> np.ndarray:
    """The probability, given the text, that at least k drafts are accepted at each place: `[B, T, K]` float64.

    `is_text [B, T, K]`: whether level k's arg-max is the text's token; `log_ratio [B, T, K]`: log q - log p of that
    token, -inf where it is not known; `is_greedy [B]`: rows at temperature 0. Raises `ValueError` for another rule than
    "greedy", "sample", "token" or "block".
    """
    matches = np.cumprod(is_text, axis=-1).astype(np.float64)
    if rule in ("greedy", "sample"):
        return matches
    log_ratio = log_ratio.astype(np.float64)
    if rule == "token":
        log = np.cumsum(np.minimum(log_ratio, 0), axis=-1)
    elif rule == "block":
        log = np.minimum(np.minimum.accumulate(np.cumsum(log_ratio, axis=-1), axis=-1), 0)
    else:
        raise ValueError(f"acceptance '{rule}' is not one of greedy, sample, token, block")
    return np.where(is_greedy[:, None, None], matches, np.exp(log))


def expected_rounds(acceptance: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Expected rounds `[B]` and accepted drafts per level `[B, K]` along texts, from `acceptance_along [B, T, K]`.

    `starts [B]`: the prompts' lengths; `ends [B]`: where the texts end, by a limit or a stop token, prompt included.
    The token at `starts` comes from prefill; rounds go on until `ends`, and drafts of the last beyond it count, as they
    do in decoding.
    """
    B, T, K = acceptance.shape
    is_anchor = np.zeros((B, T + K + 1))  # of place i: the newest committed token is i + 1
    is_anchor[np.arange(B), starts - 1] = 1
    rounds, accepted = np.zeros(B), np.zeros((B, K))
    for place in range(starts.min() - 1, ends.max() - 2):
        here = np.where(place < ends - 2, is_anchor[:, place], 0)
        at_least = np.pad(acceptance[:, place], ((0, 0), (1, 1)), constant_values=((0, 0), (1, 0)))  # of 0..K+1 drafts
        rounds += here
        accepted += here[:, None] * acceptance[:, place]
        is_anchor[:, place + 1 : place + K + 2] -= here[:, None] * np.diff(at_least, axis=1)
    return rounds, accepted
