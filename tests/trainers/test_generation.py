"""PPO learns and measures the same however its rollouts are cut, and wherever their weights are."""

import json
from pathlib import Path

import pytest

from tests.helpers import assert_same_weights, models_of, sets


@pytest.fixture(scope="module")
def ppo_on_two_ranks(rlhf, finished_run, tmp_path_factory):
    """PPO of the finished run's models, at ZeRO-3 on two ranks: settings -> its folder and what was printed."""

    def run(name, *settings: str) -> tuple[Path, str]:
        output = tmp_path_factory.mktemp(name) / "run"
        changes = ("engine.zero_stage=3", "ppo.eval_rows=5", "ppo.steps=2", "data.max_completion_length=8")
        keys = sets(*models_of(finished_run), *changes, *settings)
        return output, rlhf("ppo", "--output", output, "--ranks", 2, *keys).stdout

    return run


@pytest.fixture(scope="module")
def whole(ppo_on_two_ranks):
    output, log = ppo_on_two_ranks("whole", "ppo.generation_weights=whole")
    assert "in rollouts" not in log
    return output


@pytest.mark.parametrize(
    ("mode", "rows", "words"),
    [
        ("tensor_parallel", 1, "actor: in rollouts each of 2 ranks keeps its part of every layer (tensor_parallel)"),
        ("layerwise", 2, "actor: in rollouts each layer is gathered"),
    ],
)
@pytest.mark.slow  # tests/generation/test_two_ranks.py compares the tokens
def test_a_run_is_the_same_however_its_rollouts_are_made(ppo_on_two_ranks, whole, mode, rows, words):
    """The five held-out prompts do not fill the last part of either rank."""
    output, log = ppo_on_two_ranks(
        mode,
        f"ppo.generation_weights={mode}",
        "ppo.tensor_parallel=" + ("2" if mode == "tensor_parallel" else ""),
        f"ppo.generation_batch_size={rows}",
    )
    assert words in " ".join(log.split())
    actual, expected = (json.loads((folder / "ppo" / "stage.json").read_text()) for folder in (output, whole))
    assert actual["samples"] == expected["samples"]
    for when in ("before", "after"):
        assert actual[when] == pytest.approx(expected[when], abs=1e-4)
    assert_same_weights(output / "ppo" / "model", whole / "ppo" / "model", atol=2e-5)
