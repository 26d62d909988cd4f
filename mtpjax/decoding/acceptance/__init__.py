"""Acceptance rules decide which of a round's drafts to accept, and which distribution the bonus token is drawn from.

Every rule is pure arithmetic on the arrays of one row; the loop maps it over the batch. Common arguments:

- `tokens [W]`: drafted tokens; node 0 is the root, the pending token.
- `parents [W]`: parent of each node, with parents before children; -1 for the root and for unused nodes.
- `drafts [K]`: the drafted tokens of a chain, without the root.
- `p [W, V]`: the target's distribution after each node.
- `q [W, V]`: the distribution that the children of each node were drawn from. A chain of K drafts has `q [K, V]`, and
  row j of p and q belongs to draft j+1.
- `u`: uniform numbers in [0, 1). They are only compared with acceptance probabilities, so probability 1 always accepts
  and probability 0 never does.
- `num_steps`: K, the depth of the tree.
- `vocabulary`: how the columns of p and q are split over devices.

A rule for chains returns the number of accepted drafts `[]` and the bonus token's weights `[V]`; a rule for trees
returns an `AcceptedPath`.

Exact rules leave the target's distribution unchanged. `match_tree` (rules `greedy` and `sample`) is exact for any tree,
however it was chosen. The ratio rules (`token_chain`, `block_chain`, `recursive_tree`, `traversal_tree`) need the q
that tokens were actually drawn from, and they must see every drafted node. They are not exact if a node may be dropped
because of the token drawn there. For example, let p = (0.7, 0.3) and q = (0.5, 0.5), and drop drafts of the second
token, so that the next token is drawn from p instead. The first token then appears with probability 0.5 + 0.5 * 0.7 =
0.85 instead of 0.7.

`rules` lists each rule as an `AcceptanceRule`. A user-defined rule is also an `AcceptanceRule`.
"""
