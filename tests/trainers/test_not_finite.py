"""A step whose gradients are not finite is not taken; the first such layer and the rows are named and kept."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf.config.schema import build_config
from rlhf.engine.engine import NotFiniteError
from rlhf.errors import DivergedError, StepNotTakenError
from rlhf.trainers import loop
from rlhf.trainers.loop import take_step
from tests.engine.engines import IDS, build, loss, masters, step
from tests.forks import Forks
from tests.helpers import llama
from tests.in_process import StubTrainer, build_ppo, make_placement, ppo_models, stage_context
from tests.trainers.test_ppo import scalar


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_update_with_wrong_gradients_is_not_made(accelerator, zero_stage, precision, value):
    """And the next one is the same as without it: moments and the rate have not moved."""
    first, whole = (build(accelerator, zero_stage, precision) for _ in range(2))
    step(first)
    step(whole)
    with pytest.raises(NotFiniteError, match="gradients of the test model are not finite"):
        first.step([IDS], lambda model, ids: (loss(model, ids)[0] * value, {}))
    assert (first.steps, first.skipped, whole.skipped) == (2, 1, 0)
    for engine in (first, whole):
        step(engine)
    for name, tensor in masters(first).items():
        assert torch.equal(tensor, masters(whole)[name]), name


def break_rows(rows: list[int], *, in_training: bool = False) -> Any:
    """A forward hook that makes these rows of a layer's output NaN, in every pass or in training passes only."""

    def hook(layer: Any, inputs: Any, output: Any) -> Any:
        if in_training and not (layer.training and torch.is_grad_enabled()):
            return output
        broken = output.clone()
        broken[rows] = float("nan")
        return broken

    return hook


def break_gradient(layer: Any, inputs: Any, output: Any) -> Any:
    if output.requires_grad:
        output = output.clone()
        output.register_hook(lambda gradient: gradient * float("inf"))
    return output


CASES = {
    "reward": ("reward", "model.model.layers.1.mlp.down_proj", break_rows([1]), "output", (1,)),
    "reference": ("reference", "model.layers.0.self_attn.q_proj", break_rows([0]), "output", (0,)),
    "critic": ("critic", "model.model.layers.0.mlp", break_rows([0, 1], in_training=True), "output", (0, 1)),
    "actor": ("actor", "model.layers.1.mlp.up_proj", break_rows([1], in_training=True), "output", (1,)),
    "gradient": ("actor", "model.layers.1.mlp", break_gradient, "gradient", None),
}


@pytest.fixture
def ppo(accelerator: Any, recipe: dict[str, Any], tokenizer: Any, tmp_path: Path) -> Any:
    def build_broken(case: str, zero_stage: int, **changes: Any) -> Any:
        size = len(tokenizer)
        models = ppo_models(llama(size), llama(size, seed=5), scalar(llama(size)), scalar(llama(size)))
        settings = {"ppo_epochs": 1, "micro_batch_size": 2, **changes}
        trainer = build_ppo(
            accelerator, tmp_path, recipe, tokenizer, models, engine={"zero_stage": zero_stage}, **settings
        )
        role, path, hook, *_ = CASES[case]
        model = trainer.context.models[role]
        dict(getattr(model, "module", model).named_modules())[path].register_forward_hook(hook)
        return trainer

    return build_broken


