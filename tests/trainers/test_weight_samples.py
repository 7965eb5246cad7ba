"""What samples of weights count, in the cases that a run of tiny models does not meet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rlhf.config.schema import OptimizerConfig
from rlhf.engine.engine import TrainingEngine
from rlhf.models.quantized import quantize
from rlhf.trainers import weight_samples
from rlhf.trainers.weight_samples import SAMPLE, WeightSamples
from tests.forks import Forks
from tests.helpers import llama
from tests.in_process import make_placement

SAME = {"changed_frozen_weights": 0.0, "unequal_weights": 0.0}


@pytest.fixture
def engine(accelerator: Any) -> TrainingEngine:
    return TrainingEngine(
        "test",
        llama(8),
        accelerator=accelerator,
        precision=accelerator.precision("fp32"),
        placement=make_placement(0),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        total_steps=9,
        micro_batch_size=1,
        accumulation=1,
    )


def pretend_step(
    engine: TrainingEngine, monkeypatch: pytest.MonkeyPatch, *, rate: float = 1e-3, norm: float = 1.0
) -> None:
    """A step that leaves the weights as they are."""
    engine.engine.global_steps += 1
    monkeypatch.setattr(engine, "grad_norm", lambda: norm)
    for group in engine.optimizer.param_groups:
        group["lr"] = rate


def test_model_that_should_have_moved_and_has_not_is_counted(
    engine: TrainingEngine, accelerator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = WeightSamples({"model": engine}, accelerator)
    assert samples.count_unchanged() == {"unchanged_weights": 0.0}, "before its first step"
    for rate, norm in ((0.0, 1.0), (1e-3, 0.0), (1e-3, float("inf"))):
        pretend_step(engine, monkeypatch, rate=rate, norm=norm)
        assert samples.count_unchanged() == {"unchanged_weights": 0.0}, (rate, norm)
    pretend_step(engine, monkeypatch)
    assert samples.count_unchanged() == {"unchanged_weights": 1.0}


def test_step_that_fp16_skips_leaves_weights_as_they_are(
    engine: TrainingEngine, accelerator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = WeightSamples({"model": engine}, accelerator)
    pretend_step(engine, monkeypatch)
    engine.engine.skipped_steps += 1
    assert samples.count_unchanged() == {"unchanged_weights": 0.0}


def test_share_of_a_rank_without_gradients_is_no_fault(
    engine: TrainingEngine, accelerator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At ZeRO 1 to 3 a rank may have weights alone that the first step does not move, such as a LoRA's A."""
    samples = WeightSamples({"model": engine}, accelerator)
    pretend_step(engine, monkeypatch)
    monkeypatch.setattr(weight_samples.distributed, "all_gather_objects", lambda mine: [mine, [(0, 3 * mine[0][1])]])
    assert samples.count_unchanged() == {"unchanged_weights": 0.25}


def test_weights_on_nvme_are_not_compared(
    engine: TrainingEngine, accelerator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_samples, "get_fp32_weights", lambda optimizer: [torch.empty(0)])
    samples = WeightSamples({"model": engine}, accelerator)
    pretend_step(engine, monkeypatch)
    assert samples.count_unchanged() == {}


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantized_weights_are_compared(accelerator: Any, kind: Any) -> None:
    model = llama(8, hidden_size=64).requires_grad_(False)
    quantize(model, kind, accelerator.kernels.get("quantized_weights", required=True), exported=False)
    samples = WeightSamples({"reference": model}, accelerator)
    assert samples.compare() == SAME
    next(model.model.layers[0].mlp.up_proj.buffers()).zero_()
    assert samples.compare() == SAME | {"changed_frozen_weights": 1.0}


def test_layouts_of_the_device_and_strange_shapes_are_no_problem(accelerator: Any) -> None:
    model = nn.Module()
    model.packed = nn.Parameter(torch.ones(8, 8).to_mkldnn(), requires_grad=False)
    model.empty = nn.Parameter(torch.empty(0), requires_grad=False)
    model.scalar = nn.Parameter(torch.tensor(1.0), requires_grad=False)
    model.turned = nn.Parameter(torch.ones(3, 2 * SAMPLE, 5).transpose(0, 1), requires_grad=False)
    samples = WeightSamples({"reference": model}, accelerator)
    assert samples.compare() == SAME
    model.turned.data[:, 0, 0] += 1
    model.scalar.data += 1
    assert samples.compare() == SAME | {"changed_frozen_weights": 2.0}


TWO_RANKS = """
import torch
import accelerators
from rlhf.engine import distributed
from rlhf.trainers.weight_samples import WeightSamples
from tests.engine.engines import build, step
from tests.helpers import llama
with distributed.start_process_group(accelerators.select("cpu", environ={})) as accelerator:
    for precision in ("fp32", "bf16"):
        engine = build(accelerator, 2, precision, rows=2)
        frozen = llama(300).requires_grad_(False)
        samples = WeightSamples({"sft": engine, "reference": frozen}, accelerator)
        assert samples.compare()["unequal_weights"] == 0
        for weight in (engine.module.model.embed_tokens.weight, frozen.lm_head.weight):
            bits = weight.data.view(-1).view(torch.int32 if weight.element_size() == 4 else torch.int16)
            if distributed.world().rank:
                bits[777] ^= 1  # the last bit of a number that is no sample
            assert samples.compare() == {"changed_frozen_weights": 0.0, "unequal_weights": 1.0}, precision
            if distributed.world().rank:
                bits[777] ^= 1
"""


def test_one_bit_that_differs_between_ranks_is_found(forks: Forks) -> None:
    forks.ranks(2, TWO_RANKS)
