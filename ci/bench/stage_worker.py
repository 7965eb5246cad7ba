"""Run a stage of a recipe, as `rlhf` does, for `gaudi_sim_step.py`: one step per line on stdin."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from channel import Channel

from rlhf.config.schema import EMBEDDED_RECIPE, load_config
from rlhf.engine.select import select_accelerator
from rlhf.runs.directory import RunDirectory


def main() -> None:
    work = json.loads(sys.argv[1])
    channel = Channel()
    recipe = Path(work["recipe"]) if work["recipe"] else EMBEDDED_RECIPE
    config = load_config(recipe, [*work["settings"], f"output={work['output']}"])
    selection = select_accelerator(config, work["accelerator"])
    # This imports torch and DeepSpeed, which read the environment that `select_accelerator` has set.
    from rlhf.engine import distributed

    with distributed.start_process_group(selection) as accelerator:
        import torch

        from rlhf.trainers import loop, pipeline

        loop.fit = FitOnCommand(loop.fit, channel, threads=torch.get_num_threads())
        pipeline.run(config, accelerator, RunDirectory(Path(config.output)), [work["stage"]])


class FitOnCommand:
    """A wrapper of `loop.fit` in which each step waits for a command of the benchmark."""

    def __init__(self, fit: Any, channel: Channel, **facts: Any) -> None:
        self._fit = fit
        self._channel = channel
        self._facts = facts

    def __call__(self, trainer: Any, context: Any, later: float = 0.0) -> Any:
        self._channel.reply(**self._facts)
        step = trainer.step

        def step_on_command(index: int) -> Any:
            if not self._channel.wait():
                sys.exit(0)
            metrics = step(index)
            context.accelerator.synchronize()
            self._channel.reply()
            return metrics

        trainer.step = step_on_command
        return self._fit(trainer, context, later)


if __name__ == "__main__":
    main()
