"""Level `learning` on real steps: the CPU has the golden numbers, and typical faults are named by their phase."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.forks import Forks

PLANTED = """
import json, sys
from pathlib import Path
from unittest.mock import patch

import torch

from rlhf.certify import fixed_state

report, folder, stage, precision, steps, fault = json.loads(sys.argv[1])
fixed_state.write_state(Path(folder))
with fixed_state.open_stage("cpu", Path(folder), stage, precision) as side:
    from rlhf.certify.verdicts import compare_steps
    from rlhf.engine import deepspeed_patches as patches
    from rlhf.engine.engine import TrainingEngine
    from rlhf.trainers.ppo import trainer as ppo

    trainer = side._trainer
    engine = next(iter(trainer.engines.values()))
    rate = TrainingEngine.scheduled_rate.fget

    def without_mask(module, args, kwargs):  # of decoding steps
        return args, {key: value for key, value in kwargs.items() if key != "attention_mask" or value.dim() == 4}

    def transpose():
        weight = engine.module.model.layers[0].self_attn.o_proj.weight
        weight.data = weight.data.T.contiguous()

    def round_gradients():
        for parameter in engine.module.parameters():
            parameter.register_hook(lambda gradient: gradient.bfloat16().to(gradient.dtype))

    faults = {
        "none": lambda: None,
        "mask": lambda: engine.module.model.register_forward_pre_hook(without_mask, with_kwargs=True),
        "whitening": lambda: patch.object(ppo, "whiten", lambda advantages, mask, all_sum: advantages).start(),
        "rate": lambda: patch.object(
            TrainingEngine, "scheduled_rate", property(lambda self: 1.1 * rate(self))).start(),
        "transposed": transpose,
        "rounding": round_gradients,
        "scale": lambda: patch.object(patches, "missing_loss_scale", lambda *args, **options: 1.05).start(),
    }
    faults[fault]()
    facts = compare_steps(side, stage, precision, steps)
Path(report).write_text(json.dumps(facts))
"""


def take_steps(forks: Forks, folder: Path, stage: str, precision: str, steps: int, fault: str = "none") -> Any:
    report = folder / "report.json"
    arguments = json.dumps([str(report), str(folder / "state"), stage, precision, steps, fault])
    done = forks.python("-c", PLANTED, arguments, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(report.read_text())


@pytest.mark.parametrize(("stage", "steps"), [("sft", 10), ("reward", 10), ("dpo", 10), ("ppo", 2)])
def test_cpu_has_the_golden_numbers(forks: Forks, tmp_path: Path, stage: str, steps: int) -> None:
    facts = take_steps(forks, tmp_path, stage, "fp32", steps)
    assert facts["failure"] == ""
    assert max(row["of band"] for row in facts["rows"]) <= 1
    assert facts["compared"] > 80


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "stage", "phase"),
    [
        ("mask", "ppo", "rollout"),
        ("whitening", "ppo", "advantages"),
        ("rate", "ppo", "update"),
        ("rate", "sft", "update"),
        ("transposed", "sft", "scores"),
        ("rounding", "sft", "gradients"),
        ("scale", "sft", "gradients"),
    ],
)
def test_fault_is_named_by_its_phase(forks: Forks, tmp_path: Path, fault: str, stage: str, phase: str) -> None:
    failure = take_steps(forks, tmp_path, stage, "fp32", 1, fault)["failure"]
    assert failure.startswith(f"{stage} in fp32: {phase} ")


@pytest.mark.slow
def test_a_hundred_steps_of_every_stage_pass_on_the_cpu(rlhf: Any, tmp_path: Path) -> None:
    done = rlhf("accelerators", "certify", "cpu", "--level", "learning", "--output", tmp_path / "c", recipe=None)
    report = json.loads((tmp_path / "c" / "certificate.json").read_text())
    golden, drawn, captured = report["checks"]
    assert done.returncode == 0 and report["passed"]
    worst = golden["facts"]["worst of each phase"]
    assert {row["stage"] for row in worst} == {"sft", "reward", "dpo", "ppo"}
    assert max(row["of band"] for row in worst + drawn["facts"]["rows"]) <= 1
    assert captured["facts"]["recorded by"].startswith("nothing: not offered by this backend")
