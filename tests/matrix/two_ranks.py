"""What two processes run for `test_matrix`: one PPO after the other, as a program of a user's own runs it.

Recipes flow in by name; out come each run's folder and, of each model that was trained, what it makes of `rows`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import rlhf
from rlhf.models.forward import ScalarHead, completion_log_probs

ACTIONS = 4


def main(folder: str) -> None:
    base = Path(folder)
    asked = json.loads((base / "asked.json").read_text())
    with rlhf.session(asked["start"], output=base / "start", accelerator="rehearsal") as session:
        session.run("sft", "reward")
    models = {"ppo.actor": f"{base}/start/sft/model", "ppo.reward_model": f"{base}/start/reward/model"}
    for name, recipe in asked["runs"].items():
        with rlhf.session(recipe | models, output=base / name, accelerator="rehearsal") as session:
            found = _trained(session)
            if session.is_main:
                torch.save(found, base / name / "found")


def _trained(session: Any) -> dict[str, Any]:
    from tests.matrix.rehearsal import counts

    counts.clear()
    ppo = session.ppo()
    steps = [ppo.step() for _ in range(ppo.steps)]
    ends = {name: _numbers(engine) for name, engine in ppo.trainer.engines.items()}
    session.save()
    return {"steps": steps, "ends": ends, "counts": dict(counts)}


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows of 12 tokens, the second with 5 of padding on the left."""
    ids = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(1))
    ids[1, :5] = 0
    return ids, (ids != 0).long()


def _numbers(engine: Any) -> torch.Tensor:
    """Log-probabilities of the last `ACTIONS` tokens, or the value at each of them."""
    ids, mask = rows()
    with engine.whole_weights() as module, torch.no_grad():
        module.eval()
        if isinstance(module, ScalarHead):
            return module(ids, mask)[:, -ACTIONS:].float()
        return completion_log_probs(module, ids, mask, ACTIONS).log_probs.float()
