"""Folders of runs as runs leave them, and what is in them."""

import json
from pathlib import Path
from typing import Any

from rlhf.config.schema import STAGES, Config, Stage, load_config
from rlhf.runs.directory import RunDirectory
from rlhf.runs.stage_directory import StageDirectory


def config_in(folder: Path, *overrides: str) -> Config:
    return load_config(None, [f"output={json.dumps(str(folder))}", *overrides])


def check(config: Config, **wishes: Any) -> RunDirectory:
    """Check a run's folder as a new process does."""
    run = RunDirectory(config.output)
    run.recover()
    run.check(config, **wishes)
    return run


def run_stages(config: Config, *stages: Stage, finish: bool = True, **wishes: bool) -> RunDirectory:
    """Do to the folder what a run of `stages` does."""
    run = check(config, stages=stages, **wishes)
    with run.open_for(config, stages=stages, **wishes):
        for stage in map(run.stage, stages):
            record(stage, 0, 1)
            run.commit(stage)
            if finish:
                stage.finish({"stage": stage.name, "config": config.model_dump(mode="json")})
    return run


def record(stage: StageDirectory, *steps: int) -> None:
    stage.path.mkdir(exist_ok=True)
    with stage.metrics.open("a") as file:
        file.writelines(json.dumps({"step": step}) + "\n" for step in steps)


def checkpoint(stage: StageDirectory, step: int) -> Path:
    path = stage.checkpoints / f"step-{step:08d}"
    path.mkdir(parents=True)
    return path


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file with its time and its bytes."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def accelerator(precision: str) -> dict[str, Any]:
    return {"precision": {"name": precision}}


def fail_in(run: RunDirectory, config: Config, error: BaseException, *steps: int, **wishes: Any) -> None:
    with run.open_for(config, **wishes):
        record(run.stage(wishes.get("stages", STAGES)[0]), *steps)
        run.commit(run.stage(wishes.get("stages", STAGES)[0]))
        raise error
