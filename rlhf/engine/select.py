"""Choose the accelerator, its kernels and its shapes for a run, without loading torch or DeepSpeed."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.config.schema import Config
from rlhf.errors import ConfigError

if TYPE_CHECKING:
    from accelerators import Accelerator, Selection, ShapePolicy


def select_accelerator(config: Config, accelerator: str | None = None) -> Selection:
    """Choose the backend and set the environment variables that it and DeepSpeed need, before torch is imported.

    Raises:
        AcceleratorError: no backend can be chosen; the message says why.
    """
    import accelerators

    selection = accelerators.select(accelerator, config.accelerator)
    selection.export(os.environ, config.model_dump(mode="json"))
    # DeepSpeed compiles with the `ninja` of this environment, which may not be activated.
    programs = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", "")
    if programs not in path.split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join(filter(None, [programs, path]))
    return selection


def choose_shapes(config: Config, accelerator: Accelerator) -> ShapePolicy:
    """Return the shape policy of `engine.shapes`; auto: the accelerator's."""
    from accelerators import ShapePolicy

    kind = config.engine.shapes
    return accelerator.shape_policy() if kind == "auto" else ShapePolicy(kind)


def choose_kernels(config: Config, accelerator: Accelerator) -> None:
    """Make the accelerator use the implementations that `engine.kernels` names.

    Raises:
        ConfigError: it has no implementation of that name.
    """
    from accelerators import AcceleratorError

    for operation, name in config.engine.kernels.items():
        try:
            accelerator.kernels.choose(operation, name)
        except AcceleratorError as error:
            raise ConfigError(f"engine.kernels.{error}") from error
