"""Resolve the name of a model: a run, one of its stages, a model's folder, or a hub name. Needs no torch."""

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
"""A stage that writes a language model."""


def model_folder(path: Path | str, stage: Policy | None = None, *, ema: bool = False) -> Path:
    """Return the folder of a language model: in a run that of `stage` or of its last finished stage, else `path`.

    Args:
        path: a run, a stage's folder, a model's folder or a hub name.
        stage: the stage of the run; None: the last finished one.
        ema: return the moving average of PPO's policy.

    Raises:
        RunError: the run has no such model.
        ModelError: `path` is a path, but neither a run nor a folder.
    """
    path = _recover_path(path)
    if ema:
        return _average(path, stage)
    if RunDirectory(path).description.is_file():
        return _of_run(RunDirectory(path), [stage] if stage else ["ppo", "dpo", "sft"])
    if (path / "stage.json").is_file():
        return _model_or_adapter(path, "model")  # the folder of a run's stage
    if stage:
        raise RunError(f"{path}: --stage selects a model of a run, but there is no run.json here; remove --stage")
    return path


def reward_model_folder(path: Path | str) -> Path:
    """Return the folder of a reward model: in a run that of its reward stage, else `path`.

    Raises:
        RunError: the run has no finished reward stage.
        ModelError: as `model_folder`.
    """
    path = _recover_path(path)
    if RunDirectory(path).description.is_file():
        return _of_run(RunDirectory(path), ["reward"])
    return path / "model" if (path / "stage.json").is_file() else path


def find_run(path: Path | str) -> RunDirectory | None:
    """Return the run that contains `path` (a run, a stage or a model), or None."""
    folders = (Path(path), *Path(path).resolve().parents[:2])
    return next((run for run in map(RunDirectory, folders) if run.description.is_file()), None)


def read_prompt_format(folder: Path) -> PromptFormat | None:
    """Return the prompt format of the training of the model in `folder`; None if no stage wrote the model."""
    prompt_format: PromptFormat | None = _read_summary(folder).get("prompt_format")
    return prompt_format


def read_end_ids(folder: Path) -> list[int] | None:
    """Return the tokens that ended a reply in that training; None if no stage, or an old version's, wrote the model."""
    end_ids: list[int] | None = _read_summary(folder).get("end_ids")
    return end_ids


def _read_summary(folder: Path) -> dict[str, Any]:
    """Return the `stage.json` of the stage that wrote the model in `folder`, else {}."""
    summary = folder.parent / "stage.json"
    return read_json(summary) if folder.name in _NAMES and summary.is_file() else {}


def _recover_path(path: Path | str) -> Path:
    """Return a name as a path; restore the backup of a killed run."""
    if not is_path(str(path)):
        return Path(path)  # a hub name; loading reports errors
    path = Path(path)
    for folder in (path, *path.parents[:2]):  # of a run, of its stage, of the stage's model
        with suppress(RunError):  # another process writes there; complete models can be used
            RunDirectory(folder).recover()
    if path.is_file():
        raise ModelError(f"{path}: is a file; name the folder of a run or of a model")
    if not path.is_dir():
        raise ModelError(f"{path}: no such folder; name a run (it holds run.json) or a model (it holds config.json)")
    return path


def _of_run(run: RunDirectory, stages: Sequence[Stage]) -> Path:
    """Return the model of the first of `stages` that is finished."""
    for candidate in map(run.stage, stages):
        if candidate.done:
            return _model_or_adapter(candidate.path, candidate.model.name)
    *others, last = stages
    names = f"{', '.join(others)} or {last}" if others else last
    raise RunError(f"{run.path}: has no finished {names} stage; finish it with --resume, or name a model folder")


def _model_or_adapter(stage: Path, name: str) -> Path:
    """Return the model of that name in a stage's folder, or its adapter if `lora.save` kept only that."""
    adapter = stage / name.replace("model", ADAPTER)
    return adapter if adapter.is_dir() and not (stage / name).exists() else stage / name


def _average(path: Path, stage: Policy | None) -> Path:
    """Return the moving average of the PPO stage in the run or stage folder `path`."""
    if stage not in (None, "ppo"):
        raise RunError("--ema: only PPO's policy has a moving average; remove --stage")
    ppo = StageDirectory(path / "ppo" if (path / "run.json").is_file() else path, "ppo")
    average = _model_or_adapter(ppo.path, ppo.average.name)
    if not ppo.done or not average.is_dir():
        raise RunError(f"{path}: has no moving average of a finished ppo stage; train with ppo.ema, or remove --ema")
    return average


_CONFIG = "adapter_config.json"


def find_base_model(folder: Path | str) -> str:
    """Return the model to load for `folder`: the base of the adapter in it, or `folder` if it has no adapter.

    Raises:
        ModelError: the adapter names no base model, or the model's folder is incomplete.
    """
    base, config = str(folder), Path(folder) / _CONFIG
    if config.is_file():
        base = str(read_json(config).get("base_model_name_or_path") or "")
        if not base:
            raise ModelError(f"{folder}: this adapter names no base model; set base_model_name_or_path in {_CONFIG}")
    check_model_folder(base)
    return base


def merge_adapter(model: Any, folder: str) -> Any:
    """Merge the adapter in `folder` into `model`, in float32, as a stage writes a merged model.

    Raises:
        ModelError: the adapter belongs to another model, or cannot be read.
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
            f"{folder}: this adapter cannot be merged into {model.name_or_path} "
            f"({summarize_error(error).rstrip(':')}); check its files, and base_model_name_or_path in {_CONFIG}"
        ) from error
