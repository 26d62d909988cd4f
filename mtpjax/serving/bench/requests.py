"""Makes the requests of a benchmark with the server's tokenizer."""

from collections.abc import Sequence

from mtpjax.errors import UsageError
from mtpjax.serving.bench.backends import BenchRequest
from mtpjax.serving.bench.client import Client
from mtpjax.serving.bench.workload import WORDS, RandomLengths, random_requests, read_dataset

DEFAULT_NEW_TOKENS = 256


async def word_requests(client: Client, count: int, lengths: RandomLengths, *, seed: int) -> list[BenchRequest]:
    """Makes requests from random tokens of common words, because other ids include rare and special tokens.

    Raises:
        UsageError: the server cannot tokenize.
    """
    token_ids = await client.tokenize(" ".join(WORDS.split()))
    if not token_ids:
        raise UsageError(
            f"{client.url} has no POST /tokenize: use --dataset-name random-ids with --vocab-size, or a file"
        )
    return random_requests(sorted(set(token_ids)), count, lengths, seed=seed)


async def file_requests(
    client: Client, path: str, count: int, *, max_new_tokens: int | None, categories: Sequence[str] = (), seed: int
) -> list[BenchRequest]:
    """Makes requests from a file of prompts or conversations, as `read_dataset` reads it.

    Args:
        client: the client, whose server counts the tokens of replies.
        path: the file.
        count: number of requests; fewer if the file has fewer.
        max_new_tokens: maximum new tokens; None means as many as the prompt's reply in the file has, or 256.
        categories: categories of the prompts to use; if empty, all prompts are used.
        seed: random seed for the choice of prompts.
    """
    requests = []
    for prompt, reply in read_dataset(path, count, categories=categories, seed=seed):
        num_new = max_new_tokens
        # The reply in the dataset gives a realistic answer length.
        if num_new is None and reply is not None:
            num_new = len(await client.tokenize(reply) or ())
        requests.append(BenchRequest(prompt.text, num_new or DEFAULT_NEW_TOKENS, prompt.category))
    return requests
