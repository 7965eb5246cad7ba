"""The loop of steps: what each rank draws, and what is saved when, so that nothing after the last step is lost."""

import os
import signal
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from rlhf.checkpoint import training_state
from rlhf.config.schema import build_config
from rlhf.data.stage_dataset import load_stage
from rlhf.engine.distributed import World
from rlhf.models.loading import load_causal_lm
from rlhf.runs.directory import RunDirectory
from rlhf.trainers import pipeline, supervised
from rlhf.trainers.loop import fit, is_recorded, resume_or_seed, take_step
from rlhf.trainers.supervised import SFTTrainer
from rlhf.utils import signals
from tests.helpers import assert_same_weights
from tests.in_process import StubTrainer, one_model, stage_context


@pytest.fixture
def train(accelerator, recipe, tokenizer):
    """Supervised fine-tuning in a folder, as far as it gets."""
    config = build_config(recipe)
    data = load_stage(config.data, "sft", tokenizer, seed=0)

    def run(folder):
        model = load_causal_lm(config.model, tokenizer, attention="sdpa")
        context = stage_context(accelerator, folder, "sft", recipe)
        return fit(SFTTrainer(context, one_model(model), tokenizer, data), context)

    return run


def test_steps_whose_numbers_others_lack_are_recorded():
    """Besides every fifth step: the first one, the last one, and the ends of epochs of four steps."""
    trainer = StubTrainer(build_config({"sft": {"log_every": 5}}).sft, total_steps=13)
    recorded = {}
    for trainer.epoch_steps in (None, 4):
        recorded[trainer.epoch_steps] = [step for step in range(1, 14) if is_recorded(trainer, step)]
    assert recorded == {None: [1, 5, 10, 13], 4: [1, 4, 5, 8, 10, 12, 13]}


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("failing", ["evaluation", "export"])
def test_failure_after_the_last_step_loses_no_step(train, tmp_path, monkeypatch, failing, failure):
    expected = train(tmp_path / "whole")
    evaluate = SFTTrainer.evaluate

    def fails(*arguments):
        if arguments[-1] == "before":
            return evaluate(*arguments)
        raise failure

    steps = []
    with monkeypatch.context() as patch:
        patch.setattr(SFTTrainer, "evaluate" if failing == "evaluation" else "save", fails)
        with pytest.raises(failure):
            train(tmp_path / "failed")
    assert (tmp_path / "failed" / "sft" / "checkpoints" / "step-00000003").is_dir()
    monkeypatch.setattr(supervised.TrainingEngine, "step", lambda *arguments: steps.append(arguments))
    assert train(tmp_path / "failed") == expected
    assert steps == [], "the three steps are not taken again"
    assert_same_weights(tmp_path / "failed" / "sft" / "model", tmp_path / "whole" / "sft" / "model")


def test_each_rank_draws_its_own_numbers_again(accelerator, recipe, tmp_path):
    def draws(rank, attempt):
        context = stage_context(accelerator, tmp_path / f"{rank} {attempt}", "sft", recipe)
        numbers = []

        def step(index):
            numbers.extend(torch.rand(3).tolist())
            return {"rows": 1.0}

        around = replace(context, world=World(rank, 2))
        fit(StubTrainer(context.config.sft, step, total_steps=1), around)
        return numbers

    first, second = draws(0, 1), draws(1, 1)
    assert first == draws(0, 2) and second == draws(1, 2)
    assert not set(first) & set(second)


@pytest.mark.parametrize(("every", "steps"), [(2, [1, 2, 4, 5]), (0, [1, 5])])
def test_ranks_are_compared_every_few_steps(accelerator, recipe, tmp_path, every, steps):
    context = stage_context(accelerator, tmp_path, "sft", {**recipe, "alarms": {"compare_every": every}})
    trainer = StubTrainer(context.config.sft, total_steps=5)
    compared = [index + 1 for index in range(5) if "unequal_weights" in take_step(trainer, context, index)]
    assert compared == steps


def test_a_signal_during_the_last_checkpoint_is_not_lost(train, tmp_path, monkeypatch):
    save = training_state.save_checkpoint

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        save(*arguments)

    monkeypatch.setattr(training_state, "save_checkpoint", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path)
    assert (tmp_path / "sft" / "checkpoints" / "step-00000003").is_dir()
    assert not (tmp_path / "sft" / "model").exists()


def test_stop_file_ends_the_run_after_a_checkpoint_of_the_step(accelerator, recipe, tmp_path):
    context, steps = stage_context(accelerator, tmp_path, "sft", recipe), []

    def step(index):
        steps.append(index)
        context.run.stop_file.touch()
        return {"rows": 1.0}

    trainer = StubTrainer(context.config.sft, step, total_steps=3)
    with pytest.raises(KeyboardInterrupt):
        fit(trainer, context)
    with pytest.raises(KeyboardInterrupt):  # before the next step
        fit(trainer, context)
    assert steps == [0] and context.directory.latest_checkpoint.name == "step-00000001"
    assert context.run.remove_stop_file()
    assert not context.run.remove_stop_file()


def test_resumed_stage_continues_the_sums_of_its_steps(accelerator, recipe, tmp_path):
    def run(total, arrived):
        context = stage_context(accelerator, tmp_path, "sft", recipe)

        def step(index):
            with context.phases("training"):
                if index == arrived:
                    os.kill(os.getpid(), signal.SIGTERM)
            return {"rows": 1.0}

        fit(StubTrainer(context.config.sft, step, total_steps=total), context)
        return context.phases.totals

    with pytest.raises(KeyboardInterrupt):
        run(4, arrived=1)
    context = stage_context(accelerator, tmp_path, "sft", recipe)
    resume_or_seed(StubTrainer(context.config.sft, total_steps=4), context)
    before = dict(context.phases.totals)
    assert before["step"] >= before["training"] > 0
    after = run(4, arrived=None)
    assert after["step"] > before["step"] and after["training"] > before["training"]


def test_swallowed_signal_ends_the_run_before_a_step(accelerator, recipe, tmp_path):
    """A library, such as pyarrow while it imports pandas, catches the handler's exception."""
    context, steps = stage_context(accelerator, tmp_path, "sft", recipe), []
    trainer = StubTrainer(context.config.sft, lambda index: steps.append(index) or {"rows": 1.0}, total_steps=3)
    with signals.interrupt_on_signals():
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            fit(trainer, context)
    assert steps == []
    fit(trainer, context)  # the signal is forgotten after the block
    assert steps == [0, 1, 2]


def test_swallowed_signal_starts_no_further_stage(accelerator, recipe, tmp_path):
    run = RunDirectory(tmp_path)
    with signals.interrupt_on_signals():
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            pipeline.run(build_config(recipe), accelerator, run, ("sft",))
    assert not run.stage("sft").path.exists()
