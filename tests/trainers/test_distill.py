"""Distillation as a stage: its teachers, what it refuses, and the stages and commands that use its model."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from safetensors.torch import load_file

from rlhf.config.schema import build_config
from rlhf.evaluation import models
from rlhf.reporting.recorder import read_heldout
from rlhf.roles.base_sharing import predict_sharing
from rlhf.roles.lineage import TEACHER, resolve_base_model
from rlhf.roles.roles import model_placements
from tests.helpers import assert_same_weights, kill_at, llama, sets
from tests.optimum import language


@pytest.fixture(scope="module")
def adapted(rlhf: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stage with an adapter of the tiny model next to the model with the adapter merged in."""
    output = tmp_path_factory.mktemp("adapted") / "run"
    keys = ("lora.rank=2", "lora.save=both", "sft.optimizer.learning_rate=0.01", "sft.max_steps=4")
    rlhf("sft", "--output", output, *sets(*keys))
    return output / "sft"


def steps(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "distill" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "learning_rate" in line]


def losses(run: Path) -> list[float]:
    return [step["loss"] for step in steps(run)]


def test_adapter_teaches_what_its_merged_model_does(rlhf, adapted, model_folder, tmp_path):
    for name in ("model", "adapter"):
        keys = (f"distill.model={model_folder}", f"distill.teacher={adapted / name}")
        rlhf("distill", "--output", tmp_path / name, *sets(*keys))
    assert losses(tmp_path / "adapter") == pytest.approx(losses(tmp_path / "model"), rel=1e-5)
    assert losses(tmp_path / "adapter")[0] > 1e-3, "the adapter changes nothing"


def test_student_with_adapters_shares_its_base_with_an_adapter(rlhf, adapted, model_folder, tmp_path):
    """The same numbers as with two models; the teacher's own weights are its adapter."""
    shared = "student and teacher share one frozen base"
    for sharing in (True, False):
        keys = (f"distill.model={model_folder}", f"distill.teacher={adapted / 'adapter'}", "lora.rank=2")
        sharing_key = [] if sharing else ["lora.share_base=false"]
        printed = rlhf("distill", "--output", tmp_path / str(sharing), *sets(*keys, *sharing_key)).stdout
        assert (shared in printed) == sharing
    assert losses(tmp_path / "True") == pytest.approx(losses(tmp_path / "False"), rel=1e-4)
    assert losses(tmp_path / "True")[0] > 1e-3
    folders = model_folder, tmp_path / "True" / "distill" / "model"
    before, after = (load_file(folder / "model.safetensors") for folder in folders)
    assert any((before[name] != after[name]).any() for name in before), "nothing was learned"


def sharing(model: object, teacher: object, **sections: Any) -> dict[str, str]:
    values = {"lora": {"rank": 2}, "distill": {"model": str(model), "teacher": str(teacher)}} | sections
    config = build_config(values)
    return dict(predict_sharing(config, "distill", model_placements(config, "distill")).donors)


def test_teacher_shares_only_the_base_that_it_was_trained_on(adapted, model_folder, finished_run):
    assert sharing(model_folder, adapted / "adapter") == {"teacher": "student"}
    assert sharing(model_folder, adapted / "model") == {}
    assert sharing(finished_run / "sft" / "model", adapted / "adapter") == {}
    assert sharing(model_folder, adapted / "adapter", lora={"rank": 0}) == {}
    assert sharing(model_folder, adapted / "adapter", lora={"rank": 2, "share_base": False}) == {}
    assert sharing(model_folder, adapted / "adapter", engine={"zero_stage": 3}) == {}
    assert sharing(model_folder, adapted / "adapter", roles={"teacher": {"frozen": "int8"}}) == {}


