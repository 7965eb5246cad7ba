"""From a configuration to a running pipeline: the accelerator is chosen, processes are started, stages are run.

`run` works in this process, alone or as one rank of those that a launcher (`rlhf.ranks`, torchrun) started.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.text import Text

import rlhf
from rlhf.config import STAGES, Config, Stage
from rlhf.errors import USER_ERRORS
from rlhf.metrics.progress import console
from rlhf.outcome import Defect, Interrupted
from rlhf.ranks import current_rank
from rlhf.run import RunDirectory

if TYPE_CHECKING:
    from accelerators import Accelerator, Selection


def run(
    config: Config,
    *,
    stages: Sequence[Stage] = STAGES,
    accelerator: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
) -> RunDirectory:
    """Run `stages` in this process, which may be one rank of several.

    Args:
        accelerator: the command line's choice of backend, above that of `config`.
        resume: continue stages that the run directory holds already.
        overwrite: replace them.

    Raises:
        RLHFError, AcceleratorError: something that the user can fix; the message says how.
        Interrupted: SIGINT or SIGTERM arrived.
        Defect: anything else; its traceback is in the run directory.
    """
    if current_rank() == 0:
        directory = RunDirectory.check(config, stages=stages, resume=resume, overwrite=overwrite)
    else:
        directory = RunDirectory(config.output)
    check_batches(config, stages, int(os.environ.get("WORLD_SIZE", "1")))
    selection = select(config, accelerator)
    if current_rank() == 0:
        _announce(config, selection, stages)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        _run(config, selection, directory, stages, overwrite)
    except KeyboardInterrupt as error:
        raise Interrupted(directory.saved_state()) from error
    except (*USER_ERRORS, OSError):
        if current_rank() == 0:
            directory.abandon(stages)
        raise
    except Exception as error:
        raise Defect.of(error, directory.path) from error
    return directory


def select(config: Config, accelerator: str | None = None) -> Selection:
    """Choose the backend and set the environment that it and DeepSpeed want, before torch is imported.

    Raises:
        AcceleratorError: no backend can be chosen; the message says why.
    """
    import accelerators

    selection = accelerators.select(accelerator, config.accelerator)
    selection.export(os.environ, config.model_dump(mode="json"))
    # DeepSpeed compiles with the `ninja` of this environment, which need not be activated.
    programs = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", "")
    if programs not in path.split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join(filter(None, [programs, path]))
    return selection


def check_batches(config: Config, stages: Sequence[Stage], ranks: int) -> None:
    """Find out now, and not when its stage begins, that a batch cannot be divided.

    Raises:
        ConfigError: the batch of one of `stages` does not divide over `ranks` and micro-batches.
    """
    if "sft" in stages:
        config.sft.micro_batch(ranks, section="sft")
    if "reward" in stages:
        config.reward.micro_batch(ranks, section="reward")
    if "ppo" in stages:
        config.ppo.minibatch(ranks)


def _run(
    config: Config, selection: Selection, directory: RunDirectory, stages: Sequence[Stage], overwrite: bool
) -> None:
    from rlhf.engine import distributed  # imports torch, which must find the environment that `select` has set

    with distributed.session(selection) as accelerator:
        from rlhf import pipeline  # imports DeepSpeed, which the session has told about the device

        selection.check_run(accelerator, config.model_dump(mode="json"))
        with distributed.on_main("opening the run directory") as main:
            if main:
                report = _report(accelerator, selection, config)
                directory.begin(config, stages=stages, overwrite=overwrite, accelerator=report)
        pipeline.run(config, accelerator, directory, stages)


def _announce(config: Config, selection: Selection, stages: Sequence[Stage]) -> None:
    """Say what is about to happen, before the first slow import."""
    sources = ", ".join(
        "world (embedded)" if source.path == "world" else source.path for source in config.data.datasets
    )
    facts = {
        "stages": ", ".join(stages),
        "model": config.model.path or "embedded tiny Llama, from scratch",
        "data": sources,
        "accelerator": f"{selection.name} ({selection.reason})",
        "output": str(config.output),
    }
    console.print(f"[bold]rlhf {rlhf.__version__}[/]")
    for name, value in facts.items():
        console.print(Text.assemble((f"{name:13}", "dim"), value), soft_wrap=True)


def _report(accelerator: Accelerator, selection: Selection, config: Config) -> dict[str, Any]:
    """What `run.json` says of the accelerator."""
    precision = accelerator.precision(config.precision)
    return {
        "name": selection.name,
        "provider": selection.provider,
        "reason": selection.reason,
        "device": asdict(accelerator.info()),
        "precision": {"name": precision.name, "reason": precision.reason},
        "capabilities": {name: asdict(support) for name, support in accelerator.capabilities().items()},
    }


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
