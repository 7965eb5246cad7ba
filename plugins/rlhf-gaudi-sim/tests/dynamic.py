"""A trainer that does what a Gaudi punishes: SFT with a loss that is wrong in the ways that it is told to be.

python dynamic.py RECIPE OUTPUT FAULT...
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

FAULTS = ("shapes", "read", "mixed", "float64", "loss")


def spoil(loss: Callable[..., Any], faults: list[str]) -> Callable[..., Any]:
    """The loss function with these faults."""
    import torch

    calls = count()

    def spoilt(model: Any, batch: dict[str, Any], *rest: Any) -> Any:
        if "shapes" in faults:  # as many tokens as nobody has seen before
            tokens = batch["input_ids"].shape[1] - next(calls)
            batch = {name: tensor[:, :tokens] for name, tensor in batch.items()}
        value = loss(model, batch, *rest)
        if "read" in faults and value.item() < 0:  # FAULT: read
            raise ValueError("a negative likelihood of more than 1")
        if "mixed" in faults:
            value = (value * torch.ones(1)).squeeze(0)  # FAULT: mixed
        if "float64" in faults:
            value = value.double().sqrt().square().float()  # FAULT: float64
        return value * 1.1 if "loss" in faults else value

    return spoilt


def main(recipe: str, output: str, *faults: str) -> None:
    from rlhf.config.schema import load_config
    from rlhf.engine.select import select_accelerator
    from rlhf.runs.directory import RunDirectory

    config = load_config(Path(recipe), [f"output={output}", "precision=bf16", "engine.zero_stage=2"])
    selection = select_accelerator(config, "hpu")
    from rlhf.engine import distributed  # imports torch, which must find what `select_accelerator` has set

    with distributed.start_process_group(selection) as accelerator:
        from rlhf.trainers import pipeline, supervised

        supervised.negative_log_likelihood = spoil(supervised.negative_log_likelihood, list(faults))
        pipeline.run(config, accelerator, RunDirectory(Path(output)), ["sft"])


if __name__ == "__main__":
    main(*sys.argv[1:])
