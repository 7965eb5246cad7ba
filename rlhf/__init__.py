"""RLHF in three stages - supervised fine-tuning, a reward model, PPO - on any accelerator.

Runs start from the command line (`rlhf --help`) or from Python: `rlhf.session` provides what a custom loop needs.
Importing this package loads neither torch nor DeepSpeed: the accelerator is chosen first, because some runtimes read
their environment when torch is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf.api.session import Session, session
    from rlhf.errors import RLHFError
    from rlhf.version import __version__

__all__ = ["RLHFError", "Session", "__version__", "session"]
_MODULES = {
    "RLHFError": "rlhf.errors",
    "Session": "rlhf.api.session",
    "__version__": "rlhf.version",
    "session": "rlhf.api.session",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, because the `rlhf` command handles signals before it imports libraries."""
    if name not in _MODULES:
        raise AttributeError(f"module 'rlhf' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
