"""Makes the prompts, answers and training rows for `train_smollm2`.

Most of the arithmetic in a training step is in the head, which has 49,152 columns, although the text uses only a few
thousand tokens. So the module is trained with the vocabulary of its text. `write_reduced_trunk` writes a copy of the
trunk whose embedding has only the rows of tokens that occur, with a tokenizer whose words are the original ids. The
trunk's hidden states do not change, because the rows do not; only the softmax runs over fewer tokens. The trained
module does not depend on the vocabulary, so it can be attached to the full trunk unchanged.
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments.common.smollm2_settings import Settings
from mtpjax import DecodeConfig, MTPModel, SamplingParams
from mtpjax.atomic import write_text
from mtpjax.data.chat import encode_chat
from mtpjax.data.draft_vocabulary import choose_vocabulary, save_vocabulary
from mtpjax.data.prompts import Prompt, choose_prompts, encode_prompts, read_prompts
from mtpjax.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from mtpjax.io.checkpoint import save_model
from mtpjax.models.params import add_mtp_modules
from mtpjax.training.regenerate import RegenerationRequest, regenerate

# Messages contain ids as words, so the template only joins them.
ID_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


def keep_layers(model: MTPModel, params: dict, num_layers: int) -> tuple[MTPModel, dict]:
    """Returns the trunk with only its first `num_layers` layers; 0 keeps all layers."""
    if not num_layers:
        return model, params
    config = dataclasses.replace(model.config, num_hidden_layers=num_layers)
    return MTPModel(config), params | {
        "trunk": {f"layer_{n}": params["trunk"][f"layer_{n}"] for n in range(num_layers)}
    }


def split_prompts(
    folder: pathlib.Path, files: Sequence[pathlib.Path], tokenizer: Tokenizer, settings: Settings
) -> tuple[pathlib.Path, list[Prompt]]:
    """Chooses training prompts and held-out prompts, evenly over the categories.

    Args:
        folder: output folder, which receives `prompts.jsonl` and `held_out.jsonl`.
        files: files of prompts.
        tokenizer: the tokenizer.
        settings: counts and limits.

    Returns:
        The file of training prompts, and the held-out prompts.

    Raises:
        ValueError: a file has a different form, or no prompt is short enough.
    """
    chosen, held_out = folder / "prompts.jsonl", folder / "held_out.jsonl"
    if not (chosen.exists() and held_out.exists()):
        # The same question may be in several files (Spec-Bench contains GSM8K questions). Keep the first.
        distinct: dict[str, Prompt] = {}
        for each in (prompt for file in files for prompt in read_prompts(file)):
            distinct.setdefault(each.text.strip(), each)
        prompts = list(distinct.values())
        rows, _ = encode_prompts(prompts, tokenizer, max_tokens=1 << 20, chat=True)
        lengths = {each.text: len(row) for each, row in zip(prompts, rows, strict=True)}
        fitting = [each for each in prompts if lengths[each.text] <= settings.max_held_out_tokens]
        if not fitting:
            raise ValueError(f"no prompt has at most max_held_out_tokens ({settings.max_held_out_tokens}) tokens")
        # Choose held-out prompts first. The others are for training if they are short enough.
        count = settings.held_out_per_category * len({each.category for each in fitting})
        measured = choose_prompts(fitting, count, seed=settings.seed)
        texts = {each.text for each in measured}
        rest = [each for each in fitting if each.text not in texts]
        rest = [each for each in rest if lengths[each.text] <= settings.max_prompt_tokens]
        if not rest:
            raise ValueError(f"no prompt for training has at most max_prompt_tokens ({settings.max_prompt_tokens})")
        _write_prompts(chosen, choose_prompts(rest, settings.answers, seed=settings.seed))
        _write_prompts(held_out, measured)
    return chosen, read_prompts(held_out)


def write_answers(
    folder: pathlib.Path, prompts: pathlib.Path, params: dict, *, model: MTPModel, tokenizer, digest: str, settings
) -> pathlib.Path:
    """Lets the model answer the training prompts; continues where an interrupted call stopped.

    Args:
        folder: output folder, which receives `answers.jsonl`.
        prompts: file of prompts.
        params: parameters of `model`.
        model: the trunk.
        tokenizer: its tokenizer.
        digest: digest of the model's file.
        settings: the settings.

    Returns:
        The file of answers, with one conversation per line.
    """
    config = DecodeConfig(
        max_new_tokens=settings.answer_tokens, num_steps=0, stop_token_ids=tokenizer.eos_token_ids, max_length=1024
    )
    request = RegenerationRequest(
        paths=[prompts],
        config=config,
        sampling=SamplingParams(temperature=settings.temperature),
        chat=True,
        batch_size=settings.answer_batch,
        seed=settings.seed,
    )
    path = folder / "answers.jsonl"
    tally = regenerate(
        params,
        request,
        path,
        model=model,
        tokenizer=tokenizer,
        model_digest=digest,
        progress=lambda tally, share: print(f"answers: {share:.0%}, {tally}", flush=True),
    )
    print(f"answers: {tally}", flush=True)
    return path


def encode_answers(path: pathlib.Path, tokenizer: Tokenizer) -> list[tuple[list[int], list[int]]]:
    """Encodes conversations with one answer each.

    Args:
        path: file of `write_answers`.
        tokenizer: the model's tokenizer.

    Returns:
        For each conversation, the tokens before the answer, and the tokens of the answer with its end token, if any.
    """
    pairs = []
    for line in path.read_text().splitlines():
        tokens, is_target = encode_chat(json.loads(line)["messages"], tokenizer)
        places = np.flatnonzero(is_target[: len(tokens)])
        if len(places):
            pairs.append((tokens[: places[0]], tokens[places[0] : places[-1] + 1]))
    return pairs


def write_draft_vocabulary(path: pathlib.Path, pairs, vocab_size: int, settings: Settings) -> tuple[int, ...]:
    """Chooses the most frequent tokens of the answers, and writes them as `mtpjax vocabulary` does.

    Args:
        path: the file.
        pairs: result of `encode_answers`.
        vocab_size: V of the model.
        settings: the largest size.

    Returns:
        The token ids, ascending.
    """
    counts = np.bincount(np.concatenate([answer for _, answer in pairs]), minlength=vocab_size)
    size = min(settings.draft_vocabulary, int((counts > 0).sum()))
    ids = choose_vocabulary(counts, size)
    save_vocabulary(path, ids, counts=counts, source="answers of the model", sizes={})
    return ids


def write_reduced_trunk(
    folder: pathlib.Path, pairs, params: dict, *, model: MTPModel, eos_token_ids: Sequence[int], seed: int
) -> pathlib.Path:
    """Writes the trunk with the vocabulary of the answers, a new module, and a tokenizer for ids.

    Args:
        folder: output folder, which receives `reduced/`.
        pairs: result of `encode_answers`.
        params: parameters of `model`.
        model: the trunk, with tied embeddings and without modules.
        eos_token_ids: end tokens of the model.
        seed: seed of the module's first weights.

    Returns:
        The checkpoint.

    Raises:
        ValueError: the head is not tied to the embedding.
    """
    if not model.config.tie_word_embeddings:
        raise ValueError("the vocabulary can be reduced only if the head is tied to the embedding")
    path = folder / "reduced"
    if path.exists():
        return path
    # 1. Find the tokens that occur, and take their rows of the embedding.
    ids = reduced_ids(pairs, eos_token_ids)
    config = dataclasses.replace(model.config, vocab_size=len(ids), num_tokens=0)
    reduced = params | {"embedding": params["embedding"][ids]}
    # 2. Make the new module.
    small, reduced = add_mtp_modules(MTPModel(config), reduced, 1, jax.random.key(seed))
    reduced["mtp_0"] = start_near_trunk(reduced["mtp_0"], params["norm_final"])
    # 3. Write the tokenizer, and the checkpoint that `mtpjax train` starts from.
    tokenizer = write_id_tokenizer(folder / "id_tokenizer", ids, eos_token_ids)
    save_model(path, small, reduced, tokenizer=tokenizer)
    return path


def reduced_ids(pairs, eos_token_ids: Sequence[int]) -> np.ndarray:
    """Returns the tokens that occur in the conversations, and the end tokens: `[R]` ids, ascending."""
    return np.unique(np.concatenate([tokens for pair in pairs for tokens in pair] + [list(eos_token_ids)]))


def start_near_trunk(module: dict, norm_final: dict) -> dict:
    """Replaces a module's random projection by the sum of its two inputs, and its final norm by the trunk's.

    Args:
        module: parameters of a new module.
        norm_final: the trunk's final norm.

    Returns:
        The module's parameters.
    """
    identity = jnp.eye(module["project"].shape[1], dtype=module["project"].dtype)
    return module | {"project": jnp.concatenate([identity, identity]), "norm_output": norm_final}


def write_id_tokenizer(folder: pathlib.Path, ids: np.ndarray, eos_token_ids: Sequence[int]) -> HuggingFaceTokenizer:
    """Writes a tokenizer whose words are token ids of a different vocabulary, separated by spaces.

    Args:
        folder: folder of its files.
        ids: ids of the other vocabulary; id `ids[n]` becomes token n.
        eos_token_ids: end tokens, as ids of the other vocabulary.

    Returns:
        The tokenizer.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {str(index): number for number, index in enumerate(ids.tolist())}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=str(ids[0])))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[reportAttributeAccessIssue]
    folder.mkdir(exist_ok=True)
    write_text(folder / "tokenizer.json", tokenizer.to_str())
    write_text(folder / "tokenizer_config.json", json.dumps({"chat_template": ID_TEMPLATE}))
    ends = [words[str(index)] for index in eos_token_ids]
    write_text(folder / "generation_config.json", json.dumps({"eos_token_id": ends}))
    return HuggingFaceTokenizer(folder, len(ids))


def write_id_conversations(path: pathlib.Path, pairs) -> None:
    """Writes conversations whose text is token ids, as training data for the reduced trunk.

    Args:
        path: JSONL file.
        pairs: result of `encode_answers`.
    """
    lines = []
    for pair in pairs:
        contents = [" ".join(map(str, tokens)) for tokens in pair]
        messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), contents, strict=True)]
        lines.append(json.dumps({"messages": messages}) + "\n")
    write_text(path, "".join(lines))


def _write_prompts(path: pathlib.Path, prompts: Sequence[Prompt]) -> None:
    records = [{"prompt": each.text, "category": each.category, "id": each.id} for each in prompts]
    write_text(path, "".join(json.dumps(record) + "\n" for record in records))
