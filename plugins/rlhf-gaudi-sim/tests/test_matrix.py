"""The trainers' matrix with BLOOM, two ranks and hccl: all points train, compile nothing late, and leave what loads.

tests/matrix says what a point is, and has the same on a CPU. Here each point runs in both modes, but for ZeRO 3, which
lazy mode refuses. Recorded rollouts are HPU graphs in lazy mode, and compiled by torch.compile in eager mode.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
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
import torch
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
    torch._dynamo.reset()  # nor one of torch.compile
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
CASES = [
    (mode, replace(point, precision="bf16"))
    for mode in ("lazy", "eager")
    for point in POINTS
    if (mode, point.zero_stage) != ("lazy", 3)
]
# DeepSpeed-Chat leaves this point out. In eager mode torch.compile takes a minute for the runs of a point.
OFTEN = "lazy", Point(2, recorded=True, offloaded=True, lora=False, precision="bf16")

LOSSES = ("policy_loss", "value_loss", "reward", "kl", "entropy", "response_length")


def as_written(point: Point) -> Point:
    """The same without recordings."""
    return replace(point, recorded=False)


@pytest.fixture(scope="module")
def run_points(
    request: pytest.FixtureRequest, python: Run, recipe: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Return a function of the mode: the folder of its runs, which the first call makes on one pair of ranks.

    They are those of the points whose tests were selected, and those that they are compared with.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoTokenizer

    model = tmp_path_factory.mktemp("model")
    architecture, sizes, _ = FAMILIES["BLOOM"]
    tokenizer = AutoTokenizer.from_pretrained(recipe.parent / "model")
    special = {"eos_token_id": proof.EOS, "pad_token_id": proof.PAD, "bos_token_id": None}
    config = CONFIG_MAPPING[architecture](vocab_size=len(tokenizer), **special, **sizes)
    torch.manual_seed(0)
    MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).save_pretrained(model)
    tokenizer.save_pretrained(model)
    short = {"batch_size": 4, "max_steps": 2, "eval_rows": 2, "optimizer": OPTIMIZER}
    ppo = {"batch_size": 8, "steps": STEPS, "checkpoint_every": 0}
    start = json.loads(recipe.read_text()) | {
        "model": {"path": str(model)},
        "engine": {"zero_persistence_threshold": 0, "shapes": "static"},
        "sft": short,
        "reward": short,
        "ppo": ppo | {"optimizer": OPTIMIZER, "critic_optimizer": OPTIMIZER},
    }

    @cache
    def run(mode: str) -> Path:
        base = tmp_path_factory.mktemp(mode)
        cases = [item.callspec.params for item in request.session.items if item.path == request.path]
        selected = [case["point"] for case in cases if case["mode"] == mode]
        needed = {variant: None for point in selected for variant in (point, as_written(point), point.plain)}
        asked = {point.name: start | point.settings for point in needed}
        (base / "asked.json").write_text(json.dumps({"start": start, "runs": asked}))
        command = ("-c", LAUNCH, RANK.format(root=str(ROOT), folder=str(base)))
        done = python(*command, strict=False, eager=mode == "eager", loaded=True, seconds=2000)
        assert done.returncode == 0, done.stderr[-2000:]
        return base

    return run


@pytest.fixture
def runs(run_points: Callable[[str], Path], mode: str) -> Path:
    return run_points(mode)


@pytest.mark.parametrize(
    ("mode", "point"),
    [
        pytest.param(mode, point, id=f"{mode}-{point.name}", marks=[] if (mode, point) == OFTEN else [pytest.mark.slow])
        for mode, point in CASES
    ],
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

    def test_rollouts_are_recorded_and_nothing_is_compiled_late(self, runs: Path, mode: str, point: Point) -> None:
        folder = runs / point.name
        outcome = torch.load(folder / "found")
        counts, run = outcome["counts"], proof.Run(folder, outcome["report"])
        if mode == "eager":
            assert counts == {}
            # A rollout has one shape and one window.
            assert len([line for line in proof.compiled_lines(run) if "rlhf/generation/" in line]) == point.recorded
            proof.assert_the_first_step_compiles_everything(run, "ppo")
        else:
            if point.recorded:
                tried = 1  # the backend finds out first whether operators run while they are recorded
                assert counts["recorded"] - tried == 1
                assert counts["replayed"] > STEPS
            else:
                assert counts == {}
            proof.assert_nothing_compiled_late(run, "ppo")
        proof.assert_no_mixed_devices(run)

    def test_layers_run_uncompiled_at_zero_3_alone_which_is_said(self, runs: Path, mode: str, point: Point) -> None:
        folder = runs / point.name
        run = proof.Run(folder, torch.load(folder / "found")["report"])
        proof.assert_fallbacks(run, "ppo", ["BloomBlock"] if point.zero_stage == 3 else [])
        if mode == "eager":
            layers = [line for line in proof.compiled_lines(run, "ppo") if "rlhf/generation/" not in line]
            assert bool(layers) == (point.zero_stage < 3)

    def test_plain_transformers_makes_the_same_of_what_it_leaves(self, runs: Path, point: Point) -> None:
        """In float32; what training has moved is far more than bf16 rounds."""
        folder = runs / point.name
        for role, expected in torch.load(folder / "found")["ends"].items():
            saved = folder / "ppo" / {"actor": "model"}.get(role, role)
            torch.testing.assert_close(of_plain_transformers(saved, role), expected, atol=2e-2, rtol=2e-2)
            before = folder.with_name("start") / {"actor": "sft", "critic": "reward"}[role] / "model"
            assert (of_plain_transformers(before, role) - expected).abs().max() > 0.1
