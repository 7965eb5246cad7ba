"""Learning rates over the steps of a stage, and which parameters decay."""

import pytest
from torch import nn

from rlhf.config import OptimizerConfig
from rlhf.engine.optimizer import learning_rate, parameter_groups


def rates(**settings):
    config = OptimizerConfig(learning_rate=1.0, **settings)
    return [learning_rate(config, step, 100) for step in range(100)]


def test_the_rate_rises_over_the_warm_up_and_then_falls():
    found = rates(schedule="linear", warmup=0.1, min_lr_ratio=0.0)
    assert 0 < found[0] < found[5] < found[10] == 1.0
    assert found[10] > found[50] > found[98] > found[99] == 0.0


def test_no_step_has_a_rate_of_zero_at_its_start():
    assert rates(warmup=0.5)[0] > 0


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize("warmup", [0.0, 0.3])
def test_the_last_step_has_the_rate_that_min_lr_ratio_names(schedule, warmup):
    found = rates(schedule=schedule, warmup=warmup, min_lr_ratio=0.2)
    assert max(found) == 1.0 and found[-1] == pytest.approx(0.2) and found[-2] > 0.2


def test_the_cosine_is_half_way_down_in_the_middle():
    """101 steps without warm-up: step 50 is the middle, and 25 is at (1 + cos(pi / 4)) / 2."""
    config = OptimizerConfig(learning_rate=2.0, warmup=0.0, min_lr_ratio=0.0)
    found = [learning_rate(config, step, 101) for step in (0, 25, 50, 100)]
    assert found == pytest.approx([2.0, 1 + 0.5**0.5, 1.0, 0.0])


def test_a_single_step_is_taken_at_the_peak():
    assert learning_rate(OptimizerConfig(learning_rate=1.0, warmup=0.0), 0, 1) == 1.0


def test_a_constant_schedule_stays_at_its_peak():
    assert set(rates(schedule="constant", warmup=0.0)) == {1.0}


def test_biases_norms_and_frozen_weights_do_not_decay():
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    model[2].requires_grad_(False)
    decayed, plain = parameter_groups(model, 0.1)
    assert decayed["weight_decay"] == 0.1 and [p.shape for p in decayed["params"]] == [(3, 2)]
    assert plain["weight_decay"] == 0.0 and len(plain["params"]) == 3
