"""All points of the matrix train on two ranks, begin as ZeRO 0 does, and leave an actor and a critic that load."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families.table import BY_NAME
from tests.forks import Forks
from tests.helpers import mark_slow
from tests.matrix import rehearsal
from tests.matrix.points import OFTEN, POINTS, STEPS, Point
from tests.matrix.two_ranks import of_plain_transformers

OPTIMIZER = {"learning_rate": 1e-3, "warmup": 0}
# What sums over shards round. In fp16 that soon draws another token: there the first step is compared, in fp32 all.
LOSSES = {"fp32": 2e-6, "fp16": 1e-4}
NUMBERS = {"fp32": 1e-5, "fp16": 5e-3}


EACH = mark_slow({point.name: point for point in POINTS}, except_for=OFTEN)


@pytest.fixture(scope="module")
def folder(
    request: pytest.FixtureRequest,
    forks: Forks,
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: Any,
    data_file: Path,
) -> Path:
    """The runs of the points whose tests were selected, and those that they are compared with."""
    from transformers import OPTForCausalLM

    base = tmp_path_factory.mktemp("matrix")
    own = [item for item in request.session.items if item.path == request.path]
    selected = [item.callspec.params["point"] for item in own if hasattr(item, "callspec")]
    points = list(dict.fromkeys([*(point.plain for point in selected), *selected]))

    special = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    torch.manual_seed(0)
    model = OPTForCausalLM(BY_NAME["OPT"].configuration(vocab_size=len(tokenizer), **special))
    model.save_pretrained(base / "model")
    tokenizer.save_pretrained(base / "model")
    short = {"batch_size": 4, "max_steps": 3, "eval_rows": 4, "optimizer": OPTIMIZER}
    start = {
        "precision": "fp32",
        "model": {"path": str(base / "model")},
        "data": {
            "datasets": [{"path": str(data_file)}],
            "max_prompt_length": 16,
            "max_completion_length": 8,
            "heldout_fraction": 0.2,
        },
        "engine": {"zero_persistence_threshold": 0, "shapes": "static", "timeout": 60},
        "sft": short,
        "reward": short,
        "ppo": {
            "batch_size": 8,
            "minibatch_size": 4,
            "steps": STEPS,
            "checkpoint_every": 0,
            "optimizer": OPTIMIZER,
            "critic_optimizer": OPTIMIZER,
        },
    }
    runs = {point.name: start | {"engine": start["engine"]} | point.settings for point in points}
    (base / "asked.json").write_text(json.dumps({"start": start, "runs": runs}))
    plugin = rehearsal.install(base / "site")
    main = f"two_ranks.main({str(base)!r}, 'rehearsal', rehearsal.watch)"
    variables = {"PYTHONPATH": str(base / "site"), "RLHF_PLUGINS": plugin}
    forks.ranks(2, f"from tests.matrix import rehearsal, two_ranks; {main}", environment=variables)
    return base


@pytest.fixture
def load(folder: Path, point: Point) -> Callable[[Point], dict[str, Any]]:
    return lambda asked: torch.load(folder / asked.name / "found")


@pytest.mark.parametrize("point", EACH)
def test_it_trains_without_overflow(load: Any, point: Point) -> None:
    steps = load(point)["steps"]
    assert len(steps) == STEPS
    for numbers in steps:
        assert numbers.get("skipped_steps") == (0 if point.precision == "fp16" else None)  # recorded with a scale only
        assert all(math.isfinite(value) for value in numbers.values()), numbers
        assert numbers["grad_norm"] > 0 and numbers["critic_grad_norm"] > 0


@pytest.mark.parametrize("point", EACH)
def test_its_losses_are_those_of_zero_0(load: Any, point: Point) -> None:
    compared = slice(STEPS if point.precision == "fp32" else 1)
    actual, plain = (load(compared_point)["steps"][compared] for compared_point in (point, point.plain))
    for numbers, expected in zip(actual, plain, strict=True):
        for key in ("policy_loss", "value_loss", "reward", "kl", "entropy", "response_length"):
            assert numbers[key] == pytest.approx(expected[key], abs=LOSSES[point.precision]), key


@pytest.mark.parametrize("point", EACH)
def test_rollouts_are_recorded_where_that_is_not_turned_off(folder: Path, load: Any, point: Point) -> None:
    counts = load(point)["counts"]
    run = json.loads((folder / point.name / "run.json").read_text())
    capability = run["accelerator"]["capabilities"]["graph_capture"]
    if point.recorded:
        assert counts["recorded"] == (STEPS if point.zero_stage == 3 else 1) and counts["replayed"] > STEPS
        assert capability["implementation"] == "tape"
    else:
        assert counts == {}
        assert capability == {"ok": False, "reason": "none was chosen", "implementation": ""}


@pytest.mark.parametrize("point", EACH)
def test_plain_transformers_makes_the_same_of_what_it_leaves(folder: Path, load: Any, point: Point) -> None:
    """Each row alone, in float32; what training has moved is far more than the two may differ by."""
    for role, expected in load(point)["ends"].items():
        saved = folder / point.name / "ppo" / {"actor": "model"}.get(role, role)
        tolerance = NUMBERS[point.precision]
        torch.testing.assert_close(of_plain_transformers(saved, role), expected, atol=tolerance, rtol=tolerance)
        before = folder / "start" / {"actor": "sft", "critic": "reward"}[role] / "model"
        assert (of_plain_transformers(before, role) - expected).abs().max() > 4 * tolerance
