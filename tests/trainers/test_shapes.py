"""Under a static shape policy a PPO step runs the same operators on the same shapes, whatever is drawn."""

from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlhf.config.schema import ModelConfig
from rlhf.models.loading import load_causal_lm, load_scalar_head
from rlhf.trainers.ppo.trainer import PPOTrainer
from tests.in_process import build_ppo, ppo_models


class Operators(TorchDispatchMode):
    """The (operator, shapes and types of its tensors) that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self.seen.add((str(func), tuple((tuple(t.shape), t.dtype) for t in tensors)))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def build(accelerator, recipe, tokenizer, model_folder, finished_run, tmp_path: Path):
    def ppo(shapes: str, zero_stage: int = 1, **settings: object) -> PPOTrainer:
        model, path = ModelConfig(path=str(model_folder)), str(finished_run / "reward" / "model")
        actor, reference = (load_causal_lm(model, tokenizer, attention="sdpa") for _ in range(2))
        critic, reward = (load_scalar_head(model, tokenizer, attention="sdpa", path=path) for _ in range(2))
        models = ppo_models(actor, reference, critic, reward)
        changes = {"engine": {"shapes": shapes, "zero_stage": zero_stage}, "batch_size": 6, "ppo_epochs": 1, **settings}
        return build_ppo(accelerator, tmp_path, recipe, tokenizer, models, **changes)

    return ppo


def end_with(ppo: PPOTrainer, part: float) -> None:
    """Let this part of the vocabulary end a completion; the tensor keeps its shape."""
    size = len(ppo.tokenizer)
    ends = torch.where(torch.arange(size) < part * size, torch.arange(size), -1)
    if len(ppo.decoder.eos_ids) == size:
        ppo.decoder.eos_ids.copy_(ends)  # sessions have it
    else:
        ppo.decoder.eos_ids = ends


def lengths(ppo: PPOTrainer) -> list[int]:
    return ppo.experience.action_mask.sum(-1).int().tolist()


def steps_of_different_lengths(ppo: PPOTrainer) -> list[set[tuple]]:
    """Operators of a step with mixed lengths, one whose rows stop at once, and one whose rows never stop."""
    longest = ppo.context.config.data.max_completion_length
    operators_by_step = []
    for index, part in enumerate((0.15, 1.0, 0.0)):
        end_with(ppo, part)
        with Operators() as operators:
            ppo.step(index)
        operators_by_step.append(operators.seen)
        if part == 0.15:
            assert len(set(lengths(ppo))) > 2
        else:
            assert set(lengths(ppo)) == {1 if part else longest}
    return operators_by_step


@pytest.mark.parametrize(("zero_stage", "rows"), [(0, None), (1, 4), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_static_shapes_add_no_operator_after_the_first_step(build, zero_stage, rows):
    first, *later = steps_of_different_lengths(build("static", zero_stage, generation_batch_size=rows))
    assert len(first) > 100
    for seen in later:
        assert sorted(map(str, seen - first)) == []


def comparisons_by_step(ppo: PPOTrainer, steps: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how often the ranks compared their order of gathering weights, for each step."""
    from deepspeed.runtime.zero import partitioned_param_coordinator as zero_3

    compared: list[list[int]] = []
    monkeypatch.setattr(zero_3, "assert_ints_same_as_other_ranks", compared.append)
    counts = []
    for index in range(steps):
        compared.clear()
        ppo.step(index)
        counts.append(len(compared))
    return counts


@pytest.mark.parametrize("weights", ["whole", pytest.param("layerwise", marks=pytest.mark.slow)])
def test_zero_3_settles_the_order_of_weights_in_two_steps(build, monkeypatch, weights):
    ppo = build("static", 3, generation_weights=weights, ppo_epochs=2)
    first, _, *later = comparisons_by_step(ppo, 4, monkeypatch)
    assert first > 0
    assert later == [0, 0]


def test_dynamic_shapes_do_add_operators(build):
    """The check above can fail: lengths that follow the data show up as new shapes."""
    first, *later = steps_of_different_lengths(build("dynamic"))
    assert any(seen - first for seen in later)


def test_a_step_is_the_same_however_its_rollout_is_cut(build):
    """Six rows of three prompts, all of them real, in parts of four rows at most: two of three."""
    numbers, held = [], []
    for rows in (None, 4):
        ppo = build("static", generation_batch_size=rows)
        ppo.batches._examples = ppo.batches._examples[:3]
        numbers.append(ppo.step(0))
        held.append([session.shape[0] for session in ppo.decoder._states])
        assert min(lengths(ppo)) > 0 and numbers[-1]["tokens"] == sum(lengths(ppo))
        assert numbers[-1]["response_length"] == pytest.approx(sum(lengths(ppo)) / 6)
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-4, abs=1e-6)  # of gaps between drawing and scoring
    assert held == [[6], [3]]
