"""What two processes of one group run for `test_two_ranks`: a few steps of each stage, left in a folder."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import accelerators
from rlhf.data.stage_dataset import StageData
from rlhf.engine import distributed
from tests.reference import cases, real

ROWS = {"sft": 6, "reward": 6, "dpo": 6, "ppo": 14, "distill": 6}
"""Two less than fill the last batch: the second rank's share lacks them."""

_SHARDED = {"zero_stage": 3, "zero_persistence_threshold": 0}
_ROLES = {
    "actor": {"zero_stage": 3},
    "critic": {"zero_stage": 1, "offload": "optimizer"},
    "reward": {"zero_stage": 3},
}
_WITHOUT_CRITIC = {"micro_batch_size": 1, "lam": 0.95, "gamma": 1.0, "value_clip": 0.2}

_SLOW_LORA = cases.LORA | {"learning_rate": 5e-3}
"""At ten times the critic's rate, its second update would multiply differences of rounding by thousands."""

CHANGES = {
    "sft": {"micro_batch_size": 1, "engine": {"zero_stage": 0}, "lora": cases.LORA},
    "reward": {"micro_batch_size": 1},
    "reward, offloaded at ZeRO 2": {"micro_batch_size": 1, "engine": {"zero_stage": 2, "offload": "optimizer"}},
    "reward, offloaded at ZeRO 3": {"micro_batch_size": 1, "engine": _SHARDED | {"offload": "all"}},
    "dpo": {"micro_batch_size": 1},
    "dpo, sharded, the reference beside": {"micro_batch_size": 1, "engine": _SHARDED, "reference": "beside"},
    "dpo, adapters on sharded weights": {
        "micro_batch_size": 1,
        "engine": _SHARDED | {"offload": "all"},
        "lora": cases.LORA,
        "reference": "beside",
    },
    "sft, adapters on sharded int4": {
        "micro_batch_size": 1,
        "engine": _SHARDED | {"frozen": "int4"},
        "lora": cases.LORA,
    },
    "reward, adapters on sharded int8": {
        "micro_batch_size": 1,
        "engine": _SHARDED | {"frozen": "int8", "offload": "all"},
        "model": {"gradient_checkpointing": True},
        "lora": cases.LORA,
    },
    "ppo, adapters on sharded int8": {
        "micro_batch_size": 1,
        "engine": _SHARDED | {"frozen": "int8"},
        "lora": _SLOW_LORA,
    },
    "ppo, adapters on sharded int4, layer by layer": {
        "micro_batch_size": 1,
        "engine": {"zero_stage": 3, "frozen": "int4", "zero_persistence_threshold": 500},
        "model": {"gradient_checkpointing": True},
        "lora": _SLOW_LORA,
        "generation_weights": "layerwise",
    },
    "distill": {"micro_batch_size": 1},
    "distill, sharded and offloaded": {
        "micro_batch_size": 1,
        "engine": _SHARDED | {"offload": "all"},
        "divergence": "forward",
    },
    "ppo": {"micro_batch_size": 1},
    "ppo, with all that it may be told": {
        "micro_batch_size": 1,
        "kl_in": "loss",
        "kl_estimator": "k2",
        "normalize_scores": "running",
        "missing_eos_penalty": 0.7,
        "entropy_coef": 0.05,
        "kl_stop": 0.002,
        "steps": 3,
    },
    "ppo, each model held in its own way": {
        "micro_batch_size": 1,
        "engine": {"zero_stage": 0, "zero_persistence_threshold": 0, "offload": "parameters"},
        "roles": _ROLES,
    },
    "ppo, one update of four micro-batches": {**cases.ONE_UPDATE, "micro_batch_size": 1, "lora": cases.LORA},
    "ppo, one update, each model held in its own way": {
        **cases.ONE_UPDATE,
        "micro_batch_size": None,
        "engine": {"zero_stage": 0, "zero_persistence_threshold": 0, "offload": "parameters"},
        "roles": _ROLES,
        "steps": 3,
    },
    "ppo, raw text": {"micro_batch_size": 1, **cases.PTX},
    "ppo, raw text, sharded": {"engine": _SHARDED, **cases.PTX},
    "ppo, RLOO": {**_WITHOUT_CRITIC, "estimator": "rloo", "completions_per_prompt": 2, "engine": _SHARDED},
    "ppo, GRPO": {**_WITHOUT_CRITIC, "estimator": "grpo", "completions_per_prompt": 4},
    "ppo, REINFORCE++": {**_WITHOUT_CRITIC, "estimator": "reinforce++", "minibatch_size": None},
}
"""Settings of a stage, named first, that differ from those of `cases`."""


RESUMED = "ppo, with all that it may be told"
"""The run that is also stopped after its first step and resumed."""


def main(folder: str, names: Sequence[str]) -> None:
    with distributed.start_process_group(accelerators.select("cpu", environ={})) as accelerator:
        rank = distributed.world().rank
        for name in names:
            stage = name.partition(",")[0]
            config, output = cases.configuration(stage, **CHANGES[name]), Path(folder) / name
            if stage == "ppo":
                models = cases.Models.build(lora=bool(config.lora.rank))
                outcome = real.reinforced(accelerator, config, models, ROWS[stage], output)
            elif stage == "distill":
                outcome = real.distilled(accelerator, config, *distill_models(), ROWS[stage], output)
            else:
                outcome = real.supervised(stage, accelerator, config, model(stage), ROWS[stage], output)
            torch.save(outcome, Path(folder) / f"{name}, rank {rank}")
            if name == RESUMED:
                resumed = output.with_name("resumed")
                with contextlib.suppress(real.StopError):
                    real.reinforced(accelerator, config, models, ROWS[stage], resumed, stop_before=1)
                accelerator.seed(0)  # a generator that is not restored must not stand where the checkpoint's does
                outcome = real.reinforced(accelerator, config, models, ROWS[stage], resumed)
                torch.save(outcome, Path(folder) / f"resumed, rank {rank}")
        config = cases.configuration("ppo", micro_batch_size=1, eval_rows=len(heldout()))
        rows = StageData(cases.data("ppo", ROWS["ppo"]).train, heldout(), [])
        evaluation = real.evaluated(accelerator, config, cases.Models.build(), rows, Path(folder) / "evaluated")
        torch.save(evaluation, Path(folder) / f"evaluated, rank {rank}")


def heldout() -> list[Any]:
    """Return more rows than one batch of 8; the second rank's prompts of the first batch are those of the first."""
    rows = cases.examples("ppo", 11)
    same = [replace(row, prompt_ids=first.prompt_ids) for first, row in zip(rows[:4], rows[4:8])]
    return [*rows[:4], *same, *rows[8:]]


def distill_models() -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return a student and a teacher."""
    return cases.language_model(1), cases.language_model(2)


def model(stage: str) -> torch.nn.Module:
    return cases.language_model(1) if stage in ("sft", "dpo") else cases.scalar_model(1)
