"""Evaluation during training, and the best model kept: measured again with plain transformers, killed, and resumed."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from rlhf.reporting.recorder import Recorder, read_heldout
from rlhf.reporting.timers import is_machine_dependent
from rlhf.runs.directory import RunDirectory
from rlhf.trainers.evaluation_schedule import EvaluationSchedule
from rlhf.trainers.loop import fit
from rlhf.trainers.supervised import SFTTrainer
from rlhf.trainers.trainer import EvalResult
from tests.forks import Forks
from tests.helpers import assert_same_weights, sets, weights
from tests.in_process import StubTrainer, stage_context
from tests.trainers.test_stage_numbers import HELDOUT, transformers_loss
from tests.trainers.tuned import BEST, PLACES, STEPS, tune


def records(folder: Path, stage: str = "sft") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / stage / "metrics.jsonl").read_text().splitlines()]


def measured(folder: Path, key: str = "heldout_perplexity", stage: str = "sft") -> dict[int, float]:
    """Return the recorded number of each evaluation by its step; no step is recorded twice."""
    numbers = [(record["step"], record[key]) for record in records(folder, stage) if key in record]
    assert [step for step, _ in numbers] == sorted({step for step, _ in numbers})
    return dict(numbers)


def perplexity(model: Path) -> float:
    """Return the number that plain transformers computes."""
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return transformers_loss(AutoModelForCausalLM.from_pretrained(model), HELDOUT).exp().item()


@pytest.fixture(scope="module")
def whole(accelerator: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A stage that nothing stopped: its folder and its summary."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, tune(accelerator, folder)


def test_kept_model_has_the_least_recorded_perplexity(whole):
    folder, summary = whole
    values = measured(folder)
    assert sorted(values) == list(range(STEPS + 1))
    best = min(range(1, STEPS + 1), key=values.__getitem__)
    assert best == BEST
    assert summary["kept"] == {"step": best, "metric": "perplexity", "value": values[best]}
    assert [summary[moment]["perplexity"] for moment in ("before", "after")] == [values[0], values[best]]
    assert perplexity(folder / "sft" / "model") == pytest.approx(values[best], rel=1e-5)
    assert not list((folder / "sft" / "best").glob("*/*"))


def test_it_is_the_model_of_a_stage_that_ends_there(whole, accelerator, tmp_path):
    """The learning rate is constant, so that the steps are the same."""
    summary = tune(accelerator, tmp_path, max_steps=BEST, eval_every=0, keep="last")
    assert summary["kept"] == {"step": BEST}
    assert sorted(measured(tmp_path)) == [0, BEST]
    assert_same_weights(tmp_path / "sft" / "model", whole[0] / "sft" / "model")


def test_last_model_is_kept_unless_the_best_is_requested(whole, accelerator, tmp_path):
    summary = tune(accelerator, tmp_path, keep="last", eval_every=5)
    values = measured(tmp_path)
    assert sorted(values) == [0, 5, 10, STEPS]
    assert values == {step: measured(whole[0])[step] for step in values}
    assert summary["kept"] == {"step": STEPS} and summary["after"]["perplexity"] == values[STEPS]
    assert perplexity(tmp_path / "sft" / "model") == pytest.approx(values[STEPS], rel=1e-5)
    assert not (tmp_path / "sft" / "best").exists()


def test_the_model_as_it_was_loaded_is_never_kept(accelerator, tmp_path):
    """Here training makes it worse from the first step on."""
    summary = tune(accelerator, tmp_path, max_steps=3, optimizer={"learning_rate": 3.0, "warmup": 0})
    values = measured(tmp_path)
    assert values[0] < min(values[step] for step in (1, 2, 3))
    assert summary["kept"]["step"] == min((1, 2, 3), key=values.__getitem__)


def test_epochs_are_measured_at_their_ends(accelerator, tmp_path):
    tune(accelerator, tmp_path, eval_every="epoch", max_steps=5)  # of two steps each
    assert sorted(measured(tmp_path)) == [0, 2, 4, 5]


@pytest.mark.parametrize(
    ("stage", "metric", "numbers", "steps"),
    [
        ("sft", "perplexity", [5.0, math.nan, 3.0, 4.0, 3.0, -math.inf], [2]),  # the first of equals, finite
        ("reward", "accuracy", [0.9, 0.5, 0.8, 0.6], [1, 2]),  # more is better
    ],
)
def test_best_model_is_the_first_of_the_best_finite_ones(accelerator, tmp_path, stage, metric, numbers, steps):
    context = stage_context(accelerator, tmp_path, stage, {stage: {"eval_every": 1, "keep": f"best({metric})"}})
    results, saved = iter(numbers), []
    trainer = StubTrainer(
        getattr(context.config, stage),
        total_steps=len(numbers) - 1,
        evaluate=lambda when: EvalResult({metric: next(results)}),
        save=lambda folder: (saved.append(folder.name), (folder / "model").mkdir(parents=True)),
    )
    assert fit(trainer, context)["kept"] == {"step": steps[-1], "metric": metric, "value": numbers[steps[-1]]}
    assert saved == [f"step-{step:08d}" for step in steps]


def test_best_reward_is_not_that_of_a_policy_that_left_its_reference(accelerator, tmp_path, capsys):
    """The numbers are those of a run without a KL penalty: the reward rises, and completions are one word repeated."""
    context = stage_context(accelerator, tmp_path, "ppo", {"ppo": {"eval_every": 1, "keep": "best(reward)"}})
    rows = iter([(2.507, 0.0, 10.93), (2.55, 1.2, 11.0), (2.666, 314.9, 48.0), (2.69, 388.2, 48.0)])

    def evaluate(when):
        return EvalResult(dict(zip(("reward", "kl", "response_length"), next(rows))))

    trainer = StubTrainer(
        context.config.ppo,
        total_steps=3,
        evaluate=evaluate,
        save=lambda folder: (folder / "model").mkdir(parents=True, exist_ok=True),
    )
    assert fit(trainer, context)["kept"] == {"step": 1, "metric": "reward", "value": 2.55}
    assert capsys.readouterr().out.count("ppo: warning: kl, step 2, held-out: the policy has left its reference") == 1


@pytest.mark.parametrize(
    ("approved", "said"),
    [
        (
            [0.4, 0.9, 0.5],
            "that of step 1 has a higher approved share, 90.0% instead of 50.0% (ppo.keep=best(approved_share))",
        ),
        ([0.9, 0.4, 0.5], ""),  # that before training is no choice
        ([None] * 3, "by the reward alone"),
    ],
)
def test_model_chosen_by_its_reward_is_doubted_unless_a_judge_agrees(accelerator, tmp_path, capsys, approved, said):
    context = stage_context(accelerator, tmp_path, "ppo", {"ppo": {"eval_every": 1, "keep": "best(reward)"}})
    rows = iter(zip([0.0, 1.0, 2.0], approved, strict=True))

    def evaluate(when):
        reward, share = next(rows)
        numbers = {"reward": reward, "kl": 0.1, "response_length": 10.0}
        return EvalResult(numbers | ({} if share is None else {"approved_share": share}))

    trainer = StubTrainer(
        context.config.ppo,
        total_steps=2,
        evaluate=evaluate,
        save=lambda folder: (folder / "model").mkdir(parents=True, exist_ok=True),
    )
    assert fit(trainer, context)["kept"]["step"] == 2
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "keeps the model of step 2" in line]
    assert said in line and (";" in line) == bool(said)


JUDGED = {0: [0.0] * 12, 1: [2.0] * 12, 2: [3.0] * 12, 3: [2.9] * 8 + [3.1] * 4, 4: [2.0] * 12, 5: [1.0] * 12}
"""The judge's scores of twelve completions: best after step 2; that of step 3 is lower, but not surely."""


