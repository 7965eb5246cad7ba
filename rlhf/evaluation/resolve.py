"""What a user means by a name: a run, one of its stages, a model's folder, or a model of a hub. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlhf.config.paths import is_path
from rlhf.errors import ModelError, RunError
from rlhf.models.compatibility import check_model_folder
from rlhf.roles.base_sharing import ADAPTER
from rlhf.runs.directory import RunDirectory
from rlhf.runs.stage_directory import AVERAGE, CRITIC, StageDirectory
from rlhf.utils.atomic_io import read_json

if TYPE_CHECKING:
    from rlhf.config.schema import Stage
    from rlhf.data.prompt_encoding import PromptFormat


_NAMES = {f"{name}{suffix}" for name in ("model", ADAPTER) for suffix in ("", AVERAGE)} | {CRITIC}
Policy = Literal["sft", "dpo", "ppo"]
"""A stage that leaves a language model."""


def model_folder(path: Path | str, stage: Policy | None = None, *, ema: bool = False) -> Path:
    """The language model that is meant: of a run the one of `stage`, or of its last finished stage; else `path` itself.

    Args:
        ema: the moving average of PPO's policy.

    Raises:
        RunError: the run has no such model.
        ModelError: `path` is a path, and neither a run nor a folder.
    """
    path = _there(path)
    if ema:
        return _average(path, stage)
    if RunDirectory(path).description.is_file():
        return _of_run(RunDirectory(path), [stage] if stage else ["ppo", "dpo", "sft"])
    if (path / "stage.json").is_file():
        return _left(path, "model")  # the folder of a run's stage
    if stage:
        raise RunError(f"{path}: --stage chooses a model of a run, and there is no run.json here; leave it out")
    return path


def reward_model_folder(path: Path | str) -> Path:
    """The reward model that is meant: of a run its reward stage's, else `path` itself.

    Raises:
        RunError: the run has no finished reward stage.
        ModelError: as `model_folder`.
    """
    path = _there(path)
    if RunDirectory(path).description.is_file():
        return _of_run(RunDirectory(path), ["reward"])
    return path / "model" if (path / "stage.json").is_file() else path


def find_run(path: Path | str) -> RunDirectory | None:
    """The run that `path` is the folder of, or of a stage or model in it; None where it is of none."""
    folders = (Path(path), *Path(path).resolve().parents[:2])
    return next((run for run in map(RunDirectory, folders) if run.description.is_file()), None)


def read_prompt_format(folder: Path) -> PromptFormat | None:
    """How prompts were written in the training that left the model in `folder`; None where no stage left it."""
    found: PromptFormat | None = _summary(folder).get("prompt_format")
    return found


def read_end_ids(folder: Path) -> list[int] | None:
    """The tokens that ended a reply in that training; None where no stage left the model, or one of an old version."""
    found: list[int] | None = _summary(folder).get("end_ids")
    return found


def _summary(folder: Path) -> dict[str, Any]:
    """What the stage says of itself that left the model in `folder`."""
    summary = folder.parent / "stage.json"
    return read_json(summary) if folder.name in _NAMES and summary.is_file() else {}


def _there(path: Path | str) -> Path:
    """A name as a path, and what a killed run had set aside brought back."""
    if not is_path(str(path)):
        return Path(path)  # a hub knows it, or says what is wrong
    path = Path(path)
    for folder in (path, *path.parents[:2]):  # of a run, of its stage, of the stage's model
        with suppress(RunError):  # a living process writes there; what is complete may be used
            RunDirectory(folder).recover()
    if path.is_file():
        raise ModelError(f"{path}: is a file; name the folder of a run or of a model")
    if not path.is_dir():
        raise ModelError(f"{path}: no such folder; name a run (it holds run.json) or a model (it holds config.json)")
    return path


def _of_run(run: RunDirectory, stages: Sequence[Stage]) -> Path:
    """The model of the first of `stages` that is finished."""
    for candidate in map(run.stage, stages):
        if candidate.done:
            return _left(candidate.path, candidate.model.name)
    *others, last = stages
    names = f"{', '.join(others)} or {last}" if others else last
    raise RunError(f"{run.path}: has no finished {names} stage; finish it with --resume, or name a model folder")


def _left(stage: Path, name: str) -> Path:
    """The model of that name in the folder of a stage, or its adapter where `lora.save` has left that alone."""
    adapter = stage / name.replace("model", ADAPTER)
    return adapter if adapter.is_dir() and not (stage / name).exists() else stage / name


def _average(path: Path, stage: Policy | None) -> Path:
    """The moving average that PPO has left in the run at `path`, or in the folder of its stage."""
    if stage not in (None, "ppo"):
        raise RunError("--ema: of PPO's policy alone a run has an average; leave --stage out")
    ppo = StageDirectory(path / "ppo" if (path / "run.json").is_file() else path, "ppo")
    average = _left(ppo.path, ppo.average.name)
    if not ppo.done or not average.is_dir():
        raise RunError(f"{path}: holds no average of a finished ppo stage; train with ppo.ema, or leave --ema out")
    return average


_CONFIG = "adapter_config.json"


def find_base_model(folder: Path | str) -> str:
    """The model to be loaded for `folder`: the one that the adapter in it was trained on, or else what it holds itself.

    Raises:
        ModelError: the adapter does not name its model, or the model's folder lacks something.
    """
    base, config = str(folder), Path(folder) / _CONFIG
    if config.is_file():
        base = str(read_json(config).get("base_model_name_or_path") or "")
        if not base:
            raise ModelError(f"{folder}: this adapter names no model; put its base_model_name_or_path into {_CONFIG}")
    check_model_folder(base)
    return base


def merge_adapter(model: Any, folder: str) -> Any:
    """`model`, in float32, with the adapter in `folder` added to its weights: what a stage leaves as merged model.

    Raises:
        ModelError: it is another model's adapter, or cannot be read.
    """
    from peft import PeftModel

    from accelerators import find_out_of_memory
    from rlhf.models.hf_errors import summarize_error

    try:
        return PeftModel.from_pretrained(model, folder).merge_and_unload()
    except Exception as error:
        if find_out_of_memory(error):
            raise
        raise ModelError(
            f"{folder}: this adapter cannot be put into {model.name_or_path} ({summarize_error(error).rstrip(':')}); "
            f"check its files, and base_model_name_or_path in {_CONFIG}"
        ) from error
