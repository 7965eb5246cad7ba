"""From a configuration to a running pipeline: what can be checked is checked, the accelerator chosen, stages run.

`run` works in this process, alone or as one rank of those that a launcher (`rlhf.ranks`, torchrun) started. It may
be called again, and from any thread.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.text import Text

import rlhf
from rlhf.config import STAGES, Config, Stage
from rlhf.data import sources
from rlhf.errors import USER_ERRORS, FailedElsewhere, RunError
from rlhf.metrics.progress import console
from rlhf.models.folder import check_model_folder
from rlhf.outcome import Defect, Interrupted, shortage
from rlhf.ranks import current_rank
from rlhf.run import RunDirectory
from rlhf.settings import STARTS

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
    directory = RunDirectory(config.output)
    check(config, stages, int(os.environ.get("WORLD_SIZE", "1")), resume=resume, overwrite=overwrite)
    with _left_as_found():
        selection = select(config, accelerator)
        if current_rank() == 0:
            complete = [stage.name for stage in directory.stages if stage.done and not overwrite]
            _announce(config, selection, stages, complete)
        try:
            _run(config, selection, directory, stages, resume=resume, overwrite=overwrite)
        except KeyboardInterrupt as error:
            raise Interrupted(directory.saved_state()) from error
        except Exception as error:
            if lack := shortage(error, directory.path):
                raise lack from error
            if isinstance(error, (*USER_ERRORS, FailedElsewhere)):
                raise
            raise Defect.of(error, directory.path if directory.description.is_file() else None) from error
    return directory


def check(
    config: Config, stages: Sequence[Stage], ranks: int, *, resume: bool = False, overwrite: bool = False
) -> None:
    """Find out now, and not when its stage begins, what can be known without loading anything.

    Raises:
        RLHFError: the run's folder is not to be written to, a batch of one of `stages` cannot be divided over
            `ranks`, or a model or data that they name is not there, or is what `overwrite` replaces.
    """
    directory = RunDirectory(config.output)
    if current_rank() == 0:
        RunDirectory.check(config, stages=stages, resume=resume, overwrite=overwrite)
    _check_batches(config, stages, ranks)
    if overwrite:
        _check_nothing_needed_goes(config, directory, stages)
    values = config.model_dump()
    for stage in stages:
        if directory.stage(stage).done and not overwrite:
            continue
        for start in STARTS[stage]:
            if path := start.named(values):
                check_model_folder(path)
            elif start.earlier and start.earlier not in stages:
                directory.model_of(start.earlier, start.key)
        for source in config.data.datasets:
            if stage in source.stages:
                sources.check(source.path)
                sources.check(source.heldout or source.path)


def _check_nothing_needed_goes(config: Config, directory: RunDirectory, stages: Sequence[Stage]) -> None:
    named = {"model.tokenizer": config.model.tokenizer}
    values = config.model_dump()
    named |= {start.key: start.named(values) for stage in stages for start in STARTS[stage]}
    for key, path in named.items():
        for stage in stages:
            if path and Path(path).resolve().is_relative_to(directory.stage(stage).path.resolve()):
                raise RunError(
                    f"{key}: {path} lies in the {stage} stage that --overwrite replaces; "
                    "copy it elsewhere, or choose another --output"
                )


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


def _check_batches(config: Config, stages: Sequence[Stage], ranks: int) -> None:
    if "sft" in stages:
        config.sft.micro_batch(ranks, section="sft")
    if "reward" in stages:
        config.reward.micro_batch(ranks, section="reward")
    if "ppo" in stages:
        config.ppo.minibatch(ranks)


def _run(
    config: Config,
    selection: Selection,
    directory: RunDirectory,
    stages: Sequence[Stage],
    *,
    resume: bool,
    overwrite: bool,
) -> None:
    from rlhf.engine import distributed  # imports torch, which must find the environment that `select` has set

    with distributed.session(selection) as accelerator, ExitStack() as held:
        from rlhf import pipeline  # imports DeepSpeed, which the session has told about the device

        selection.check_run(accelerator, config.model_dump(mode="json"))
        with distributed.on_main("opening the run directory") as main:
            if main:
                report = _report(accelerator, selection, config)
                held.enter_context(
                    directory.opened(config, stages=stages, resume=resume, overwrite=overwrite, accelerator=report)
                )
        pipeline.run(config, accelerator, directory, stages)


def _announce(config: Config, selection: Selection, stages: Sequence[Stage], complete: Sequence[Stage]) -> None:
    """Say what is about to happen, before the first slow import."""
    sources = ", ".join(
        "world (embedded)" if source.path == "world" else source.path for source in config.data.datasets
    )
    facts = {
        "stages": ", ".join(stage + (" (complete)" if stage in complete else "") for stage in stages),
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


@contextmanager
def _left_as_found() -> Iterator[None]:
    """Environment and signal handler are what they were when the block is left: the caller's program may go on."""
    environment = dict(os.environ)
    is_main = threading.current_thread() is threading.main_thread()  # only there can handlers be set
    handler = signal.signal(signal.SIGTERM, _interrupt) if is_main else None
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