def judged_ppo(
    accelerator: Any,
    folder: Path,
    rewards: dict[int, float],
    judged: dict[int, list[float]] = JUDGED,
    **settings: Any,
) -> Any:
    """The summary of five steps of PPO whose evaluations give these numbers, and the steps that were taken."""
    values = {"judge": "j", "eval_every": 1, "keep": "best(judge_reward)", "stop": "over_optimized", **settings}
    with Recorder(RunDirectory(folder).stage("ppo")) as recorder:
        context = stage_context(accelerator, folder, "ppo", {"ppo": values}, recorder=recorder)
        return fit_judged(context, rewards, judged)


def fit_judged(context: Any, rewards: dict[int, float], judged: dict[int, list[float]]) -> Any:
    """See `judged_ppo`."""
    taken: list[int] = []

    def evaluate(when: str) -> EvalResult:
        step = {"before": 0, "after": 5}.get(when) if " " not in when else int(when.split()[-1])
        numbers = {"reward": rewards[step], "kl": 0.1, "response_length": 10.0}
        return EvalResult(numbers | {"judge_reward": fmean(judged[step])}, judged=judged[step])

    trainer = StubTrainer(
        context.config.ppo,
        lambda index: taken.append(index + 1) or {"rows": 1.0, "lr": float(index)},
        total_steps=5,
        evaluate=evaluate,
        save=lambda place: (place / "model").mkdir(parents=True, exist_ok=True),
    )
    return fit(trainer, context), taken


