"""Seconds, arithmetic and rates of a step and its phases, counted by hand."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from accelerators import DeviceInfo
from rlhf.config.schema import LoraConfig, build_config
from rlhf.models.lora import add_adapters
from rlhf.models.shape import ModelFlops, TextLengths, generation_lengths, shape_from
from rlhf.reporting import timers
from rlhf.reporting.timers import PhaseTimers, is_machine_dependent
from rlhf.trainers.ppo.metrics import length_sums, record_arithmetic
from tests.helpers import llama
from tests.trainers.test_keys import table

SHAPE = shape_from(
    {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "by hand",
)
# A layer: queries 8 x 8, keys and values 8 x 4 each, out 8 x 8; gate, up and down 8 x 12 each.
MATRICES = 2 * (64 + 32 + 32 + 64 + 3 * 96)
WIDTH = 2 * 4 * 2  # layers x heads x 8 / 4


def test_forward_operations_equal_the_hand_count():
    products = ModelFlops.of(SHAPE)
    assert (products.matrices, products.width, products.output) == (MATRICES, WIDTH, 8 * 100)
    texts = TextLengths.of([3, 5], outputs=4)
    assert texts == (8, 9 + 25, 4)
    forward = 2 * MATRICES * 8 + 4 * WIDTH * 34 + 2 * 800 * 4
    assert products.forward(texts) == forward
    assert products.update(texts) == 3 * forward
    assert ModelFlops.of(SHAPE, scalar_head=True).forward(texts) == forward - 2 * (800 - 8) * 4


def test_update_of_adapters_counts_no_gradient_of_frozen_weights():
    rank, texts = 3, TextLengths.of([3, 5], outputs=4)
    adapters = 2 * rank * ((8 + 8) + 2 * (8 + 4) + (8 + 8) + 3 * (8 + 12))
    assert ModelFlops.of(SHAPE, rank=rank).adapters == adapters
    layers, attention, head = 2 * MATRICES * 8, 4 * WIDTH * 34, 2 * 800 * 4
    assert ModelFlops.of(SHAPE, rank=rank).forward(texts) == layers + attention + head + 2 * adapters * 8
    assert ModelFlops.of(SHAPE, rank=rank).update(texts) == 2 * layers + 3 * attention + 2 * head + 3 * 2 * adapters * 8
    trained = ModelFlops.of(SHAPE, rank=rank, scalar_head=True)  # its head is trained in addition to the adapters
    assert trained.update(texts) == 2 * layers + 3 * attention + 3 * 2 * 8 * 4 + 3 * 2 * adapters * 8


def test_generation_lengths_equal_the_hand_count():
    lengths = [(3, 4), (2, 1), (5, 0)]  # of prompts, and what was drawn
    rows = len(lengths)
    prompts = TextLengths.of([p for p, _ in lengths], 0)
    whole = TextLengths.of([p + n for p, n in lengths], 0)
    pairs = sum(p * p + sum(range(p + 1, p + n)) for p, n in lengths[:2])
    lengths_read = generation_lengths(rows - 1, TextLengths.of([3, 2], 0), TextLengths.of([7, 3], 0))
    assert lengths_read == (7 + 3 - 2, pairs, 4 + 1)
    assert generation_lengths(rows, prompts, whole).outputs == 5
    # Two prompts of 3 tokens and 2, each with two texts: 4 and 1, 3 and 2 tokens are drawn.
    prompts, whole = TextLengths.of([3, 3, 2, 2], 0), TextLengths.of([7, 4, 5, 4], 0)
    pairs = 9 + 4 + sum(sum(range(p + 1, p + n)) for p, n in [(3, 4), (3, 1), (2, 3), (2, 2)])
    assert generation_lengths(4, prompts, whole, copies=2) == (3 + 2 + (3 + 0 + 2 + 1), pairs, 10 - 2)


@pytest.mark.parametrize("rank", [0, 3])
def test_operations_equal_torchs_counter(rank: int):
    """Of the products that a model makes, forward and backward, with adapters and without."""
    model = llama(100, hidden_size=8, intermediate_size=12, attn_implementation="eager")
    if rank:
        add_adapters(model, LoraConfig(rank=rank), seed=0)
    ids = torch.arange(12).view(2, 6)
    texts = TextLengths.of([6, 6], outputs=12)
    shape = shape_from(model.config.to_dict(), "llama")
    products = ModelFlops.of(shape, rank=rank)
    with FlopCounterMode(display=False) as counter:
        loss = model(input_ids=ids).logits.sum()
    # transformers 5.17 multiplies positions by frequencies as matrices, later ones as vectors.
    rotary = sum(counter.get_flop_counts().get("LlamaForCausalLM.model.rotary_emb", {}).values())
    assert counter.get_total_flops() - rotary == products.forward(texts)
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    # Beside adapters the embedding is frozen: no gradient goes through the first layer's query, key and value to it.
    left_out = 2 * 12 * (8 * (8 + 4 + 4) + 3 * 8 * rank) if rank else 0
    assert counter.get_total_flops() == products.update(texts) - products.forward(texts) - left_out


def test_phases_of_a_ppo_step_count_real_rows_only(accelerator):
    """A prompt of 3 with 2 tokens drawn, one of 1 with 3, and a row that only fills up the batch."""
    attended = torch.tensor([[1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    drawn = torch.tensor([[1.0, 1, 0], [1, 1, 1], [0, 0, 0]])
    rows = torch.tensor([1.0, 1, 0])
    sums = length_sums(SimpleNamespace(attention_mask=attended, action_mask=drawn), rows)
    totals = {key: value.item() for key, value in sums.items()} | {"rows": 2, "tokens": 5}
    assert totals == {
        "prompt_tokens": 4, "prompt_squares": 10, "text_tokens": 9, "text_squares": 41, "rows": 2, "tokens": 5,
    }  # fmt: skip
    config = build_config({"ppo": {"batch_size": 4, "minibatch_size": 2, "ppo_epochs": 3}})
    actor, scalar = ModelFlops.of(SHAPE, rank=1), ModelFlops.of(SHAPE, scalar_head=True)
    recorded = {}
    context = SimpleNamespace(
        config=config,
        model_flops={"actor": actor, "critic": scalar, "reward": scalar},
        phases=SimpleNamespace(count_work=lambda name, **work: recorded.update({name: work})),
    )
    raw = TextLengths.of([7], outputs=6)
    record_arithmetic(context, totals, 4, raw)  # of 3 x 2: kl_stop ended the step
    passes, policy, values = 2, TextLengths(9, 41, 5), TextLengths(9, 41, 9)
    plain = ModelFlops.of(SHAPE)  # the reference is the actor without its adapters
    assert recorded == {
        "generation": {"tokens": 5, "flops": actor.forward(TextLengths(4 + 1 + 1 + 1, 9 + 4 + 1 + 2 + 3, 5))},
        "scoring": {
            "tokens": 9,
            "flops": actor.forward(policy) + plain.forward(policy) + 2 * scalar.forward(values),
        },
        "training": {
            "tokens": 2 * 9 + 4 * 7,
            "flops": passes * (actor.update(policy) + scalar.update(values)) + 4 * actor.update(raw),
        },
    }
    forward = actor.forward(policy) + scalar.forward(values)
    context.config = build_config({"ppo": {"batch_size": 4}})
    record_arithmetic(context, totals, 1, reused=True, copies=None)
    assert recorded["generation"] == {"tokens": 5, "flops": 0}  # drawn elsewhere
    assert recorded["training"] == {"tokens": 9, "flops": actor.update(policy) + scalar.update(values) - forward}


class Clock:
    """A device with a clock that only tests move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, peaks: dict[str, float] | None = None) -> None:
        self.now, self.queued, self.peaks = 0.0, 0.0, [100]
        monkeypatch.setattr(timers, "time", SimpleNamespace(perf_counter=lambda: self.now))
        self.info = lambda: DeviceInfo("chip", 1, "none", peak_flops=peaks or {})
        self.memory = lambda: SimpleNamespace(peak=self.peaks[-1])

    def synchronize(self) -> None:
        self.now, self.queued = self.now + self.queued, 0.0

    def mark(self) -> Any:
        self.synchronize()
        time = self.now
        return SimpleNamespace(time=time, seconds_since=lambda earlier: time - earlier.time)

    def named_range(self, name: str) -> Any:
        return nullcontext()

    def reset_peak(self) -> None:
        self.peaks.append(10)

    def phases(self, ranks: int = 1) -> PhaseTimers:
        return PhaseTimers(self, SimpleNamespace(name="bf16"), ranks)  # type: ignore[arg-type]


