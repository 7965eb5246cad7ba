"""fp16: if the gradients of one engine overflow, no engine that steps with it steps, and only its loss scale falls."""

from __future__ import annotations

import itertools

import pytest
import torch

from rlhf.data.stage_dataset import StageData
from rlhf.engine.engine import synchronized_step
from rlhf.errors import DivergedError
from rlhf.trainers import loop
from rlhf.trainers.ppo.trainer import PPOTrainer
from tests.engine.engines import FP16, IDS, accepted_fp16, build, loss, masters, scaled, weights_of
from tests.helpers import llama
from tests.in_process import OPTIMIZER, StubTrainer, ppo_models, scalar_llama, stage_context
from tests.optimum import language

SCALE = 2.0**10
HUGE = scaled(1e6)


def state(engine):
    """Everything that a step changes."""
    inner = getattr(engine.engine.optimizer, "optimizer", engine.engine.optimizer)
    tensors = {f"master {name}": tensor for name, tensor in masters(engine).items()}
    tensors |= {f"weight {name}": tensor for name, tensor in weights_of(engine).items()}
    for index, values in enumerate(inner.state.values()):
        tensors |= {f"{name} {index}": value.clone() for name, value in values.items() if torch.is_tensor(value)}
    return tensors


def changed(before, engine):
    after = state(engine)
    assert before.keys() == after.keys()
    return {name.split()[0] for name, tensor in after.items() if not torch.equal(tensor, before[name])}


ALL = {"master", "weight", "exp_avg", "exp_avg_sq", "step"}


PLACES = [*((zero_stage, "none") for zero_stage in range(4)), *((zero_stage, "optimizer") for zero_stage in (1, 2, 3))]


@pytest.mark.parametrize("overflows", ["first", "second", "both"])
@pytest.mark.parametrize(("zero_stage", "offload"), PLACES)
def test_synchronized_step_is_taken_by_both_or_neither(accelerator, zero_stage, overflows, offload):
    with accepted_fp16() as precision:
        first, second = (build(accelerator, zero_stage, precision, offload=offload) for _ in range(2))
        synchronized_step([(first, [IDS], loss), (second, [IDS], loss)])
        before = state(first), state(second)
        losses = [HUGE if overflows in (name, "both") else loss for name in ("first", "second")]
        sums = synchronized_step([(first, [IDS], losses[0]), (second, [IDS], losses[1])])
        assert [part.read()["loss"] > 1e5 for part in sums] == [part is HUGE for part in losses]
        for engine, earlier, its_loss in zip((first, second), before, losses):
            assert changed(earlier, engine) == set()
            assert engine.loss_scale() == (SCALE / 2 if its_loss is HUGE else SCALE)
            assert (engine.skipped, engine.steps) == (1, 2)
        synchronized_step([(first, [IDS], loss), (second, [IDS], loss)])
        for engine, earlier in zip((first, second), before):
            assert changed(earlier, engine) == ALL
            assert (engine.skipped, engine.steps) == (1, 3)
        assert torch.isfinite(torch.tensor([first.grad_norm(), second.grad_norm()])).all()


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_steps_without_overflow_are_those_of_each_alone(accelerator, zero_stage):
    with accepted_fp16() as precision:
        together = [build(accelerator, zero_stage, precision) for _ in range(2)]
        alone = build(accelerator, zero_stage, precision)
        for _ in range(3):
            synchronized_step([(engine, [IDS], loss) for engine in together])
            alone.step([IDS], loss)
    for engine in together:
        assert changed(state(alone), engine) == set()
        assert engine.loss_scale() == alone.loss_scale() == SCALE and engine.skipped == 0
        assert engine.grad_norm() == alone.grad_norm()