RISING = dict(enumerate([0.0, 1.0, 2.0, 3.0, 4.0, 5.0]))


def test_training_ends_where_the_judge_surely_falls_while_reward_rises(accelerator, tmp_path, capsys):
    summary, taken = judged_ppo(accelerator, tmp_path, RISING)
    assert taken == [1, 2, 3, 4] and summary["steps"] == 4 and summary["over_optimized_since"] == 2
    assert summary["kept"] == {"step": 2, "metric": "judge_reward", "value": 3.0}
    said = capsys.readouterr().out
    line = "ended at step 4, over-optimized since step 2: reward 2.00 -> 4.00, the judge's score 3.00 -> 2.00"
    assert f"ppo: {line}" in said
    assert RunDirectory(tmp_path).stage("ppo").latest_checkpoint.name == "step-00000004"
    rewards = measured(tmp_path, "heldout_reward", "ppo")
    assert rewards == {step: float(step) for step in range(5)}, "an evaluation is missing or recorded twice"


def test_last_step_of_a_stage_that_ends_early_is_recorded_with_its_comparison(accelerator, tmp_path):
    judged_ppo(accelerator, tmp_path, RISING, log_every=3)
    steps = {record["step"]: record for record in records(tmp_path, "ppo") if "changed_frozen_weights" in record}
    assert sorted(steps) == [1, 4]
    assert steps[4]["lr"] == 3.0


def test_model_before_training_is_no_reason_to_end(accelerator, tmp_path):
    """The judge likes it best, as it cannot be kept; of the trained models, the score does not fall."""
    better_before = JUDGED | {0: [9.0] * 12, 3: [3.0] * 12, 4: [3.0] * 12, 5: [3.0] * 12}
    summary, taken = judged_ppo(accelerator, tmp_path, RISING, better_before)
    assert taken == [1, 2, 3, 4, 5] and summary["kept"]["step"] == 2 and "over_optimized_since" not in summary


def test_training_does_not_end_if_reward_falls_too_or_nothing_asks_for_it(accelerator, tmp_path):
    falling = dict(RISING) | {4: 1.5, 5: 1.5}
    assert judged_ppo(accelerator, tmp_path / "falls", falling)[1] == [1, 2, 3, 4, 5]
    summary, taken = judged_ppo(accelerator, tmp_path / "never", RISING, stop="never")
    assert taken == [1, 2, 3, 4, 5] and summary["kept"]["step"] == 2


def test_resumed_stage_ends_where_it_would_have_ended(accelerator, tmp_path):
    """One was killed after the evaluation of step 4 and its checkpoint, the other after the checkpoint of step 3."""
    whole, _ = judged_ppo(accelerator, tmp_path / "whole", RISING, checkpoint_every=1)
    for kept, again in ((4, []), (3, [4])):
        folder = tmp_path / f"after {kept}"
        judged_ppo(accelerator, folder, RISING, checkpoint_every=1)
        place = RunDirectory(folder).stage("ppo")
        for checkpoint in place.all_checkpoints:
            if int(checkpoint.name.removeprefix("step-")) > kept:
                shutil.rmtree(checkpoint)
        (place.best / "step-00000002" / "model").mkdir(parents=True)
        shutil.rmtree(place.model)
        summary, taken = judged_ppo(accelerator, folder, RISING, checkpoint_every=1)
        assert taken == again and summary == whole


def test_stage_without_a_sound_model_keeps_the_last(accelerator, tmp_path, capsys):
    context = stage_context(accelerator, tmp_path, "ppo", {"ppo": {"eval_every": 1, "keep": "best(reward)"}})
    rows = iter([(0.0, 0.0), (1.0, 300.0), (2.0, 300.0)])
    trainer = StubTrainer(
        context.config.ppo,
        total_steps=2,
        evaluate=lambda when: EvalResult(dict(zip(("reward", "kl"), next(rows))) | {"response_length": 10.0}),
    )
    assert fit(trainer, context)["kept"] == {"step": 2}
    assert "no evaluated model is worth keeping, so the last one is saved" in capsys.readouterr().out