def test_phase_lasts_until_the_device_is_done(monkeypatch):
    clock = Clock(monkeypatch, {"bf16": 1e12})
    phases = clock.phases(ranks=2)
    with phases.step():
        for name, queued in (("generation", 5.0), ("scoring", 2.0), ("training", 11.0)):
            with phases(name):
                clock.queued = queued
        clock.now += 2.0
        clock.peaks[-1] = 70
        phases.count_work("generation", tokens=50, flops=10e12)
        phases.count_work("training", tokens=110, flops=22e12)
    metrics = phases.metrics()
    assert {key: metrics[key] for key in metrics if key.endswith("seconds")} == {
        "seconds": 20, "generation_seconds": 5, "scoring_seconds": 2, "training_seconds": 11, "other_seconds": 2,
    }  # fmt: skip
    shares = [value for key, value in metrics.items() if key.endswith("_share") and key != "peak_share"]
    assert shares == [0.25, 0.1, 0.55, 0.1]
    assert metrics["generation_tokens_per_second"] == 10 and metrics["training_tokens_per_second"] == 10
    # of one of two devices
    assert (metrics["generation_tflops"], metrics["training_tflops"], metrics["tflops"]) == (1.0, 1.0, 32 / 2 / 20)
    assert metrics["peak_share"] == metrics["tflops"]
    assert metrics["peak_memory"] == 70
    with phases.step():
        clock.now += 1.0
    assert phases.metrics()["peak_memory"] == 10, "the peak of each step is its own"
    assert phases.highest_memory() == 100, "and the stage's is the highest there was, also before its steps"
    summary = phases.summary()
    assert summary.pop("phases") == {"generation": 5, "scoring": 2, "training": 11, "other": 3}
    assert summary == pytest.approx({"tflops": 16 / 21, "peak_share": 16 / 21})


