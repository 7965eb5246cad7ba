"""Learning rates over the steps of a stage, and which parameters decay."""

import pytest
import torch
from torch import nn

from rlhf.config.schema import LoraConfig, ModelConfig, OptimizerConfig, build_config
from rlhf.engine.deepspeed_config import build_deepspeed_config
from rlhf.engine.engine import TrainingEngine, compute_adapter_factor, compute_learning_rate, group_parameters
from rlhf.engine.fp32_weights import list_weights
from rlhf.engine.fragments import OptimizerTensors
from rlhf.models.loading import load_causal_lm
from rlhf.models.lora import add_adapters
from rlhf.models.weight_loading import is_sharded, place_in_memory, place_sharded
from rlhf.roles.roles import model_placements
from tests.engine.engines import CONSTANT, IDS, build, scaled, weights_of
from tests.helpers import build_tokenizer, llama
from tests.in_process import make_placement


def rates(**settings):
    config = OptimizerConfig(learning_rate=1.0, **settings)
    return [compute_learning_rate(config, step, 100) for step in range(100)]


def test_rate_rises_over_the_warm_up_and_then_falls():
    warming = rates(schedule="linear", warmup=0.1, min_lr_ratio=0.0)
    assert 0 < warming[0] < warming[5] < warming[10] == 1.0
    assert warming[10] > warming[50] > warming[98] > warming[99] == 0.0
    assert rates(warmup=0.5)[0] > 0


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize("warmup", [0.0, 0.3])
def test_last_step_has_the_rate_of_min_lr_ratio(schedule, warmup):
    schedule_rates = rates(schedule=schedule, warmup=warmup, min_lr_ratio=0.2)
    assert max(schedule_rates) == 1.0 and schedule_rates[-1] == pytest.approx(0.2) and schedule_rates[-2] > 0.2


def test_the_cosine_is_half_way_down_in_the_middle():
    """101 steps without warm-up: step 50 is the middle, and 25 is at (1 + cos(pi / 4)) / 2."""
    config = OptimizerConfig(learning_rate=2.0, warmup=0.0, min_lr_ratio=0.0)
    rates_of_steps = [compute_learning_rate(config, step, 101) for step in (0, 25, 50, 100)]
    assert rates_of_steps == pytest.approx([2.0, 1 + 0.5**0.5, 1.0, 0.0])


def test_single_step_and_constant_schedule_are_at_the_peak():
    assert compute_learning_rate(OptimizerConfig(learning_rate=1.0, warmup=0.0), 0, 1) == 1.0
    assert set(rates(schedule="constant", warmup=0.0)) == {1.0}


def test_a_warm_up_is_a_part_of_the_steps_or_a_number_of_them():
    assert rates(warmup=0.1) == rates(warmup=10) != rates(warmup=1)
    assert rates(warmup=1)[:2] == pytest.approx([0.5, 1.0])


def test_wsd_is_stable_and_then_falls_in_a_straight_line():
    """100 steps, 4 of warm-up, the last 20 fall: step 79 is the last at the peak, step 89 is half way down."""
    rates_of_steps = rates(schedule="wsd", warmup=4, decay=0.2, min_lr_ratio=0.1)
    assert rates_of_steps[3] < 1.0 and set(rates_of_steps[4:80]) == {1.0} and rates_of_steps[80] < 1.0
    assert (rates_of_steps[89], rates_of_steps[99]) == pytest.approx((0.55, 0.1))


def test_biases_norms_and_frozen_weights_do_not_decay():
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    model[2].requires_grad_(False)
    decayed, plain = group_parameters(model, 0.1)
    assert decayed["weight_decay"] == 0.1 and [p.shape for p in decayed["params"]] == [(3, 2)]
    assert plain["weight_decay"] == 0.0 and len(plain["params"]) == 3


def test_sharded_weights_are_grouped_as_whole_ones(accelerator, tmp_path):
    """A model loaded in shards has flat, empty parameters; DeepSpeed gives whole models' their shapes later."""
    llama(60).save_pretrained(tmp_path)
    sharded = build_deepspeed_config(make_placement(3), accelerator, accelerator.precision("fp32"), 1, 1)
    groups = []
    for put in (place_in_memory(torch.float32), place_sharded(sharded, torch.float32)):
        where = {"attention": "eager", "path": str(tmp_path), "put": put}
        model = load_causal_lm(ModelConfig(), build_tokenizer(), **where)
        assert put.__qualname__.startswith("place_sharded") == all(map(is_sharded, model.parameters()))
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        group_names = [
            {names[id(parameter)] for parameter in group["params"]} for group in group_parameters(model, 0.1)
        ]
        groups.append(group_names)
    assert groups[0] == groups[1] and len(groups[0]) == 2