def test_best_models_of_a_process_without_checkpoint_are_deleted(accelerator, tmp_path):
    """It was killed after an evaluation and before its first checkpoint."""
    context = stage_context(accelerator, tmp_path, "reward", {"reward": {"eval_every": 1, "keep": "best(accuracy)"}})
    (context.directory.best / "step-00000001" / "model").mkdir(parents=True)
    EvaluationSchedule(StubTrainer(context.config.reward, total_steps=2), context)
    assert not list(context.directory.best.iterdir())


def test_diverging_stage_says_so_once(accelerator, tmp_path, capsys):
    summary = tune(accelerator, tmp_path, keep="last", eval_every=0, optimizer={"learning_rate": 5.0, "warmup": 0})
    said = "sft: warning: loss, step 4: training diverges"
    assert capsys.readouterr().out.count(said) == 1 and summary["after"]["perplexity"] > 1e3
    texts = [record for record in records(tmp_path) if record.get("tag") == "warning"]
    [record] = texts
    assert record["text"] == f"loss, step 4: {record['state']}; {record['remedy']}"
    assert record["rule"] == "loss" and record["state"].startswith("training diverges: ")


def test_random_numbers_of_evaluations_change_no_training(accelerator, tmp_path):
    def drawn(folder: str, eval_every: int) -> list[float]:
        context = stage_context(accelerator, tmp_path / folder, "sft", {"sft": {"eval_every": eval_every}})
        numbers = []

        def step(index: int) -> dict[str, float]:
            numbers.append(torch.rand(1).item())
            return {"rows": 1.0}

        def evaluate(when: str) -> EvalResult:
            torch.rand(3)
            return EvalResult({"perplexity": 1.0})

        fit(StubTrainer(context.config.sft, step, total_steps=6, evaluate=evaluate), context)
        return numbers

    assert drawn("without", 0) == drawn("with", 2)


def same_training(first: Path, second: Path, stage: str) -> None:
    def steps(folder: Path) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in record.items() if key != "time" and not is_machine_dependent(key)}
            for record in records(folder, stage)
            if "learning_rate" in record
        ]

    assert steps(first) == steps(second) != []


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_evaluation_without_dropout_changes_no_bit_of_training(whole, accelerator, tmp_path, zero_stage):
    top = {"engine": {"zero_stage": zero_stage, "zero_persistence_threshold": 0}}
    for folder, eval_every in (("without", 0), ("with", 1)):
        tune(accelerator, tmp_path / folder, eval_every=eval_every, keep="last", dropout=0.2, top=top)
    same_training(tmp_path / "without", tmp_path / "with", "sft")
    assert_same_weights(tmp_path / "without" / "sft" / "model", tmp_path / "with" / "sft" / "model")
    assert perplexity(tmp_path / "with" / "sft" / "model") == pytest.approx(
        measured(tmp_path / "with")[STEPS], rel=1e-5
    )
    losses, plain = ([line["loss"] for line in records(f) if "loss" in line] for f in (tmp_path / "with", whole[0]))
    assert losses[0] != pytest.approx(plain[0], rel=1e-3), "nothing was dropped"


def test_evaluation_changes_no_bit_of_any_stage(rlhf, finished_run, tmp_path):
    settings = [f"{stage}.eval_every=1" for stage in ("sft", "reward", "ppo")] + ["ppo.keep=best(reward)"]
    done = rlhf("--output", tmp_path, *sets(*settings))
    for stage in ("sft", "reward", "ppo"):
        same_training(finished_run, tmp_path, stage)
    for stage in ("sft", "reward"):
        assert_same_weights(finished_run / stage / "model", tmp_path / stage / "model")
    rewards = measured(tmp_path, "heldout_reward", "ppo")
    assert sorted(rewards) == [0, 1, 2, 3]
    summary = json.loads((tmp_path / "ppo" / "stage.json").read_text())
    best = max((1, 2, 3), key=rewards.__getitem__)
    assert summary["kept"] == {"step": best, "metric": "reward", "value": rewards[best]}
    texts = [record for record in records(tmp_path, "ppo") if record.get("tag") == "heldout_0"]
    assert [record["step"] for record in texts] == [0, 1, 2, 3]
    assert texts[best]["text"].endswith(summary["samples"][0]["after"])
    lines = done.stdout.splitlines()
    assert any(line.startswith("reward: after step 1: accuracy ") and "% (before " in line for line in lines)
    assert any(line.startswith("ppo: after step 2: reward ") and "kl " in line for line in lines)
    assert any(line.startswith(f"ppo: keeps the model of step {best}, reward ") for line in lines)
    assert any(f"kept: the model of step {best}, best reward" in line for line in lines)


