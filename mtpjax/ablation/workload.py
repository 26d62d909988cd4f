"""Chooses an ablation's prompts, from a prompt file or from files that a byte-level model's training held out."""

import dataclasses
import pathlib

from mtpjax.ablation.cells import Settings
from mtpjax.data import packing
from mtpjax.data.config import Source
from mtpjax.data.sources import read_source
from mtpjax.data.tokenizer import ByteTokenizer, load_tokenizer
from mtpjax.decoding.config import DecodeConfig
from mtpjax.evaluation.prompt_choice import PromptChoice
from mtpjax.inference.generate import generate
from mtpjax.io.checkpoint_format import is_checkpoint
from mtpjax.io.checkpoint_reader import CheckpointReader
from mtpjax.messages import count_of
from mtpjax.models.model import MTPModel
from mtpjax.training.decoding_eval import is_looping

PROMPT_TOKENS = 64  # length of prompts from held-out files
CANDIDATES_PER_PROMPT = 16  # maximum number of held-out candidates per prompt


@dataclasses.dataclass(frozen=True)
class Workload:
    """The prompts for an ablation.

    Attributes:
        prompts: token lists.
        source: a description of where the prompts come from.
        stop_token_ids: tokens that end a text.
        categories: the category of each prompt; empty if the prompts have no categories.
    """

    prompts: list[list[int]]
    source: str
    stop_token_ids: tuple[int, ...] = ()
    categories: tuple[str, ...] = ()

    def batches(self, size: int) -> list[list[list[int]]]:
        """Splits the prompts into batches of `size`, and fills up the last batch with the first prompts."""
        count = -(-len(self.prompts) // size)
        return [
            [self.prompts[(begin * size + row) % len(self.prompts)] for row in range(size)] for begin in range(count)
        ]


def find_workload(
    path: pathlib.Path, model: MTPModel, params: dict, settings: Settings, choice: PromptChoice
) -> Workload:
    """Reads the prompts from a file. Without a file, takes held-out prompts, which only byte-level models have.

    Raises:
        ValueError: the prompts do not fit the model, or no file is given and the model is not byte-level.
    """
    tokenizer = load_tokenizer(path, model.config.vocab_size)
    limit = choice.limit(model.config, settings.max_new_tokens)
    if choice.path is not None:
        # Draw the prompts evenly from the categories in the file.
        chosen = choice.read(settings.seed)
        rows, limit, num_cut = choice.encode(chosen, tokenizer, model.config, settings.max_new_tokens)
        cut = f", {num_cut} of them cut to {limit} tokens" if num_cut else ""
        source = f"{count_of(len(rows), 'prompt')} from {choice.path}{cut}"
        return Workload(rows, source, tuple(tokenizer.eos_token_ids), tuple(prompt.category for prompt in chosen))
    # Without a file, only byte-level models have prompts, taken from the files that training held out.
    if not isinstance(tokenizer, ByteTokenizer):
        raise ValueError("pass a prompt file with --prompts: only byte-level models have default prompts")
    if choice.count < 1:
        raise ValueError(f"the number of prompts must be at least 1, not {choice.count}")
    length = min(PROMPT_TOKENS, limit)
    chosen = _non_looping_prompts(path, model, params, settings, num_prompts=choice.count, length=length)
    return Workload(
        chosen, f"{count_of(len(chosen), 'prompt')} of {length} bytes from held-out files; no continuation loops"
    )


def _non_looping_prompts(path, model: MTPModel, params, settings: Settings, *, num_prompts: int, length: int):
    """Picks held-out prompts whose plain continuation does not loop, because loops are too easy to draft."""
    # The checkpoint records its training data. Repeating the split yields the documents that training held out.
    train_metadata = {}
    if is_checkpoint(path):
        train_metadata = CheckpointReader(path, verify=False).metadata.get("train", {})
    sources = [Source(**values) for values in train_metadata.get("sources", ())]
    sources = sources or [Source(path=train_metadata.get("data"), pattern=train_metadata.get("pattern", "*"))]
    read = {"vocab_size": ByteTokenizer.vocab_size, "output": train_metadata.get("output")}
    contents = [read_source(source, ByteTokenizer(), **read) for source in sources]
    documents = [document for content in contents for document in content.documents]
    candidates = packing.held_out_prompts(
        packing.split_held_out(documents, train_metadata.get("held_out_fraction", 0.05))[1],
        count=CANDIDATES_PER_PROMPT * num_prompts,
        prompt_length=length,
        continuation_length=settings.max_new_tokens,
        seed=settings.seed,
        min_count=num_prompts,
    )
    # Decode candidates in batches until enough continuations do not loop. If all of them loop, use them anyway.
    config, non_looping, candidates_per_call = DecodeConfig(max_new_tokens=settings.max_new_tokens), [], 4 * num_prompts
    for begin in range(0, len(candidates), candidates_per_call):
        candidate_batch = candidates[begin : begin + candidates_per_call]
        rows = generate(params, candidate_batch, model=model, config=config).rows()
        non_looping += [prompt for prompt, row in zip(candidate_batch, rows, strict=True) if not is_looping(row)]
        if len(non_looping) >= num_prompts:
            break
    return (non_looping or candidates)[:num_prompts]
