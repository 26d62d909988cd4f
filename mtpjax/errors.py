"""Exceptions that users see. Imports nothing, so that every layer and the command line can use it.

There is one base class per exit code of `mtpjax`:

    UsageError        2   the request is wrong: a flag, a setting, a path, the content of a data file
    CheckpointError   3   a checkpoint is missing, damaged, unsupported or does not fit
    ResumableError    75  the run was interrupted and saved its state; run the command again to continue

Every other `ValueError` or `OSError` exits with 2 too.
"""


# The base classes, one per exit code (with `ResumableError` below).
class UsageError(ValueError):
    """The request cannot be carried out as given. The command line exits with 2."""


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, unsupported or does not fit the request. The command line exits with 3."""


# Checkpoints: the part that is missing, damaged or unsupported.
class CheckpointFileError(CheckpointError):
    """A Hugging Face checkpoint directory is damaged, incomplete or not supported. One line that names the file."""


class ConfigError(CheckpointError):
    """A `config.json` is damaged, or describes an architecture that is not supported. One line that names the key."""


class UnsafeFileError(CheckpointError):
    """A file is missing, not a regular file, too large, or a symlink that leaves its directory. One line."""


class TokenizerError(CheckpointError):
    """A tokenizer or chat template is missing, damaged, or does not fit the model."""


class ConversationError(TokenizerError, UsageError):
    """A chat template rejects a conversation or fails on it: the request is at fault, not the checkpoint."""


class ResumableError(Exception):
    """The run was interrupted and saved what it needs to continue. The command line exits with 75 (EX_TEMPFAIL)."""


# Training: the reason for the interruption.
class Preempted(ResumableError):
    """The run was told to stop (SIGTERM or SIGUSR1) and saved its state; `--resume` continues from there."""


class LostProcess(ResumableError, RuntimeError):
    """Another process of a multi-process run has ended or cannot be reached."""
