"""One engine of a tiny Llama, made on the host: what of it is trained, saved, resumed, and left on the device; as JSON.

python one_engine.py TASK ACCELERATOR ZERO_STAGE [FOLDER]; a task is adapters, save or resume.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[3]))

import gaudi_sim.plugin  # noqa: F401 (installs the simulation if the environment asks for it)

import accelerators

TASK, NAME, ZERO_STAGE, *FOLDER = sys.argv[1:]
selection = accelerators.select(NAME)
selection.export(os.environ, {})

from rlhf.checkpoint.training_state import restore_checkpoint, save_checkpoint  # noqa: E402 (torch, after the export)
from rlhf.engine.distributed import start_process_group  # noqa: E402
from rlhf.runs.directory import RunDirectory  # noqa: E402
from tests.engine import engines  # noqa: E402
from tests.helpers import llama  # noqa: E402


def adapters(accelerator: Any) -> dict[str, Any]:
    """Which parameters two steps change, and the bytes on the device when the engine is gone."""
    engine = engines.build(accelerator, int(ZERO_STAGE), "fp32", lora=2, model=llama(60))
    before = engines.weights_of(engine)
    for _ in range(2):
        step(accelerator, engine)
    changed = {name: bool((tensor != before[name]).any()) for name, tensor in engines.weights_of(engine).items()}
    del engine, before
    gc.collect()
    return {
        "adapters": [value for name, value in changed.items() if ".lora_" in name],
        "others": [value for name, value in changed.items() if ".lora_" not in name],
        "left": accelerator.memory().allocated,
    }


def save(accelerator: Any) -> dict[str, Any]:
    """Numbers after two steps, which are saved, and the loss of the third."""
    engine = engines.build(accelerator, int(ZERO_STAGE))
    for _ in range(2):
        step(accelerator, engine)
    random = accelerator.rng_state()
    save_checkpoint(RunDirectory(Path(FOLDER[0])).stage("sft"), 2, {"model": engine}, {}, random)
    return numbers(accelerator, engine)


def resume(accelerator: Any) -> dict[str, Any]:
    """The same numbers, read from the checkpoint."""
    engine = engines.build(accelerator, int(ZERO_STAGE), model=llama(60, seed=1))
    restore_checkpoint(RunDirectory(Path(FOLDER[0])).stage("sft"), {"model": engine})
    return numbers(accelerator, engine)


def step(accelerator: Any, engine: Any) -> float:
    loss: float = engine.step([engines.IDS.to(accelerator.device())], engines.loss).read()["loss"]
    return loss


def numbers(accelerator: Any, engine: Any) -> dict[str, Any]:
    weights = {name: tensor.double().norm().item() for name, tensor in engines.weights_of(engine).items()}
    return {"weights": weights, "losses": [step(accelerator, engine) for _ in range(2)]}


with start_process_group(selection) as accelerator:
    print(json.dumps({"adapters": adapters, "save": save, "resume": resume}[TASK](accelerator)))
