"""The errors a user can meet.

Every error is one line: what is wrong, where, and what to do. The command line prints it and exits
with the error's `exit_code`; `--debug` adds the traceback. Anything else that escapes is our defect.
"""

from accelerators import AcceleratorError


class RLHFError(Exception):
    """Base of every error the user can fix; the command line exits with 2."""

    exit_code = 2


class ConfigError(RLHFError):
    """The configuration is wrong: an unknown key, a bad value, settings that contradict each other."""


class DataError(RLHFError):
    """A data set cannot be read, or has no usable row."""


class ModelError(RLHFError):
    """A model or tokenizer cannot be loaded, or two of them do not fit together."""


class RewardError(RLHFError):
    """A reward function cannot be found or imported, or fails with a sample."""


class RunError(RLHFError):
    """A run directory or a checkpoint is not what the command needs."""


class DependencyError(RLHFError):
    """An installed library has a version that rlhf does not work with."""


class OutOfMemory(RLHFError):
    """The accelerator or the machine has too little memory for these settings."""


class DivergedError(RLHFError):
    """Training produced a number that is not finite; the last good checkpoint stays."""


class RemoteRankError(Exception):
    """Another rank failed, and says why; this one only ends with it."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


USER_ERRORS = (RLHFError, AcceleratorError)
