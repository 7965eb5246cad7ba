"""What two processes run for a matrix: one PPO after the other, as a program of a user's own runs it.

Recipes flow in by name; out come each run's folder and, of each model that was trained, what it makes of `rows`, for
comparison with what plain transformers makes of them with the models that were left.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import rlhf
from rlhf.models.forward import ScalarHead, completion_log_probs
from rlhf.utils.atomic_io import PICKLE_PROTOCOL

ACTIONS = 4


def main(folder: str, accelerator: str, watch: Callable[[dict[str, Any]], Callable[[], dict[str, Any]]]) -> None:
    """Run what `asked.json` in `folder` says: `start`, and then all `runs`, which begin with its models.

    Args:
        watch: called with a recipe before it is run; what it gives says afterwards what was seen on the device:
            `counts` of functions `recorded` and `replayed`, ...
    """
    base = Path(folder)
    asked = json.loads((base / "asked.json").read_text())
    with rlhf.session(asked["start"], output=base / "start", accelerator=accelerator) as session:
        session.run("sft", "reward")
    models = {"ppo.actor": f"{base}/start/sft/model", "ppo.reward_model": f"{base}/start/reward/model"}
    for name, recipe in asked["runs"].items():
        seen = watch(recipe)
        with rlhf.session(recipe | models, output=base / name, accelerator=accelerator) as session:
            numbers = _trained(session) | seen()
            if session.is_main:
                torch.save(numbers, base / name / "found", pickle_protocol=PICKLE_PROTOCOL)


def _trained(session: Any) -> dict[str, Any]:
    ppo = session.ppo()
    steps = [ppo.step() for _ in range(ppo.steps)]
    ends = {name: _numbers(engine).cpu() for name, engine in ppo.trainer.engines.items()}
    session.save()
    return {"steps": steps, "ends": ends}


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows of 12 tokens, the second with 5 of padding on the left."""
    ids = torch.randint(3, 24, (2, 12), generator=torch.Generator().manual_seed(1))
    ids[1, :5] = 0
    return ids, (ids != 0).long()


def _numbers(engine: Any) -> torch.Tensor:
    """Log-probabilities of the last `ACTIONS` tokens, or the value at each of them."""
    ids, mask = engine.accelerator.to_device(rows())
    with engine.whole_weights() as module, torch.no_grad():
        module.eval()
        if isinstance(module, ScalarHead):
            return module(ids, mask)[:, -ACTIONS:].float()
        return completion_log_probs(module, ids, mask, ACTIONS).log_probs.float()


def of_plain_transformers(folder: Path, role: str) -> torch.Tensor:
    """The same of a saved model, each row alone, in float32."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForCausalLM if role == "actor" else AutoModelForSequenceClassification
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    numbers = []
    with torch.no_grad():
        for ids, mask in zip(*rows()):
            alone = ids[mask.bool()][None]
            if role == "actor":
                logits = model(input_ids=alone).logits[0, -ACTIONS - 1 : -1]
                numbers.append(logits.log_softmax(-1).gather(-1, alone[0, -ACTIONS:, None]).flatten())
            else:  # a classifier gives the last token's value: rows that end at each of them
                ends = range(alone.shape[1] - ACTIONS + 1, alone.shape[1] + 1)
                numbers.append(torch.stack([model(input_ids=alone[:, :end]).logits[0, 0] for end in ends]))
    return torch.stack(numbers)
