"""Contents and readers of a run's JSON files: people edit them, and disks lose parts of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import NotRequired, Required, TypedDict

from rlhf.errors import RunError
from rlhf.utils.atomic_io import atomic_write_json, read_json
from rlhf.utils.manifest import hash_json

Section = dict[str, Any]


class _Open(TypedDict):
    __pydantic_config__ = ConfigDict(extra="allow", strict=True)  # type: ignore[misc]  # other versions have other keys


class _Settings(_Open, total=False):
    output: str
    data: Section
    model: Section
    sft: Section
    reward: Section
    dpo: Section
    ppo: Section
    engine: Section
    lora: Section
    roles: dict[str, Section]


class _StartModel(_Open):
    path: str
    identity: dict[str, str]


class _StageRecord(_Open, total=False):
    precision: str | None
    engine: Section
    lora: Section
    roles: dict[str, Section]
    models: dict[str, _StartModel]


class _Source(_Open):
    rows: int
    digest: str
    dropped: NotRequired[int]


class _Attention(_Open):
    name: str


class _Accelerator(_Open, total=False):
    name: str
    reason: str
    device: Section | None
    precision: Section | None
    attention: dict[str, _Attention] | None


class _Invocation(_Open):
    command: str
    stages: list[str]
    started: str


class _Description(_Open, total=False):
    config: _Settings
    accelerator: _Accelerator | None
    stages: dict[str, _StageRecord]
    data: dict[str, _Source]
    versions: dict[str, str]
    invocations: list[_Invocation]


class _Kept(_Open, total=False):
    step: Required[int]
    metric: str
    value: float


class _Sample(_Open):
    prompt: str
    before: str
    after: str


class _File(TypedDict):
    size: int
    sha256: str


class _Summary(_Open, total=False):
    stage: Required[str]
    title: str
    before: dict[str, float]
    after: dict[str, float]
    steps: int
    seconds: float
    set_up_seconds: float
    peak_memory: float
    planned_memory: float
    planned_reserve: float
    tflops: float
    phases: dict[str, float]
    kept: _Kept
    over_optimized_since: int
    samples: list[_Sample]
    warnings: list[str]
    files: dict[str, _File]
    sha256: str


class _Evaluation(TypedDict):
    numbers: dict[str, float]
    samples: list[dict[str, str]]
    judged: list[float]


_DESCRIPTION, _SUMMARY = TypeAdapter(_Description), TypeAdapter(_Summary)


class _Evaluations(TypedDict):
    evaluations: dict[int, _Evaluation]
    sha256: str


_EVALUATIONS = TypeAdapter(_Evaluations)


def read_description(path: Path) -> dict[str, Any]:
    """Return the contents of a `run.json`.

    Raises:
        RunError: it cannot be read, or was changed into something else.
    """
    return _check(_DESCRIPTION, path)


def read_summary(path: Path) -> dict[str, Any]:
    """Return the contents of a `stage.json`; errors are those of `read_description`."""
    summary = _check(_SUMMARY, path)
    if "sha256" in summary:
        _compare_digest(path, {key: value for key, value in summary.items() if key != "sha256"}, summary["sha256"])
    return summary


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    """Write what `read_summary` returns."""
    atomic_write_json(path, summary | {"sha256": hash_json(summary)})


def read_evaluations(path: Path) -> dict[str, Any]:
    """Return the evaluations in an `evaluations.json`, by step; errors are those of `read_description`.

    They decide which model a stage keeps, so no number of them may have changed.
    """
    content = _check(_EVALUATIONS, path)
    _compare_digest(path, content["evaluations"], content["sha256"])
    evaluations: dict[str, Any] = content["evaluations"]
    return evaluations


def write_evaluations(path: Path, evaluations: dict[str, Any]) -> None:
    """Write what `read_evaluations` returns."""
    atomic_write_json(path, {"evaluations": evaluations, "sha256": hash_json(evaluations)})


def _compare_digest(path: Path, content: Any, digest: str) -> None:
    if digest != hash_json(content):
        raise RunError(f"{path}: was changed after rlhf had written it; restore it, or train the stage again")


def _check(shape: TypeAdapter[Any], path: Path) -> dict[str, Any]:
    value = read_json(path)
    try:
        shape.validate_python(value)
    except ValidationError as error:
        (first, *_) = error.errors(include_url=False)
        where = ".".join(map(str, first["loc"]))
        raise RunError(f"{path}: is not what rlhf wrote ({where}: {first['msg']}); restore it") from error
    return value