def test_adapters_step_at_a_rate_of_their_own():
    """AdamW's first step is the rate in the direction of the gradient's sign, if eps and weight decay are nothing."""
    model = adapted()
    optimizer = OptimizerConfig(learning_rate=1e-3, warmup=0.0, schedule="constant", weight_decay=0.0, eps=1e-12)
    for lora, factor in ((LoraConfig(), 10.0), (LoraConfig(learning_rate=3e-3), 3.0)):
        groups = group_parameters(model, 0.0, compute_adapter_factor(optimizer, lora))
        steps = torch.optim.AdamW(groups, lr=0.0, eps=1e-12)
        for group in steps.param_groups:
            group["lr"] = group["factor"] * compute_learning_rate(optimizer, 0, 1)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
        steps.step()
        moved = {name: (before[name] - parameter).detach() for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters():
            expected = 0.0 if not parameter.requires_grad else factor * 1e-3 if ".lora_" in name else 1e-3
            torch.testing.assert_close(moved[name], torch.full_like(moved[name], expected), atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_engine_steps_adapters_and_head_by_recorded_rates(accelerator, zero_stage):
    """As above, through DeepSpeed, which makes other groups."""
    config = build_config({"lora": {"rank": 2}, "engine": {"zero_stage": zero_stage}})
    engine = TrainingEngine(
        "test",
        adapted(),
        accelerator=accelerator,
        precision=accelerator.precision("fp32"),
        placement=model_placements(config, "reward")["reward"],
        optimizer=OptimizerConfig(
            learning_rate=1e-3, warmup=0.5, schedule="linear", weight_decay=0.0, eps=1e-12, max_grad_norm=1e9
        ),
        total_steps=2,
        micro_batch_size=1,
        accumulation=1,
    )
    assert engine.rates == {"learning_rate": 5e-4, "lora_learning_rate": 5e-3}
    before = weights_of(engine)
    # lora_A has no gradient while lora_B is zero
    engine.step([torch.ones(1, 4)], lambda model, inputs: (model(inputs).sum(), {}))
    moved = {name: (before[name] - tensor).abs().max().item() for name, tensor in weights_of(engine).items()}
    assert moved["score.weight"] == pytest.approx(5e-4, rel=1e-3)
    assert moved["layer.lora_B.default.weight"] == pytest.approx(5e-3, rel=1e-3)


@pytest.mark.parametrize("most", [0.5, 3.0, 1e6])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_gradients_are_clipped_to_max_grad_norm_and_no_further(accelerator, zero_stage, precision, most):
    """DeepSpeed clips to a norm of 1 unless it is told otherwise. The first moment is a tenth of the gradient."""
    plain = llama(60)
    scaled(20)(plain, IDS)[0].backward()
    norm = torch.stack([parameter.grad.norm() for parameter in plain.parameters()]).norm().item()
    assert norm > 2 * 3.0
    engine = build(accelerator, zero_stage, precision, optimizer=CONSTANT | {"max_grad_norm": most})
    engine.step([IDS], scaled(20))
    tensors = [OptimizerTensors(engine, index).numbers for index in range(len(list_weights(engine.optimizer)))]
    moment = torch.stack([numbers["exp_avg"].norm() for numbers in tensors]).norm().item()
    assert moment == pytest.approx(0.1 * min(norm, most), rel=1e-5 if precision == "fp32" else 0.02)


def adapted():
    """A layer with adapters, and a head."""

    class Model(nn.Module):
        base_model_prefix = "layer"

        def __init__(self):
            super().__init__()
            self.layer, self.score = nn.Linear(4, 3, bias=False), nn.Linear(3, 1, bias=False)

        @property
        def base_model(self):
            return self

        def get_input_embeddings(self):
            return None

        get_output_embeddings = get_input_embeddings

        def forward(self, inputs):
            return self.score(self.layer(inputs))

    torch.manual_seed(0)
    model = Model()
    add_adapters(model, LoraConfig(rank=2, target_modules=["layer"]), seed=0)
    return model
