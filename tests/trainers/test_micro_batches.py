"""PPO with rows of like length together and padding cut off: the numbers and the weights are those without."""

import pytest
import torch

from rlhf.trainers.ppo.experience import MicroBatcher
from rlhf.trainers.ppo.trainer import PPOTrainer
from tests.helpers import llama
from tests.in_process import build_ppo, ppo_models
from tests.trainers.test_ppo import scalar

SETTINGS = {"batch_size": 6, "micro_batch_size": 2, "kl_target": None, "kl_coef": 0.1}


@pytest.fixture
def build(accelerator, recipe, tokenizer, tmp_path):
    def ppo(**changes) -> PPOTrainer:
        size = len(tokenizer)
        models = ppo_models(llama(size), llama(size, seed=5), scalar(llama(size)), scalar(llama(size)))
        changes = {"engine": {"shapes": "dynamic"}, **SETTINGS, **changes}
        built = build_ppo(accelerator, tmp_path, recipe, tokenizer, models, **changes)
        built.decoder.eos_ids = torch.arange(0, size, 6)  # completions of all lengths
        return built

    return ppo


@pytest.mark.parametrize(
    "changes",
    [
        {"ppo_epochs": 1, "minibatch_size": None},
        {"ppo_epochs": 2, "minibatch_size": None},
        {"ppo_epochs": 1, "minibatch_size": 4, "batch_size": 8, "entropy_coef": 0.01},
    ],
    ids=["reused", "two epochs", "minibatches"],
)
def test_packed_or_not_ppo_learns_the_same(build, monkeypatch, changes):
    packed, whole = build(**changes), build(**changes)
    runs, widths = [], []
    for ppo in (packed, whole):
        if ppo is whole:
            monkeypatch.setattr(MicroBatcher, "lengths", lambda *_: None)
        handle = ppo.reward.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
        ppo.decoder.random.manual_seed(1)
        runs.append([ppo.step(index) for index in range(2)])
        handle.remove()
    assert len(set(packed.experience.action_mask.sum(1).tolist())) > 1
    half = len(widths) // 2
    assert sum(widths[:half]) < sum(widths[half:]), "nothing was cut off"
    for first, second in zip(*runs):
        assert first.pop("padding_share") < second.pop("padding_share")
        assert first == pytest.approx(second, rel=2e-4, abs=2e-6)
    for name, engine in packed.engines.items():
        for actual, expected in zip(engine.module.parameters(), whole.engines[name].module.parameters()):
            torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)


def test_padding_share_is_what_is_computed_without_a_token(build):
    ppo, computed = build(ppo_epochs=1, minibatch_size=None), []
    ppo.reward.register_forward_pre_hook(lambda _, args: computed.append(args[0].numel()))
    share = ppo.step(1)["padding_share"]  # the first rollout is scored twice
    tokens = int(ppo.experience.attention_mask.sum())
    assert share == pytest.approx(1 - tokens / sum(computed)) and 0 < share < 1
