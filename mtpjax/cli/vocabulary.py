"""`mtpjax vocabulary`."""

from mtpjax.atomic import check_output_file
from mtpjax.cli.common import add_data_flags, add_model_path_flag, list_data, show_bytes_read
from mtpjax.cli.help import command_parser
from mtpjax.errors import printable
from mtpjax.messages import count_of


def add_commands(commands) -> None:
    vocabulary = command_parser(
        "Count the tokens of a corpus and write the most frequent ones to a file. With --draft-vocabulary FILE, MTP "
        "modules draft only these tokens, which shrinks their output head."
    )
    add_model_path_flag(vocabulary)
    add_data_flags(vocabulary, "a file of text or records, or a folder of such files")
    group = vocabulary.flag_group("output")
    group.add_argument("--size", type=int, required=True, help="number of tokens to keep, special tokens included")
    group.add_argument("--output", required=True, metavar="FILE", help="JSON file to write")
    commands.add_subcommand("vocabulary", vocabulary, help="choose the tokens that MTP modules may draft")


def _vocabulary(options) -> int:
    import numpy as np
    import rich.console
    import rich.table

    from mtpjax.data import draft_vocabulary
    from mtpjax.data.tokenizer import load_tokenizer
    from mtpjax.io.checkpoint_format import find_checkpoint
    from mtpjax.io.inspect import inspect

    path = find_checkpoint(options.model_path)
    vocab_size = inspect(path, model_type=options.model_type)["configuration"]["vocab_size"]
    tokenizer = load_tokenizer(path, vocab_size)
    # Always keep the special tokens, because MTP modules must be able to draft end-of-text.
    kept = {*tokenizer.eos_token_ids, *tokenizer.special_token_ids}
    # Check the output and the size before the corpus is read.
    check_output_file(options.output)
    draft_vocabulary.choose_vocabulary(np.zeros(vocab_size), options.size, required_ids=kept)
    # Count the corpus once; every size below is chosen from the same counts.
    files = list_data(options)
    with show_bytes_read(options.data, options.output) as progress:
        corpus = draft_vocabulary.count_tokens(files, tokenizer, vocab_size, progress=progress)

    def choose(size: int) -> tuple[int, ...]:
        return draft_vocabulary.choose_vocabulary(corpus.counts, size, required_ids=kept)

    # Report how much of the corpus other sizes would cover, to help choose one.
    sizes = draft_vocabulary.report_sizes(options.size, vocab_size, len(kept))
    shares = {size: draft_vocabulary.coverage(corpus.counts, choose(size)) for size in sizes}
    ids = choose(options.size)
    draft_vocabulary.save_vocabulary(options.output, ids, counts=corpus.counts, source=options.data, sizes=shares)
    # Show the sizes, with the chosen size in bold.
    table = rich.table.Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("size", "of the vocabulary", "of the corpus"):
        table.add_column(heading, justify="right")
    for size, share in shares.items():
        chosen = "bold" if size == options.size else ""
        table.add_row(str(size), f"{size / vocab_size:.1%}", f"{share:.2%}", style=chosen)
    rich.console.Console().print(table)
    # List skipped files, so that a wrong --pattern is noticed.
    skipped = f", {len(corpus.skipped)} skipped, the last: {printable(corpus.skipped[-1])}" if corpus.skipped else ""
    files_read = f"{count_of(corpus.num_files, 'file')} of text{skipped}"
    counted = f"{count_of(corpus.counts.sum(), 'token')} of {files_read}"
    print(f"{counted}; {count_of(len(ids), 'id')} in {printable(options.output)}")
    return 0


COMMANDS = {"vocabulary": _vocabulary}
