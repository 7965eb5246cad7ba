"""RLHF in three stages - supervised fine-tuning, a reward model, PPO - on any accelerator.

Runs start from the command line (`rlhf --help`) or from Python: `rlhf.session` provides what a custom loop needs.
Importing this package loads neither torch nor DeepSpeed: the accelerator is chosen first, because some runtimes read
their environment when torch is imported.
"""

from rlhf.api.session import Session, session
from rlhf.errors import RLHFError
from rlhf.version import __version__

__all__ = ["RLHFError", "Session", "__version__", "session"]
