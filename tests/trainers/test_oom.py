"""The message of a stage that ran out of memory: settings that would help, and bytes of each model."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf.config.schema import ModelConfig, load_config
from rlhf.engine.engine import freeze_model
from rlhf.engine.fp32_weights import EMA
from rlhf.memory.advice import advise
from rlhf.memory.environment import Environment
from rlhf.models.loading import load_causal_lm
from rlhf.trainers import oom
from rlhf.trainers.oom import _advise_allocator, format_message
from tests.engine.engines import build, train
from tests.helpers import llama
from tests.in_process import bytes_held, make_placement

INT8 = "engine.frozen=int8"
ZERO, LORA, LENGTH = "engine.zero_stage=3", "lora.rank=8", "data.max_completion_length=96"
HALVES = ["sft.batch_size=24", "data.max_prompt_length=64", "data.max_completion_length=192"]


def situation(*settings: str, **facts) -> dict:
    config = load_config(None, [*HALVES, *settings], example=False)
    facts = {"stage": "sft", "phase": "training", "ranks": 1, "precision": "fp32", "host": False, **facts}
    environment = Environment(facts.pop("ranks"), facts.pop("precision"), unified_memory=not facts.pop("host"))
    return {"config": config, "environment": environment, "best_precision": "fp32", **facts}


GENERATION, ROWS = {"stage": "ppo", "phase": "generation"}, "ppo.generation_batch_size"
LAYERWISE = "ppo.generation_weights=layerwise"
CHECKPOINTING = "model.gradient_checkpointing=true"


@pytest.mark.parametrize(
    ("settings", "facts", "expected"),
    [
        ([], {}, ["sft.micro_batch_size=12", CHECKPOINTING, LORA, LENGTH]),
        ([], {"ranks": 2}, ["sft.micro_batch_size=6", CHECKPOINTING, ZERO, LORA, LENGTH]),
        (["sft.micro_batch_size=3"], {}, ["sft.micro_batch_size=1", CHECKPOINTING, LORA, LENGTH]),
        (["sft.micro_batch_size=1"], {}, [CHECKPOINTING, LORA, LENGTH]),
        (["model.gradient_checkpointing=true"], {}, ["sft.micro_batch_size=12", LORA, LENGTH]),
        ([], {"phase": "evaluation"}, ["sft.micro_batch_size=12", LORA, LENGTH]),
        (["lora.rank=4"], {"phase": "evaluation"}, ["sft.micro_batch_size=12", INT8, LENGTH]),
        (["lora.rank=4", "engine.frozen=int4"], {"phase": "set-up", "ranks": 2}, []),
        (["lora.rank=4", "engine.zero_stage=3"], {"phase": "set-up", "ranks": 2}, [INT8]),
        (["lora.rank=4"], {"phase": "set-up", "ranks": 2}, [INT8]),
        (["engine.zero_stage=2"], {"phase": "set-up", "ranks": 2}, [ZERO, LORA]),
        (["engine.zero_stage=3"], {"phase": "set-up", "ranks": 2}, [LORA]),
        ([], {"phase": "set-up", "best_precision": "bf16"}, ["precision=auto", LORA]),
        ([], {"phase": "set-up", "precision": "bf16", "best_precision": "bf16"}, [LORA]),
        (["lora.rank=4"], {"phase": "loading", "ranks": 2}, [INT8]),
        ([], {"stage": "reward"}, ["reward.micro_batch_size=16", CHECKPOINTING, LORA, LENGTH]),
        (["ppo.minibatch_size=8"], {"stage": "ppo"}, ["ppo.micro_batch_size=4", CHECKPOINTING, LORA, LENGTH]),
        ([], {"stage": "ppo", "phase": "scoring"}, ["ppo.micro_batch_size=16", LORA, LENGTH]),
        (["ppo.minibatch_size=8"], GENERATION, [f"{ROWS}=16", "ppo.batch_size=16", LORA, LENGTH]),
        (["ppo.batch_size=24", "ppo.minibatch_size=8"], GENERATION, [f"{ROWS}=12", "ppo.batch_size=8", LORA, LENGTH]),
        (["ppo.minibatch_size=32"], GENERATION, [f"{ROWS}=16", LORA, LENGTH]),
        (["ppo.minibatch_size=32", f"{ROWS}=5"], GENERATION, [f"{ROWS}=1", LORA, LENGTH]),
        (["ppo.minibatch_size=32", f"{ROWS}=99"], GENERATION, [f"{ROWS}=16", LORA, LENGTH]),
        (["ppo.minibatch_size=32", f"{ROWS}=1"], GENERATION, [LORA, LENGTH]),
        (["ppo.batch_size=6"], GENERATION | {"ranks": 2}, [f"{ROWS}=1", ZERO, "ppo.batch_size=2", LORA, LENGTH]),
        ([ZERO, f"{ROWS}=1"], GENERATION | {"ranks": 32}, [LAYERWISE, LORA, LENGTH]),
        ([ZERO, f"{ROWS}=1", "ppo.generation_weights=layerwise"], GENERATION | {"ranks": 32}, [LORA, LENGTH]),
        ([ZERO, "ppo.minibatch_size=32"], GENERATION, [f"{ROWS}=16", LORA, LENGTH]),
    ],
)
def test_advise_lists_settings_that_help_mildest_first(settings, facts, expected):
    assert advise(**situation(*settings, **facts)) == (expected, [])


HOST = {"host": True, "phase": "set-up"}
ON_HOST = "engine.offload=optimizer --set engine.zero_stage=1"


@pytest.mark.parametrize(
    ("settings", "facts", "expected"),
    [
        ([], {}, [ON_HOST, LORA]),
        (["engine.zero_stage=1"], {}, ["engine.offload=optimizer", LORA]),
        (["engine.zero_stage=2", "engine.offload=optimizer"], {}, [LORA]),
        (["engine.zero_stage=3"], {}, ["engine.offload=all", LORA]),
        (["engine.zero_stage=3", "engine.offload=optimizer"], {"ranks": 2}, ["engine.offload=all", LORA]),
        (["engine.zero_stage=3", "engine.offload=all"], {}, [LORA]),
        ([], {"stage": "ppo"}, ["engine.offload=parameters", LORA]),
        (["engine.offload=parameters"], {"stage": "ppo"}, [ON_HOST, LORA]),
        (["ppo.ema=0.9"], {"stage": "ppo"}, ["ppo.ema_on_host=true", "engine.offload=parameters", LORA]),
        (["ppo.ema=0.9", "ppo.ema_on_host=true"], {"stage": "ppo"}, ["engine.offload=parameters", LORA]),
        (["ppo.ema=0.9"], {}, [ON_HOST, LORA]),
        (["engine.zero_stage=1"], {"stage": "ppo"}, ["engine.offload=all", LORA]),
        (["lora.rank=4"], {}, [INT8]),
        (
            ["engine.zero_stage=1"],
            {"phase": "training"},
            ["sft.micro_batch_size=12", CHECKPOINTING, "engine.offload=optimizer", LORA, LENGTH],
        ),
        (["engine.zero_stage=1"], {"started": True, "continued": True}, ["engine.offload=optimizer"]),
    ],
)
def test_advise_with_a_host_names_offload(settings, facts, expected):
    assert advise(**situation(*settings, **HOST | facts))[0] == expected
    without = advise(**situation(*settings, **HOST | facts | {"host": False}))[0]
    assert not any("offload" in key or "on_host" in key for key in without)


def test_advise_for_started_run_separates_fixed_settings():
    mild = ["sft.micro_batch_size=12", CHECKPOINTING]
    assert advise(**situation(continued=True)) == ([*mild, LORA], [LENGTH])
    assert advise(**situation(started=True, continued=True)) == (mild, [LORA, LENGTH])


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("facts", [{}, {"ranks": 2}, {"stage": "reward"}, {"stage": "ppo"}])
def test_advised_settings_are_valid_and_not_advised_again(facts, host):
    facts = facts | {"host": host}
    for key in advise(**situation(**facts))[0]:
        changed = situation(*key.split(" --set "), **facts)
        assert not any(key in keys for keys in advise(**changed))


def test_message_names_cause_peak_models_and_advice():
    lack = torch.OutOfMemoryError("Tried to allocate 2.00 GiB.\nLarger than ever " + "_" * 120)
    held = {"actor": 25 << 30, "reward": 300 << 20}
    keys = (["a=1", "b=2"], ["c=3"])
    assert format_message(lack, "on npu in ppo, training", "peak 79.2 GiB of 80.0 GiB", held, keys) == (
        "out of memory on npu in ppo, training (OutOfMemoryError: Tried to allocate 2.00 GiB. Larger than ever ...); "
        "peak 79.2 GiB of 80.0 GiB; weights, gradients and optimizer: actor 25.0 GiB, reward 300 MiB; "
        "try, with --set and in this order: a=1, b=2; with another --output, also: c=3"
    )
    assert (
        "; weights, gradients and optimizer: actor 25.0 GiB, reward 300 MiB; and on the host: actor 2.0 GiB; try"
        in (format_message(lack, "", "", held, keys, {"actor": 2 << 30}))
    )
    line = format_message(lack, "", "", {}, keys, allocator="CONF=expand")
    assert line.endswith("; if memory is fragmented, start with CONF=expand")
    assert format_message(MemoryError(), "on the host in sft, loading", "", {}, ([], [])) == (
        "out of memory on the host in sft, loading (MemoryError); no setting of this run would help: use a device with "
        "more memory"
    )


def test_advice_leaves_out_zero_stages_that_the_device_refuses(accelerator, monkeypatch):
    seen = []

    def advise(config, stage, phase, environment, *args, **options):
        seen.append(environment.zero_stages)
        raise KeyboardInterrupt  # what follows needs a whole stage

    monkeypatch.setattr(oom, "advise", advise)
    monkeypatch.setattr(accelerator, "refuse_zero_stage", lambda stage: "no" if stage == 3 else "")
    context = MagicMock(accelerator=accelerator)
    with pytest.raises(KeyboardInterrupt), oom.translate_stage_errors(context):
        raise MemoryError
    assert seen == [(0, 1, 2)]


def test_out_of_memory_while_loading_is_not_a_model_error(model_folder, tokenizer, monkeypatch):
    def full(*arguments, **options):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 524288000 bytes.")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        load_causal_lm(ModelConfig(path=str(model_folder)), tokenizer, attention="sdpa")


# bytes


@pytest.fixture(scope="module")
def parameters():
    return sum(parameter.numel() for parameter in llama(60).parameters())


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_trained_model_holds_weights_moments_and_masters(accelerator, parameters, zero_stage, precision):
    if precision not in ("fp32", accelerator.precision().name):
        pytest.skip(f"no {precision} here")
    engine = build(accelerator, zero_stage, precision)
    train(engine, steps=1)
    width = {"fp32": 4, "bf16": 2}[precision]
    master = 4 if zero_stage or precision == "bf16" else 0
    least = width + master + 8
    assert least <= bytes_held(engine) / parameters <= (least + 4) * 1.01  # and gradients, where they are kept
    before, engine.ema = bytes_held(engine), EMA(engine.optimizer, 0.9, accelerator)
    assert (bytes_held(engine) - before) / parameters == pytest.approx(4, rel=0.01)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_frozen_model_holds_its_weights(accelerator, parameters, zero_stage):
    model = freeze_model(
        llama(60),
        accelerator=accelerator,
        precision=accelerator.precision("fp32"),
        placement=make_placement(zero_stage),
    )
    assert 4 <= bytes_held(model) / parameters <= 4 * 1.01


def test_setting_of_the_allocator_is_advised_unless_the_user_has_one(accelerator, monkeypatch):
    assert _advise_allocator(accelerator) == ""
    monkeypatch.setattr(type(accelerator), "allocator_setting", ("CHIP_ALLOC", "expand"))
    monkeypatch.delenv("CHIP_ALLOC", raising=False)
    assert _advise_allocator(accelerator) == "CHIP_ALLOC=expand"
    monkeypatch.setenv("CHIP_ALLOC", "split")
    assert _advise_allocator(accelerator) == ""