def test_device_that_marks_its_queue_is_waited_for_once_a_step(monkeypatch):
    clock = Clock(monkeypatch)
    waits: list[float] = []
    clock.synchronize = lambda: waits.append(clock.now)  # type: ignore[method-assign]
    clock.mark = lambda: SimpleNamespace(seconds_since=lambda earlier: 3.0)  # type: ignore[method-assign]
    phases = clock.phases()
    with phases.step():
        for name in ("generation", "scoring"):
            with phases(name):
                clock.now += 1.0
        assert waits == []
    assert waits == [2.0] and phases.phase_times()["scoring"].seconds == 3.0
    phases.waits = True
    with phases.step(), phases("training"):
        pass
    assert len(waits) == 3


def test_current_phase_is_the_innermost_and_stays_after_an_error(monkeypatch):
    phases = Clock(monkeypatch).phases()
    assert phases.current == "preparation"
    with phases.running("evaluation"):
        with phases.running("generation"):
            assert phases.current == "generation"
        assert phases.current == "evaluation"
    with pytest.raises(MemoryError), phases.step(), phases("training"):
        raise MemoryError
    assert phases.current == "training", "the message asks after the blocks were left"


def test_metrics_omit_unknown_arithmetic_and_unknown_peak(monkeypatch):
    clock = Clock(monkeypatch, {"fp16": 1e12})
    phases = clock.phases()
    with phases.step():
        clock.now += 2.0
        phases.count_work("training", tokens=10, flops=4e12)
    assert phases.metrics() == {"seconds": 2, "peak_memory": 10, "tokens_per_second": 5, "tflops": 2}
    with phases.step():
        clock.now += 2.0
        phases.count_work("training", tokens=10, flops=None)
    assert phases.metrics() == {"seconds": 2, "peak_memory": 10, "tokens_per_second": 5}


def test_latency_and_bandwidth_are_those_of_all_decoding_steps(monkeypatch):
    clock = Clock(monkeypatch)
    phases = clock.phases(ranks=2)
    rates = []
    for step_bytes in (600, None):
        with phases.step():
            for steps in (6, 2):  # two rollouts, of 3 + 1 seconds
                with phases("generation"):
                    clock.now += steps / 2
                phases.count_decode_steps("generation", steps, step_bytes=step_bytes)
            with phases("training"):
                clock.now += 1.0
        rates.append({key: number for key, number in phases.metrics().items() if "step" in key or "bytes" in key})
    both = {"generation_step_seconds": 4 / 8, "generation_bytes_per_second": 8 * 600 / 4}
    assert rates == [both, {"generation_step_seconds": 0.5}], "the bytes of a model of unknown shape are omitted"


def test_is_machine_dependent_names_speed_and_memory_only():
    keys = {key for _, key, _ in table("Numbers of a training step")}
    machine = {key for key in keys if is_machine_dependent(key)}
    rates = {"tokens_per_second", "pairs_per_second", "seconds", "tflops", "peak_share", "peak_memory"}
    phases = ("generation", "scoring", "training", "other")
    measures = ("seconds", "share", "tokens_per_second", "tflops", "step_seconds", "bytes_per_second")
    assert machine == rates | {f"{phase}_{measure}" for phase in phases for measure in measures} & keys
    assert {"truncated_share", "other_share"} & machine == {"other_share"}
