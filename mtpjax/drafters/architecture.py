"""Checks of architectures that draft from trunk states."""

from mtpjax.models.config import require


def check_layer_ids(layer_ids: tuple[int, ...], num_target_layers: int) -> None:
    """Checks the trunk layers whose input states a drafter reads.

    Args:
        layer_ids: the layers; `num_target_layers` means the output of the last one, before the final norm, and one more
            the output of this norm.
        num_target_layers: layers of the trunk.

    Raises:
        ValueError: `layer_ids` is empty, names a layer twice, or names one that does not exist.
    """
    ids, layers = layer_ids, num_target_layers
    require(
        bool(ids) and len(set(ids)) == len(ids) and all(0 <= layer <= layers + 1 for layer in ids),
        f"layer_ids {list(ids)} must be different layers within 0..{layers + 1}; {layers} is the output of the last "
        f"one of a trunk of {layers}, {layers + 1} that of the final norm",
    )


def check_draft_vocabulary(draft_vocab_size: int, vocab_size: int, *, own_head: bool) -> None:
    """Checks the number of tokens that a drafter can draft.

    Args:
        draft_vocab_size: the number.
        vocab_size: tokens of the trunk.
        own_head: the drafter has its own head.

    Raises:
        ValueError: it is out of range, or the trunk's head would have to have fewer columns.
    """
    require(1 <= draft_vocab_size <= vocab_size, f"draft_vocab_size {draft_vocab_size} is not within 1..{vocab_size}")
    require(
        own_head or draft_vocab_size == vocab_size,
        f"draft_vocab_size {draft_vocab_size} is below the vocabulary of {vocab_size}: "
        "the trunk's head has the columns of all tokens",
    )