class LowerFP16(FP16):
    def deepspeed_config(self):
        return {"fp16": super().deepspeed_config()["fp16"] | {"initial_scale_power": 9}}


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_step_after_overflow_equals_one_with_the_lower_scale(accelerator, zero_stage):
    with accepted_fp16() as precision:
        engine = build(accelerator, zero_stage, precision)
        engine.step([IDS], HUGE)
        assert (engine.skipped, engine.loss_scale()) == (1, SCALE / 2)
        lower = build(accelerator, zero_stage, LowerFP16(torch.float16, "fp16", "a test's", loss_scaling=True))
        for trained in (engine, lower):
            trained.step([IDS], loss)
    assert changed(state(lower), engine) == set()
    assert (engine.grad_norm(), engine.loss_scale()) == (lower.grad_norm(), lower.loss_scale())


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_overflow_at_the_lowest_loss_scale_ends_training(accelerator, tmp_path, zero_stage):
    """DeepSpeed raises a bare exception at ZeRO 1-3, and at ZeRO 0 would skip each step from then on."""

    def step(index):
        return {"tokens": 1.0, "loss": engine.step([IDS], scaled(1e12)).read()["loss"]}

    with accepted_fp16() as precision:
        context = stage_context(accelerator, tmp_path, "ppo", {}, precision=precision)
        engine = build(accelerator, zero_stage, precision)
        trainer = StubTrainer(context.config.ppo, step, total_steps=11, unit="tokens", engines={"actor": engine})

        def take(index):
            with loop.measure_step(trainer, context, index) as metrics:
                metrics |= trainer.step(index)

        for index in range(10):  # 2^10 to 1
            take(index)
        assert (engine.loss_scale(), engine.skipped) == (1, 10)
        with pytest.raises(DivergedError, match="actor overflow fp16 at the lowest loss scale at step 11"):
            take(10)


def test_without_loss_scaling_one_model_has_gradients_at_a_time(accelerator, tmp_path):
    """Only fp16 needs the memory of two models' gradients."""
    ppo, are_zero = build_ppo(accelerator, tmp_path, 0), []
    critic_loss = ppo._critic_loss

    def looking(*arguments, **options):
        gradients = [parameter.grad for parameter in ppo.actor.module.parameters()]
        are_zero.append(all(gradient is None or not gradient.any() for gradient in gradients))
        return critic_loss(*arguments, **options)

    ppo._critic_loss = looking
    ppo.step(0)
    assert are_zero == [True]


def build_ppo(accelerator, folder, zero_stage, precision=None):
    values = {
        "engine": {"zero_stage": zero_stage},
        "data": {"max_prompt_length": language.PROMPT_COLUMNS, "max_completion_length": language.LENGTH},
        "ppo": {"batch_size": 4, "score_clip": 1e6, "optimizer": OPTIMIZER, "critic_optimizer": OPTIMIZER, "ema": 0.5},
    }
    context = stage_context(accelerator, folder, "ppo", values, precision=precision)
    data = StageData([language.prompt(1), language.prompt(2)], [], [])
    actor, reference = (llama(4, eos_token_id=0, num_hidden_layers=1) for _ in range(2))
    critic, rewards = (scalar_llama(4, eos_token_id=0, num_hidden_layers=1) for _ in range(2))
    rewards.score.weight.data *= 5e4
    return PPOTrainer(context, ppo_models(actor, reference, critic, rewards), language.tokenizer(), data)


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_ppo_policy_takes_no_step_if_its_critic_overflows(accelerator, tmp_path, zero_stage):
    """Rewards of thousands are whitened for the policy, and not for the critic."""
    with accepted_fp16() as precision:
        ppo = build_ppo(accelerator, tmp_path, zero_stage, precision)
        before = state(ppo.actor), state(ppo.critic)
        average = [tensor.clone() for tensor in ppo.actor.ema.tensors]
        ppo.step(0)
    for engine, earlier in zip((ppo.actor, ppo.critic), before):
        assert engine.skipped == 1 and changed(earlier, engine) == set()
    assert (ppo.actor.loss_scale(), ppo.critic.loss_scale()) == (SCALE, SCALE / 2)
    assert all(torch.equal(*pair) for pair in zip(ppo.actor.ema.tensors, average))


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_loss_scale_doubles_after_engine_loss_scale_window(accelerator, zero_stage):
    with accepted_fp16() as precision:
        engine = build(accelerator, zero_stage, precision, loss_scale_window=3)
        scales = []
        for _ in range(8):
            scales.append(engine.loss_scale())
            engine.step([IDS], loss)
    risen = [place for place, (now, later) in enumerate(itertools.pairwise(scales)) if later == 2 * now]
    assert len(risen) == 2 and risen[1] - risen[0] == 3 and scales[-1] == 4 * SCALE, scales
