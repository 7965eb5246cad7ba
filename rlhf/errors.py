"""The errors a user can meet, and the translation of out-of-memory, disk and permission errors into them.

Every message is one line: what is wrong, where, and what to do. The command line prints it and exits with the error's
`exit_code`; `--debug` adds the traceback. Any other exception that escapes is a bug of rlhf.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerators import AcceleratorError, describe_error, find_out_of_memory


class RLHFError(Exception):
    """Base of every error the user can fix; the command line exits with 2."""

    exit_code = 2


class ConfigError(RLHFError):
    """The configuration is wrong: an unknown key, a bad value, settings that contradict each other."""


class InvalidValuesError(ConfigError):
    """Values of the configuration are wrong: one line for each problem, with a heading if there are several."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        count = len(self.problems)
        super().__init__("\n  ".join([f"{count} values are wrong:", *self.problems] if count > 1 else self.problems))


class DataError(RLHFError):
    """A data set cannot be read, or has no usable row."""


class ModelError(RLHFError):
    """A model or tokenizer cannot be loaded, or two of them do not fit together."""


class RewardError(RLHFError):
    """A reward function or metric cannot be found or imported, or fails with a sample."""


class RunError(RLHFError):
    """A run directory or a checkpoint is not what the command needs."""


class DependencyError(RLHFError):
    """A library is missing, or has a version that rlhf does not work with."""


class OutOfMemory(RLHFError):
    """The accelerator or the machine has too little memory for these settings."""


class DivergedError(RLHFError):
    """Training produced a number that is not finite; the last good checkpoint stays."""


class StepNotTakenError(DivergedError):
    """The gradients of an update are not finite, so it was not made; earlier updates of the same step were.

    Attributes:
        reason: what is not finite, and where.
    """

    def __init__(self, reason: str, stage: str, last_checkpoint: str, rate_key: str) -> None:
        super().__init__(
            f"{stage}: {reason}; {last_checkpoint}; lower {rate_key}, look at these rows and this "
            "model, or set alarms.skip_not_finite to leave out such steps"
        )
        self.reason = reason


class RemoteRankError(Exception):
    """Another rank failed; the message is its report, and this rank ends as a consequence."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


USER_ERRORS = (RLHFError, AcceleratorError)

_DISK_FULL = {errno.EDQUOT, errno.ENOSPC, errno.EFBIG}
_NOT_PERMITTED = {errno.EACCES, errno.EPERM, errno.EROFS}
_INVALID_PATH = {errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR}
# torch.save and safetensors raise no OSError if the disk is full.
_DISK_FULL_TEXT = re.compile(
    r"PytorchStreamWriter failed|inline_container\.cc.* unexpected pos|no space left", re.IGNORECASE
)


def summarize_error(error: BaseException, length: int = 300) -> str:
    """Return an exception's type and message in one line of at most `length` characters."""
    text = describe_error(error)
    return text if len(text) <= length else text[: length - 1] + "…"


def as_resource_error(
    error: BaseException, output: Path | None = None, command: Callable[[], str] | None = None
) -> RLHFError | None:
    """Return the error with a remedy for a lack of memory, disk space or permissions; None for any other error.

    Args:
        output: the folder of the run. Another `--output` is only advised for files in it.
        command: returns the command that resumes the run when there is space again.
    """
    if command and isinstance(error, OutOfMemory):
        return OutOfMemory(f"{error}; run: {command()}")
    resume = f"run: {command()}" if command else "continue with --resume"
    if isinstance(error, OSError) and error.errno in _DISK_FULL | _NOT_PERMITTED | _INVALID_PATH:
        path = error.filename or output
        in_output = path is None or (output and Path(str(path)).absolute().is_relative_to(output.absolute()))
        if error.errno in _DISK_FULL:
            remedy = f"make room, then {resume}" if in_output else "make room there"
        elif in_output:
            remedy = "choose another --output"
        else:
            remedy = "check the permissions of this path" if error.errno in _NOT_PERMITTED else "check this path"
        return RunError(f"{path}: {error.strerror}; {remedy}" if path else f"{error.strerror}; {remedy}")
    if lack := find_out_of_memory(error):
        return OutOfMemory(
            f"not enough memory ({summarize_error(lack, 160)}); lower the stage's micro_batch_size or set "
            "model.gradient_checkpointing=true, also with --resume (shorter data.max_*_length need a new --output)"
        )
    # Libraries have their own types for it; tokenizers raises a plain Exception.
    if not isinstance(error, RLHFError) and _DISK_FULL_TEXT.search(describe_error(error)):
        folder = f"{output}: " if output else ""
        return RunError(f"{folder}the disk is full ({summarize_error(error, 160)}); make room, then {resume}")
    return None


@contextmanager
def translate_errors(
    output: Path | None = None,
    command: Callable[[], str] | None = None,
    *,
    describe_memory: Callable[[BaseException], OutOfMemory] | None = None,
) -> Iterator[None]:
    """Turn a lack of memory, disk space or permissions in this block into a one-line error for the user.

    Args:
        output, command: as for `as_resource_error`. Without `output`, only a lack of memory is translated: the caller
            that knows the folder translates the rest.
        describe_memory: returns what to raise for an out-of-memory error.
    """
    try:
        yield
    except Exception as error:
        translation: RLHFError | None = None
        if describe_memory and (lack := find_out_of_memory(error)):
            translation = describe_memory(lack)
        elif output:
            translation = as_resource_error(error, output, command)
        if translation is None:
            raise
        raise translation from error
