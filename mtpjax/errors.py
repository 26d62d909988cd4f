"""Exceptions that users see. Imports nothing, so that every layer and the command line can use it.

The base classes determine the exit code of `mtpjax`:

    UsageError        2   the request is wrong: a flag, a setting, a path, the content of a data file
    CheckpointError   3   a checkpoint is missing, damaged, unsupported or does not fit the request
    MemoryTooSmall    5   the model or the requested sizes do not fit into memory
    ResumableError    75  the run was interrupted and saved its state; run the command again to continue

Every other `ValueError` or `OSError` also exits with 2.
"""

MAX_MESSAGE_CHARACTERS = 2000
INTERRUPTED = 130  # the exit code that a shell reports for a command ended by SIGINT


def printable(text: object, max_characters: int = MAX_MESSAGE_CHARACTERS) -> str:
    """Converts text from untrusted files to one printable line of bounded length, for messages.

    Control characters could send escape sequences to the terminal, and strings in damaged files can be megabytes long.

    Returns:
        The text, with unprintable characters replaced by escapes such as `\\n` and `\\x1b`.
    """
    text = str(text)
    # Cut before escaping, which would be slow for a long text; cut again afterwards, because escapes are longer.
    text = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in _without_middle(text, max_characters))
    return _without_middle(text, max_characters)


def _without_middle(text: str, max_characters: int) -> str:
    if len(text) <= max_characters:
        return text
    half = max(1, (max_characters - 40) // 2)
    return f"{text[:half]} [{len(text) - 2 * half} characters] {text[-half:]}"


def one_line(error: Exception) -> str:
    """Shortens another library's exception to one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"


def install_extra(name: str) -> str:
    """Returns instructions for installing an extra of mtpjax, such as "serve", for messages about missing packages."""
    return f"run pip install -e '.[{name}]' in the clone of mtpjax"


# The base classes, one per exit code (with `ResumableError` below).
class UsageError(ValueError):
    """The request cannot be carried out as given. The command line exits with 2."""

    def __str__(self) -> str:
        return printable(super().__str__())


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, unsupported or does not fit the request. The command line exits with 3."""

    def __str__(self) -> str:
        return printable(super().__str__())


# Errors about the part of a checkpoint that is missing, damaged or unsupported.
class CheckpointFileError(CheckpointError):
    """A Hugging Face checkpoint directory is damaged, incomplete or not supported. The message is one line."""


class ConfigError(CheckpointError):
    """A `config.json` is damaged or describes an unsupported architecture. The message is one line with the key."""


class UnsafeFileError(CheckpointFileError):
    """A file is missing, not regular, too large, or a symlink that leaves its directory. The message is one line."""


class TokenizerError(CheckpointError):
    """A tokenizer or chat template is missing, damaged, or does not fit the model."""


class AnswerLocationError(TokenizerError):
    """The answers of a conversation cannot be located in the chat template's output or its tokens."""


class ConversationError(TokenizerError, UsageError):
    """A chat template rejects a conversation or fails on it. The request is wrong, not the checkpoint."""


class DroppedTextError(ConversationError):
    """A chat template would omit the text of a message, a tool call or the tools of a conversation.

    Attributes:
        index: index of the message; -1 for the tools.
    """

    def __init__(self, message: str, index: int):
        super().__init__(message)
        self.index = index


class MemoryTooSmall(ValueError):
    """The model, or the requested sizes, do not fit into memory. The command line exits with 5."""


# Parts of the messages with which the system, XLA and native libraries report a lack of memory.
_MEMORY_MESSAGES = ("RESOURCE_EXHAUSTED", "can't start new thread", "bad_alloc", "Cannot allocate memory")
_MEMORY_MESSAGES += ("failed to map segment", "error while initializing the extension")


def is_memory_error(error: BaseException) -> bool:
    """Returns whether an exception, or one of its causes, reports a lack of memory."""
    cause: BaseException | None = error
    while cause is not None:
        # Errors about input quote the input, so a match in their text proves nothing.
        quotes_input = isinstance(cause, UsageError | CheckpointError)
        says_so = not quotes_input and any(text in str(cause) for text in _MEMORY_MESSAGES)
        if says_so or isinstance(cause, MemoryError | MemoryTooSmall):
            return True
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return False


class ResumableError(Exception):
    """The run was interrupted and saved what it needs to continue. The command line exits with 75 (EX_TEMPFAIL)."""


# Reasons why a training run is interrupted.
class Preempted(ResumableError):
    """The run received a stop signal (SIGTERM or SIGUSR1) and saved its state; `--resume` continues from there."""


class LostProcess(ResumableError, RuntimeError):
    """Another process of a multi-process run has ended or cannot be reached."""
