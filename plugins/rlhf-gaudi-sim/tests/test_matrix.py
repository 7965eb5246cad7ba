"""The trainers' matrix with BLOOM, two ranks and hccl: all points train, compile nothing late, and leave what loads.

tests/matrix says what a point is, and has the same on a CPU.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import proof
import pytest
import torch
from conftest import Run
from points import POINTS, STEPS, Point
from test_families import FAMILIES
from two_ranks import of_plain_transformers

ROOT = Path(__file__).parents[3]
OPTIMIZER = {"learning_rate": 1e-2, "warmup": 0}
RANK = """
import os, sys
sys.path.append({root!r})
from collections import Counter
import gaudi_sim
gaudi_sim.install()
from habana_frameworks.torch.hpu.graphs import HPUGraph
from gaudi_sim.build import load
from tests.matrix import two_ranks

counts = Counter()

def counted(name, method):
    def call(self, *arguments):
        counts[name] += 1
        return method(self, *arguments)
    return call

def watch(recipe):
    counts.clear()
    load().reset()  # no graph is known from the run before
    strict = recipe["engine.offload"] == "none"
    os.environ["RLHF_GAUDI_SIM_STRICT"] = str(int(strict))
    return lambda: {{"counts": dict(counts), "report": gaudi_sim.report()}}

HPUGraph.capture_end = counted("recorded", HPUGraph.capture_end)
HPUGraph.replay = counted("replayed", HPUGraph.replay)
two_ranks.main({folder!r}, "hpu", watch)
"""
LAUNCH = """
import sys
from rlhf.launchers import local
outcome = local.spawn_ranks(2, [sys.executable, "-c", sys.argv[1]])
sys.exit(outcome.report() if outcome else 0)
"""
# The recordings are those of lazy mode, which refuses ZeRO 3.
EACH = [replace(point, precision="bf16") for point in POINTS if point.precision == "fp32" and point.zero_stage < 3]
OFTEN = Point(2, recorded=True, offloaded=True, lora=False, precision="bf16")  # DeepSpeed-Chat leaves it out

LOSSES = ("policy_loss", "value_loss", "reward", "kl", "entropy", "response_length")


def as_written(point: Point) -> Point:
    """The same without recordings."""
    return replace(point, recorded=False)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, python: Run, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of the points whose tests were selected, and those that they are compared with, on one pair of ranks."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoTokenizer

    base = tmp_path_factory.mktemp("matrix")
    architecture, sizes, _ = FAMILIES["BLOOM"]
    tokenizer = AutoTokenizer.from_pretrained(recipe.parent / "model")
    special = {"eos_token_id": proof.EOS, "pad_token_id": proof.PAD, "bos_token_id": None}
    config = CONFIG_MAPPING[architecture](vocab_size=len(tokenizer), **special, **sizes)
    torch.manual_seed(0)
    MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).save_pretrained(base / "tiny")
    tokenizer.save_pretrained(base / "tiny")
    short = {"batch_size": 4, "max_steps": 2, "eval_rows": 2, "optimizer": OPTIMIZER}
    ppo = {"batch_size": 8, "steps": STEPS, "checkpoint_every": 0}
    start = json.loads(recipe.read_text()) | {
        "model": {"path": str(base / "tiny")},
        "engine": {"zero_persistence_threshold": 0, "shapes": "static"},
        "sft": short,
        "reward": short,
        "ppo": ppo | {"optimizer": OPTIMIZER, "critic_optimizer": OPTIMIZER},
    }

    selected = [item.callspec.params["point"] for item in request.session.items if item.path == request.path]
    needed = {variant: None for point in selected for variant in (point, as_written(point), point.plain)}
    asked = {point.name: start | point.settings for point in needed}
    (base / "asked.json").write_text(json.dumps({"start": start, "runs": asked}))
    done = python("-c", LAUNCH, RANK.format(root=str(ROOT), folder=str(base)), strict=False, loaded=True, seconds=2000)
    assert done.returncode == 0, done.stderr[-2000:]
    return base


@pytest.mark.parametrize(
    "point",
    [pytest.param(point, id=point.name, marks=[] if point == OFTEN else [pytest.mark.slow]) for point in EACH],
)
class TestPoint:
    def test_it_trains_and_begins_as_zero_0(self, runs: Path, point: Point) -> None:
        folder = runs / point.name
        steps = torch.load(folder / "found")["steps"]
        assert len(steps) == STEPS
        assert all(math.isfinite(value) for numbers in steps for value in numbers.values())
        expected = torch.load(folder.with_name(point.plain.name) / "found")["steps"][0]
        assert {key: steps[0][key] for key in LOSSES} == pytest.approx({key: expected[key] for key in LOSSES}, abs=1e-3)

    def test_recordings_change_no_number(self, runs: Path, point: Point) -> None:
        points = point, as_written(point)
        steps, expected = (torch.load(runs / variant.name / "found")["steps"] for variant in points)
        assert [[step[key] for key in LOSSES] for step in steps] == [[step[key] for key in LOSSES] for step in expected]

    def test_rollouts_are_recorded_and_nothing_is_compiled_late(self, runs: Path, point: Point) -> None:
        folder = runs / point.name
        outcome = torch.load(folder / "found")
        counts = outcome["counts"]
        if point.recorded:
            tried = 1  # the backend finds out first whether operators run while they are recorded
            assert counts["recorded"] - tried == 1
            assert counts["replayed"] > STEPS
        else:
            assert counts == {}
        run = proof.Run(folder, outcome["report"])
        proof.assert_nothing_compiled_late(run, "ppo")
        proof.assert_no_mixed_devices(run)

    def test_plain_transformers_makes_the_same_of_what_it_leaves(self, runs: Path, point: Point) -> None:
        """In float32; what training has moved is far more than bf16 rounds."""
        folder = runs / point.name
        for role, expected in torch.load(folder / "found")["ends"].items():
            saved = folder / "ppo" / {"actor": "model"}.get(role, role)
            torch.testing.assert_close(of_plain_transformers(saved, role), expected, atol=2e-2, rtol=2e-2)
            before = folder.with_name("start") / {"actor": "sft", "critic": "reward"}[role] / "model"
            assert (of_plain_transformers(before, role) - expected).abs().max() > 0.1
