"""Makes the requests of a benchmark from its settings and the server's tokenizer."""

from collections.abc import Sequence

from mtpjax.errors import UsageError
from mtpjax.serving.bench.backends import BenchRequest
from mtpjax.serving.bench.client import Client
from mtpjax.serving.bench.workload import WORDS, RandomLengths, random_requests, read_dataset

DEFAULT_NEW_TOKENS = 256


async def make_requests(
    client: Client,
    dataset: str,
    *,
    path: str | None,
    count: int,
    lengths: RandomLengths,
    vocab_size: int | None = None,
    max_new_tokens: int | None = None,
    categories: Sequence[str] = (),
    seed: int,
) -> list[BenchRequest]:
    """Makes the requests.

    Args:
        client: the client, whose server encodes texts.
        dataset: "random", "random-ids", or the name of a kind of file.
        path: the file of a data set that is not random.
        count: number of requests; fewer if the file has fewer.
        lengths: range of the lengths of random requests.
        vocab_size: the ids below it are the tokens of "random-ids".
        max_new_tokens: maximum new tokens of a request that is not random; None: as many as the file's reply has, or
            256.
        categories: only prompts of these categories; empty: all.
        seed: seed of every choice.

    Raises:
        UsageError: a setting that the data set needs is missing.
        ValueError: the file has another form.
        OSError: the file cannot be read.
    """
    if dataset == "random":
        # Tokens of words, because ids drawn from all of the vocabulary would be rare and special tokens too.
        token_ids = await client.tokenize(" ".join(WORDS.split()))
        if not token_ids:
            raise UsageError(
                f"{client.url} has no POST /tokenize: use --dataset-name random-ids with --vocab-size, or a file"
            )
        return random_requests(sorted(set(token_ids)), count, lengths, seed=seed)
    if dataset == "random-ids":
        if vocab_size is None or vocab_size < 1:
            raise UsageError("--dataset-name random-ids draws ids below --vocab-size, which must be given and above 0")
        return random_requests(range(vocab_size), count, lengths, seed=seed)
    if path is None:
        raise UsageError(f"--dataset-name {dataset} needs --dataset-path")
    requests = []
    for prompt, reply in read_dataset(path, count, categories=categories, seed=seed):
        num_new = max_new_tokens
        # The reply of the data set says how long an answer is in practice.
        if num_new is None and reply is not None:
            num_new = len(await client.tokenize(reply) or ())
        requests.append(BenchRequest(prompt.text, num_new or DEFAULT_NEW_TOKENS, prompt.category))
    return requests