@pytest.mark.parametrize("zero_stage", [0, 3])
@pytest.mark.parametrize("case", CASES)
def test_first_layer_and_its_rows_are_named(ppo: Any, case: str, zero_stage: int) -> None:
    role, path, _, quantity, rows = CASES[case]
    trainer = ppo(case, zero_stage)
    before = [masters(engine) for engine in trainer.engines.values()]
    with pytest.raises(StepNotTakenError) as caught:
        take_step(trainer, trainer.context, 0)
    broken = "critic" if case == "critic" else "actor"
    assert f"ppo: the gradients of the {broken} model are not finite at step 1 (batch 0)" in str(caught.value)
    optimizer = "critic_optimizer" if case == "critic" else "optimizer"
    assert f"; lower ppo.{optimizer}.learning_rate, look at these rows" in str(caught.value)
    found = re.search(
        r"in the (\w+) of (\S+) \((\w+) model, [\d,]+ of [\d,]+ numbers\); their rows are in (\S+);", str(caught.value)
    )
    assert found and (found[1], found[3]) == (quantity, role) and found[2].startswith(path)
    file = Path(found[4])
    kept = json.loads(file.read_text())
    assert (kept["step"], kept["model"], kept["layer"], kept["quantity"]) == (1, role, found[2], quantity)
    assert file.stat().st_mode & 0o077 == 0
    if rows:
        assert tuple(row["row"] for row in kept["rows"]) == rows
    texts = {
        tuple(ids[mask.bool()].tolist())
        for ids, mask in zip(trainer.experience.input_ids, trainer.experience.attention_mask)
    }
    assert kept["rows"] and all(tuple(row["ids"]) in texts for row in kept["rows"])
    assert all(row["text"] == trainer.tokenizer.decode(row["ids"]) for row in kept["rows"])
    for engine, weights in zip(trainer.engines.values(), before):
        if engine.name == broken:
            assert all(torch.equal(tensor, weights[name]) for name, tensor in masters(engine).items())


def test_failing_search_does_not_hide_the_error(ppo: Any, monkeypatch: Any) -> None:
    trainer = ppo("reward", 0)

    def fails() -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(trainer, "repeat_scoring", fails)
    with pytest.raises(StepNotTakenError, match=r"not finite at step 1 .* could not be repeated .*out of luck"):
        take_step(trainer, trainer.context, 0)


def test_left_out_step_changes_nothing_and_is_counted(ppo: Any, capsys: Any) -> None:
    """The rollout's random numbers and the state of the rewards are those before it; the limit ends the run."""
    trainer = ppo("reward", 1)
    context = replace(trainer.context, config=build_config({"alarms": {"skip_not_finite": 1}}))
    before, weights = trainer.state_dict(), masters(trainer.actor)
    assert take_step(trainer, context, 0) == {}
    assert context.left_out == [1]
    after = trainer.state_dict()
    assert torch.equal(before.pop("random"), after.pop("random")) and before == after
    assert all(torch.equal(tensor, weights[name]) for name, tensor in masters(trainer.actor).items())
    line = "ppo: warning: left-out step: step 1 is left out (1 of at most 1): the gradients of the actor model are not "
    assert line in capsys.readouterr().out
    with pytest.raises(StepNotTakenError, match="at step 2 "):
        take_step(trainer, context, 1)


def test_left_out_step_names_the_models_that_it_has_updated(ppo: Any, capsys: Any) -> None:
    trainer = ppo("critic", 1)
    context = replace(trainer.context, config=build_config({"alarms": {"skip_not_finite": 1}}))
    weights = masters(trainer.actor)
    assert take_step(trainer, context, 0) == {}
    assert any(not torch.equal(tensor, weights[name]) for name, tensor in masters(trainer.actor).items())
    line = "step 1 is left out, after updates of the actor model (1 of at most 1): the gradients of the critic model"
    assert line in capsys.readouterr().out


def test_number_of_left_out_steps_survives_a_restart(accelerator, recipe, tmp_path, monkeypatch):
    """A later process leaves out what the limit still allows, and the summary names all of them."""
    monkeypatch.setattr(loop, "explain_step", lambda *arguments: "somewhere")
    values = {**recipe, "alarms": {"skip_not_finite": 2}}

    def run(total: int, wrong: set[int]) -> dict[str, Any]:
        context = stage_context(accelerator, tmp_path, "sft", values)

        def fails(index: int) -> dict[str, float]:
            if index in wrong:
                raise NotFiniteError(SimpleNamespace(name="sft", placement=make_placement()), [], None)
            return {"rows": 1.0}

        return loop.fit(StubTrainer(context.config.sft, fails, total_steps=total), context)

    assert run(3, {1})["left_out_steps"] == [2]
    assert run(5, {4})["left_out_steps"] == [2, 5]
    with pytest.raises(StepNotTakenError, match="the gradients of the sft model are not finite at step 6 "):
        run(6, {5})