def test_judge_scores_as_a_reward_model_and_changes_no_bit_of_training(rlhf, finished_run, tmp_path):
    """The judge is the reward model itself, so both scores of a completion are equal."""
    models = {"actor": "sft", "reward_model": "reward", "judge": "reward"}
    named = [f"ppo.{key}={finished_run / stage / 'model'}" for key, stage in models.items()]
    rlhf("ppo", "--output", tmp_path, *sets(*named, "ppo.eval_every=1", "ppo.keep=best(judge_reward)"))
    judged, rewards = (measured(tmp_path, f"heldout_{name}", "ppo") for name in ("judge_reward", "reward"))
    assert sorted(judged) == [0, 1, 2, 3] and judged == pytest.approx(rewards, rel=1e-4)
    rows = [row for rows in read_heldout(tmp_path / "ppo" / "heldout.jsonl", 3).values() for row in rows]
    assert len(rows) > 8 and all(row["judge"] == row["reward"] for row in rows)
    assert len({row["judge"] for row in rows}) > 4, "all scores are equal, so nothing is tested"
    summary = json.loads((tmp_path / "ppo" / "stage.json").read_text())
    assert summary["kept"]["metric"] == "judge_reward" and summary["kept"]["value"] == max(list(judged.values())[1:])
    same_training(finished_run, tmp_path, "ppo")


