"""Checkpoints are read on other numbers of ranks and at other ZeRO stages, without a change of any number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.checkpoint import training_state
from rlhf.checkpoint.engine_state import Key, SavedTensors
from rlhf.engine.fp32_weights import EMA
from rlhf.errors import RunError
from rlhf.runs.directory import RunDirectory
from tests.checkpoint.elastic_ranks import SMOOTH, adapters, numbers
from tests.engine.engines import DECAY, accepted_fp16, build, masters, scaled, step, train
from tests.engine.engines import IDS as ROWS
from tests.forks import Forks
from tests.helpers import llama

LEGS = [(1, 0), (2, 1), (4, 3), (2, 2), (4, 0), (1, 3), (2, 0), (1, 1)]
"""(ranks, ZeRO stage) of each step."""


@pytest.mark.parametrize(
    ("precision", "lora"),
    [
        ("fp32", 4),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("fp32", 0), ("bf16", 0), ("bf16", 4)]),
    ],
)
def test_any_ranks_at_any_zero_stage_continue(
    forks: Forks, accelerator: Any, tmp_path: Path, precision: str, lora: int
) -> None:
    """All numbers are read bit for bit; in fp32, the steps are those of one process that never stopped."""
    whole = build(accelerator, 0, precision, lora=adapters(lora), optimizer=SMOOTH)
    whole.ema = EMA(whole.optimizer, DECAY, accelerator)
    before = numbers(whole)
    for leg, (ranks, zero_stage) in enumerate(LEGS):
        arguments = f"{str(tmp_path)!r}, {leg}, {zero_stage}, {precision!r}, {lora}"
        forks.ranks(ranks, f"from tests.checkpoint.elastic_ranks import main; main({arguments})")
        result = torch.load(tmp_path / f"leg {leg}")
        assert (result["steps"], result["ranks"]) == (leg, LEGS[leg - 1][0] if leg else None)
        assert result["read"].keys() == before.keys()
        for name, tensor in result["read"].items():
            assert torch.equal(tensor, before[name].reshape(tensor.shape)), (leg, name)
        before = result["written"]
        if precision == "bf16":  # gradients have 8 bits, which other ranks round in another way
            continue
        step(whole)
        for name, tensor in numbers(whole).items():
            torch.testing.assert_close(before[name], tensor, rtol=0, atol=1e-6, msg=f"leg {leg}: {name}")


@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 0), (0, 3), (3, 0)])
def test_parameter_without_gradients_has_no_moments_elsewhere(accelerator, tmp_path, before, after):
    """In fp32 at ZeRO 0 torch's AdamW keeps nothing for it, and at other stages zeros."""

    def build_with_unused(zero_stage: int) -> Any:
        model = llama(60)
        model.unused = torch.nn.Parameter(torch.arange(5.0))
        return build(accelerator, zero_stage, model=model)

    stage = RunDirectory(tmp_path).stage("sft")
    first, whole = build_with_unused(before), build_with_unused(before)
    train(first, 1)
    training_state.save_checkpoint(stage, 1, {"model": first}, {})
    resumed = build_with_unused(after)
    training_state.restore_checkpoint(stage, {"model": resumed})
    train(resumed, 1)
    train(whole, 2)
    for name, tensor in masters(resumed).items():
        if name != "unused":  # ZeRO applies weight decay to it
            torch.testing.assert_close(tensor, masters(whole)[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(("before", "after"), [(0, 2), (3, 0), (1, 1)])
def test_loss_scale_and_skipped_steps_are_kept(accelerator, tmp_path, before, after):
    stage = RunDirectory(tmp_path).stage("sft")
    with accepted_fp16() as precision:
        first = build(accelerator, before, precision)
        step(first)
        first.step([ROWS], scaled(1e6))
        training_state.save_checkpoint(stage, 2, {"model": first}, {})
        resumed = build(accelerator, after, precision)
        training_state.restore_checkpoint(stage, {"model": resumed})
        for engine in (first, resumed):
            assert (engine.steps, engine.skipped, engine.loss_scale()) == (2, 1, 2**9)


def test_checkpoint_of_another_model_is_refused(accelerator, tmp_path):
    stage = RunDirectory(tmp_path).stage("sft")
    training_state.save_checkpoint(stage, 1, {"model": build(accelerator, 0)}, {})
    larger = build(accelerator, 1, model=llama(60, num_hidden_layers=3))
    with pytest.raises(RunError, match=r"cannot be read \(model\.layers\.2\..* is trained here only\)"):
        training_state.restore_checkpoint(stage, {"model": larger})
    wider = build(accelerator, 1, model=llama(64))
    with pytest.raises(
        RunError, match=r"cannot be read \([\d,]+ numbers of weight of model\.embed_tokens\.weight are missing\)"
    ):
        training_state.restore_checkpoint(stage, {"model": wider})


def test_no_number_is_written_twice(forks: Forks, tmp_path: Path) -> None:
    """The files of four ranks at ZeRO 2 hold each number of each kind once."""
    forks.ranks(4, f"from tests.checkpoint.elastic_ranks import main; main({str(tmp_path)!r}, 0, 2, 'fp32', 0)")
    checkpoint = RunDirectory(tmp_path).stage("sft").latest_checkpoint
    assert checkpoint is not None
    sizes = {name: parameter.numel() for name, parameter in llama(60).named_parameters()}
    with SavedTensors(checkpoint / "model") as saved:
        for (kind, name), parts in saved._parts.items():
            stops = sorted((start, start + file.get_slice(text).get_shape()[0]) for start, file, text in parts)
            if kind != "step":
                assert [start for start, _ in stops] == [0, *(stop for _, stop in stops[:-1])], (kind, name)
                assert stops[-1][1] == sizes[name]
    assert str(Key.parse("exp_avg/model.norm.weight/3")) == "exp_avg/model.norm.weight/3"


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
def test_numbers_on_nvme_are_read_and_written(accelerator, tmp_path, before, after):
    if not accelerator.deepspeed_operator("AsyncIOBuilder"):
        pytest.skip("libaio is not installed")

    def build_on(name: str, is_on_nvme: bool) -> Any:
        (tmp_path / name).mkdir()
        options = {"offload": "all", "nvme": str(tmp_path / name)} if is_on_nvme else {}
        groups = {"zero_optimization": {"sub_group_size": 600_000}}
        engine = build(accelerator, 3, "bf16", model=llama(20_000), deepspeed=groups, **options)
        assert (engine.optimizer.fp32_partitioned_groups_flat[0].numel() == 0) == is_on_nvme
        return engine

    stage, whole, first = RunDirectory(tmp_path).stage("sft"), build_on("whole", False), build_on("first", before)
    train(first, 2)
    training_state.save_checkpoint(stage, 2, {"model": first}, {})
    resumed = build_on("resumed", after)
    training_state.restore_checkpoint(stage, {"model": resumed})
    losses = [numbers["loss"] for numbers in train(resumed, 2)]
    assert losses == pytest.approx([numbers["loss"] for numbers in train(whole, 4)][2:], rel=1e-4)