@pytest.mark.parametrize(
    ("metric", "key"),
    [("policy_loss", "optimizer"), ("value_loss", "critic_optimizer"), ("critic_grad_norm", "critic_optimizer")],
)
def test_number_that_is_not_finite_names_the_rate_of_its_model(accelerator, recipe, tmp_path, metric, key):
    context = stage_context(accelerator, tmp_path, "ppo", recipe)
    with pytest.raises(DivergedError, match=rf"{metric} became nan at step 3 .* lower ppo\.{key}\.learning_rate, or"):
        loop._check_finite({metric: float("nan")}, context, 3)


def test_no_checkpoint_is_written_of_weights_that_are_not_finite(accelerator, recipe, tmp_path):
    context, engine = stage_context(accelerator, tmp_path, "sft", recipe), build(accelerator, 1)
    trainer = StubTrainer(context.config.sft, total_steps=3, engines={"sft": engine})
    loop.save_checkpoint(trainer, context, 1)
    engine.optimizer.single_partition_of_fp32_groups[0].data[5] = float("inf")
    with pytest.raises(
        DivergedError, match=r"1 weights of the sft model are not finite after step 2, so no .*step-00000001"
    ):
        loop.save_checkpoint(trainer, context, 2)
    assert [path.name for path in context.directory.all_checkpoints] == ["step-00000001"]


TWO_RANKS = """
import accelerators, torch
from rlhf.engine import distributed
from rlhf.engine.engine import NotFiniteError
from tests.engine.engines import IDS, build, loss, masters
with distributed.start_process_group(accelerators.select("cpu", environ={})) as accelerator:
    rank = distributed.world().rank
    for zero_stage in range(4):
        engine = build(accelerator, zero_stage, "PRECISION", rows=2)
        before = masters(engine)
        factor = float("nan") if rank else 1.0
        try:
            engine.step([IDS.chunk(2)[rank]], lambda model, ids: (loss(model, ids)[0] * factor, dict()))
        except NotFiniteError:
            assert all(torch.equal(tensor, before[name]) for name, tensor in masters(engine).items())
        else:
            raise AssertionError(rank, zero_stage)
"""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_rank_takes_a_step_that_is_wrong_on_one(forks: Forks, precision: str) -> None:
    forks.ranks(2, TWO_RANKS.replace("PRECISION", precision))


ONE_KNOWS = """
import accelerators, torch
from rlhf.engine import distributed
from rlhf.engine.engine import NotFiniteError
from rlhf.trainers.not_finite import Watch, _repeat_training
from tests.engine.engines import IDS, build, loss
with distributed.start_process_group(accelerators.select("cpu", environ={})) as accelerator:
    rank = distributed.world().rank
    engine = build(accelerator, 3, rows=2)
    rows = {"input_ids": IDS.chunk(2)[rank]}
    failed = NotFiniteError(engine, [rows], lambda model, rows: loss(model, rows["input_ids"]))
    with Watch({"test": engine.module}) as watch:
        watch.micro_batch = rows
        if rank:
            watch.look_at(torch.tensor([float("nan")]), "test", "a layer", "output")
        _repeat_training(failed, watch)
    assert (watch.origin is not None) == bool(rank)
    assert distributed.all_gather_objects(rank) == [0, 1]
"""


def test_rank_that_has_found_the_origin_still_gathers_weights_for_the_others(forks: Forks) -> None:
    forks.ranks(2, ONE_KNOWS)


ONE_FAILS = """
import accelerators
from pathlib import Path
from types import SimpleNamespace
from rlhf.engine import distributed
from rlhf.trainers.not_finite import explain_step
with distributed.start_process_group(accelerators.select("cpu", environ={})):
    world = distributed.world()
    def repeat_scoring():
        if world.rank:
            raise MemoryError("too little")
        return []
    trainer = SimpleNamespace(repeat_scoring=repeat_scoring, tokenizer=None)
    context = SimpleNamespace(models={}, world=world, directory=SimpleNamespace(not_finite=Path("not-finite")))
    failed = SimpleNamespace(engine=SimpleNamespace(train=lambda: None), micro_batches=[])
    reason = explain_step(trainer, context, 1, failed)
    assert "could not be repeated" in reason and "too little" in reason, reason
    assert distributed.all_gather_objects(world.rank) == [0, 1]
"""


def test_search_that_fails_on_one_rank_ends_on_all(forks: Forks) -> None:
    forks.ranks(2, ONE_FAILS)