@pytest.fixture(scope="module")
def killed(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    done = forks.python("-m", "tests.trainers.tuned", str(folder), timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_lost_evaluations_are_read_from_the_checkpoint(killed, whole, accelerator, tmp_path) -> None:
    """Without them the stage would choose among fewer models, and record fewer evaluations."""
    folder, (expected, summary) = tmp_path / "lost", whole
    shutil.copytree(killed / "a better model is kept than the checkpoint knows", folder)
    (folder / "sft" / "evaluations.json").unlink()
    assert tune(accelerator, folder) == summary
    assert measured(folder) == measured(expected)
    assert_same_weights(folder / "sft" / "model", expected / "sft" / "model")


@pytest.mark.parametrize("place", PLACES)
def test_a_stage_that_was_killed_keeps_what_it_would_have_kept(killed, whole, accelerator, monkeypatch, place):
    folder, (expected, summary), (_, step) = killed / place, whole, PLACES[place]
    evaluate, again = SFTTrainer.evaluate, []
    monkeypatch.setattr(SFTTrainer, "evaluate", lambda *arguments: again.append(arguments[-1]) or evaluate(*arguments))
    place_ = RunDirectory(folder).stage("sft")
    assert place_.latest_checkpoint and place_.latest_checkpoint.name == f"step-{step:08d}"
    known = map(int, json.loads((place_.path / "evaluations.json").read_text())["evaluations"])
    assert tune(accelerator, folder) == summary
    assert len(again) == STEPS - max(done for done in known if done <= step), "measured twice, or not at all"
    assert measured(folder) == measured(expected)
    assert_same_weights(folder / "sft" / "model", expected / "sft" / "model")
    same_training(folder, expected, "sft")


@contextmanager
def failing_at(monkeypatch: pytest.MonkeyPatch, moment: str) -> Iterator[None]:
    """SFT ends with an error when it is measured at that moment."""
    evaluate = SFTTrainer.evaluate

    def fails(*arguments: Any) -> Any:
        if arguments[-1] == moment:
            raise RuntimeError
        return evaluate(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(SFTTrainer, "evaluate", fails)
        with pytest.raises(RuntimeError):
            yield


def test_no_model_of_steps_that_were_done_differently_is_kept(accelerator, tmp_path, monkeypatch):
    """After the checkpoint of step 6, step 7 is the best; resumed for more steps, it has another learning rate."""
    slower = {"learning_rate": 0.03, "warmup": 0, "schedule": "linear"}
    with failing_at(monkeypatch, "after step 8"):
        tune(accelerator, tmp_path, optimizer=slower, epochs=5)
    stale = measured(tmp_path)
    assert (tmp_path / "sft" / "best" / "step-00000007").is_dir()
    summary = tune(accelerator, tmp_path, optimizer=slower, epochs=7)
    values = measured(tmp_path)
    assert stale[7] != values[7] and stale[6] == values[6], "the steps are the same, so that nothing is tested"
    assert summary["kept"]["value"] == min(value for step, value in values.items() if step)
    assert perplexity(tmp_path / "sft" / "model") == pytest.approx(summary["kept"]["value"], rel=1e-5)


def test_the_earlier_checkpoint_has_its_best_model_too(whole, accelerator, tmp_path, monkeypatch):
    """The newest checkpoint cannot be read, and is moved away: what was the best before is there."""
    with failing_at(monkeypatch, "after step 7"):
        tune(accelerator, tmp_path)
    best_models = {path.name for path in (tmp_path / "sft" / "best").iterdir()}
    values = measured(tmp_path)
    assert best_models == {f"step-{min(range(1, until + 1), key=values.__getitem__):08d}" for until in (3, 6)}
    (tmp_path / "sft" / "checkpoints" / "step-00000006").rename(tmp_path / "away")
    assert tune(accelerator, tmp_path) == whole[1]
    assert measured(tmp_path) == measured(whole[0])
    assert_same_weights(tmp_path / "sft" / "model", whole[0] / "sft" / "model")


def test_a_kept_model_that_is_gone_is_named(accelerator, tmp_path, monkeypatch):
    from rlhf.errors import RunError

    evaluate = SFTTrainer.evaluate

    def deletes(*arguments: Any) -> Any:
        if arguments[-1] == "after":
            shutil.rmtree(tmp_path / "sft" / "best")
        return evaluate(*arguments)

    monkeypatch.setattr(SFTTrainer, "evaluate", deletes)
    with pytest.raises(RunError, match=r"best/step-00000007: .* missing"):
        tune(accelerator, tmp_path)


def test_stage_started_without_evaluations_resumes_with_them(accelerator, tmp_path):
    """`eval_every` may change when a stage is resumed, and so may the number of steps."""
    tune(accelerator, tmp_path, max_steps=4, eval_every=0, keep="last")
    tune(accelerator, tmp_path, max_steps=8, eval_every=3, keep="last")
    assert sorted(measured(tmp_path)) == [0, 4, 6, 8]


@pytest.mark.parametrize("save", ["merged", "both"])
def test_adapters_are_kept_with_the_model_that_has_them_merged(accelerator, tmp_path, save):
    from rlhf.roles.model_identity import fingerprint_model

    lora = {"rank": 4, "save": save}
    optimizer = {"learning_rate": 0.01, "warmup": 0, "schedule": "constant"}
    summary = tune(accelerator, tmp_path, optimizer=optimizer, top={"lora": lora})
    values = measured(tmp_path)
    best = min(range(1, STEPS + 1), key=values.__getitem__)
    assert summary["kept"]["step"] == best < STEPS
    assert perplexity(tmp_path / "sft" / "model") == pytest.approx(values[best], rel=1e-4)
    adapter = tmp_path / "sft" / "adapter"
    assert adapter.is_dir() == (save == "both")
    if save == "both":
        base = json.loads((adapter / "base.json").read_text())
        assert base["merged"] == fingerprint_model(str(tmp_path / "sft" / "model"))


@pytest.mark.slow
def test_two_ranks_evaluate_and_keep_together(rlhf, tmp_path):
    """At ZeRO-3 each holds a half of the model; what is kept is whole."""
    settings = ["sft.max_steps=6", "sft.eval_every=2", "sft.keep=best(perplexity)", "sft.checkpoint_every=1"]
    settings += ["engine.zero_stage=3", "sft.optimizer.learning_rate=0.05"]
    for ranks in (1, 2):
        rlhf("sft", "--output", tmp_path / str(ranks), "--ranks", ranks, *sets(*settings))
    alone, together = (measured(tmp_path / str(ranks)) for ranks in (1, 2))
    assert sorted(together) == [0, 2, 4, 6] and together == pytest.approx(alone, rel=1e-3)
    choices = [json.loads((tmp_path / str(ranks) / "sft" / "stage.json").read_text())["kept"] for ranks in (1, 2)]
    assert choices[0]["step"] == choices[1]["step"] == min((2, 4, 6), key=together.__getitem__)
    expected, actual = (weights(tmp_path / str(ranks) / "sft" / "model") for ranks in (1, 2))
    assert all(torch.allclose(expected[name], actual[name], atol=1e-3) for name in expected)