def test_adapter_stands_for_its_model_and_itself(adapted, model_folder):
    config = build_config({"distill": {"teacher": str(adapted / "adapter")}})
    base = resolve_base_model(config, TEACHER)
    assert (base.path, base.adapter) == (str(model_folder), str(adapted / "adapter"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([], "distill.teacher: there is no model to learn from"),
        (["distill.teacher=/nowhere"], "/nowhere: no such model folder"),
        (["distill.teacher={other}"], "this model's vocabulary (5 tokens) is not that of the model that is trained"),
        (["distill.keep=best(judge_reward)", "distill.eval_every=1"], "needs distill.judge"),
        (["distill.teacher={same}", "roles.teacher.lora_rank=2"], "applies to trained models only, and the teacher"),
        (["distill.teacher={same}", "roles.judge.frozen=int8"], "there is no judge; set distill.judge"),
        (
            ["distill.teacher={same}", "distill.keep=best(approved_share)", "distill.eval_every=1"],
            "use best(judge_reward) with distill.judge, best(loss), or last",
        ),
        (["distill.teacher={same}", "distill.batch_size=3", "distill.micro_batch_size=2"], "distill.batch_size: 3"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(rlhf, finished_run, model_folder, tmp_path, keys, message):
    other = tmp_path / "other"
    llama(len(language.WORDS)).save_pretrained(other)
    language.tokenizer().save_pretrained(other)
    keys = [key.format(other=other, same=model_folder) for key in keys]
    arguments = sets(f"distill.model={finished_run / 'sft' / 'model'}", *keys)
    refused = rlhf("distill", "--output", tmp_path / "run", *arguments, check=False)
    assert refused.returncode == 2
    assert message in refused.stderr and refused.stderr.count("\n") == 1, refused.stderr
    assert not (tmp_path / "run" / "distill").exists()


def test_dry_run_and_plan_count_both_models(rlhf, finished_run, tmp_path):
    keys = sets(*(f"distill.{key}={finished_run / 'sft' / 'model'}" for key in ("model", "teacher")))
    printed = rlhf("distill", "--output", tmp_path / "run", *keys, "--dry-run").stdout
    assert "distill.teacher" in printed and "3 of 4 prompts" in printed
    assert not (tmp_path / "run").exists()
    plan = json.loads(rlhf("plan", "--stage", "distill", "--memory", "8GiB", "--json", *keys).stdout)
    (stage,) = plan
    assert set(stage["parameters"]) == {"student", "teacher"}
    assert {phase["phase"] for phase in stage["phases"]} == {"loading", "generation", "scoring", "training", "saving"}
    assert stage["parameters"]["teacher"]["trained"] == 0 < stage["parameters"]["student"]["trained"]


def test_judge_selects_the_model_that_is_saved(rlhf, finished_run, tmp_path):
    """The judge's own vocabulary and head are checked as PPO's are; its scores are those of the held-out rows."""
    models = {"model": "sft", "teacher": "ppo", "judge": "reward"}
    keys = [f"distill.{key}={finished_run / stage / 'model'}" for key, stage in models.items()]
    keys += ["distill.eval_every=1", "distill.keep=best(judge_reward)"]
    rlhf("distill", "--output", tmp_path / "run", *sets(*keys))
    summary = json.loads((tmp_path / "run" / "distill" / "stage.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "run" / "distill" / "metrics.jsonl").read_text().splitlines()]
    judged = {line["step"]: line["heldout_judge_reward"] for line in lines if "heldout_judge_reward" in line}
    assert list(judged) == [0, 1, 2, 3]
    assert summary["kept"]["value"] == max(judged[step] for step in (1, 2, 3))
    rows = read_heldout(tmp_path / "run" / "distill" / "heldout.jsonl", 3)
    for step, evaluated in rows.items():
        assert judged[step] == pytest.approx(fmean(row["judge"] for row in evaluated), rel=1e-4)


def arguments(finished_run: Path, output: Path) -> list[object]:
    models = [f"distill.{key}={finished_run / name / 'model'}" for key, name in (("model", "sft"), ("teacher", "ppo"))]
    return ["distill", "--output", output, *sets(*models, "distill.max_steps=6", "distill.checkpoint_every=1")]


@pytest.mark.slow
def test_killed_stage_resumes_to_the_same_weights(rlhf, finished_run, tmp_path):
    rlhf(*arguments(finished_run, tmp_path / "whole"))
    checkpoint = tmp_path / "killed" / "distill" / "checkpoints" / "step-00000002"
    kill_at(checkpoint, rlhf, *arguments(finished_run, tmp_path / "killed"))
    output = rlhf(*arguments(finished_run, tmp_path / "killed"), "--resume").stdout
    assert "distill: resumed after step" in output
    assert_same_weights(tmp_path / "killed" / "distill" / "model", tmp_path / "whole" / "distill" / "model")


def test_distillation_follows_sft_and_chat_takes_its_model(rlhf, finished_run, tmp_path):
    output = tmp_path / "run"
    printed = rlhf(
        "--stages", "sft,distill", "--output", output, *sets(f"distill.teacher={finished_run / 'ppo' / 'model'}")
    ).stdout
    assert "sft, distill" in printed and "distillation" in printed
    assert models.model_folder(output) == output / "distill" / "model"
