"""Fine-tuning in a separate process, which may be killed; its perplexity falls until step 7 and rises then.

`python -m tests.trainers.tuned FOLDER` starts it once for each of `PLACES`, and kills it there.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

BEST, STEPS = 7, 12
SETTINGS = {
    "batch_size": 2,
    "micro_batch_size": 1,
    "epochs": 6,
    "eval_every": 1,
    "checkpoint_every": 3,
    "keep": "best(perplexity)",
    "optimizer": {"learning_rate": 0.03, "warmup": 0, "schedule": "constant"},
}


def tune(accelerator: Any, folder: Path, **changes: Any) -> dict[str, Any]:
    """Run the stage, from its newest checkpoint if there is one, and return its summary."""
    from rlhf.data.stage_dataset import StageData
    from rlhf.reporting.recorder import Recorder
    from rlhf.runs.directory import RunDirectory
    from rlhf.runs.stage_directory import parse_step
    from rlhf.trainers.loop import fit
    from rlhf.trainers.supervised import SFTTrainer
    from tests.in_process import one_model, stage_context
    from tests.optimum import language
    from tests.trainers.test_stage_numbers import DEMONSTRATIONS, HELDOUT, policy

    data, top = {"max_prompt_length": 3, "max_completion_length": 5}, changes.pop("top", {})
    values = {"precision": "fp32", "data": data, "sft": SETTINGS | changes} | top
    place = RunDirectory(folder).stage("sft")
    latest = place.latest_checkpoint
    with Recorder(place, resume_step=parse_step(latest) if latest else None) as recorder:
        context = stage_context(accelerator, folder, "sft", values, recorder=recorder)
        data = StageData(DEMONSTRATIONS, HELDOUT, [])
        return fit(SFTTrainer(context, one_model(policy()), language.tokenizer(), data), context)


def _kill(*arguments: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _nth(count: int, function: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, but `instead` from the `count`-th call on, counted from 1."""
    calls: list[None] = []

    def call(*arguments: Any) -> Any:
        calls.append(None)
        return (function if len(calls) < count else instead)(*arguments)

    return call


def _patch(place: str) -> None:
    from rlhf.trainers import evaluation_schedule
    from rlhf.trainers.supervised import SFTTrainer

    if place == "its model is written, and what was found is not":
        evaluation_schedule.write_evaluations = _nth(1 + 5, evaluation_schedule.write_evaluations, _kill)
    elif place == "a better model is kept than the checkpoint knows":
        SFTTrainer.evaluate = _nth(1 + 8, SFTTrainer.evaluate, _kill)
    elif place == "a checkpoint is written, and its model is not measured":
        SFTTrainer.evaluate = _nth(1 + 6, SFTTrainer.evaluate, _kill)
    elif place == "its model is not written, and is the best":
        SFTTrainer.save = _nth(6, SFTTrainer.save, _kill)
    else:
        rename = evaluation_schedule.atomic_rename_dir
        evaluation_schedule.atomic_rename_dir = lambda *paths: (rename(*paths), _kill())


PLACES = {
    "its model is written, and what was found is not": (3, 3),
    "a better model is kept than the checkpoint knows": (3, 6),
    "a checkpoint is written, and its model is not measured": (3, 6),
    "its model is not written, and is the best": (7, 7),
    "the kept model is in its place, and the stage not finished": (3, 12),
}
"""Where the process is killed: steps between its checkpoints, and the step of the newest one then."""


def main(folder: Path) -> None:
    import deepspeed  # noqa: F401  # imported once, for all that are forked
    import transformers.models.llama.modeling_llama  # noqa: F401
    from torch.utils.tensorboard import SummaryWriter  # noqa: F401

    import accelerators
    from rlhf.engine import distributed

    for place, (every, _) in PLACES.items():
        process = os.fork()
        if process == 0:
            _patch(place)
            with distributed.start_process_group(accelerators.select("cpu", environ={})) as accelerator:
                tune(accelerator, folder / place, checkpoint_every=every)
            os._exit(0)
        _, status = os.waitpid(process, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, place


if __name__ == "__main__":
    main(Path(sys.argv[1]))
