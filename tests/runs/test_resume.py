"""A run records its settings and rows: a resumed run reads them there, and others are refused."""

import copy
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from rlhf.cli.options import Options
from rlhf.config.schema import EVERY_STAGE, STAGES, Config, RolesConfig, Stage, load_config
from rlhf.errors import ConfigError, RunError
from rlhf.launchers.exit_status import Interrupted
from rlhf.runs.directory import RunDirectory
from rlhf.runs.resume import find_differences, find_first_difference
from rlhf.trainers import run as launch
from rlhf.utils.file_lock import LOCK
from tests.run_folders import accelerator, check, config_in, contents, record, run_stages

ROWS = {"a.jsonl": {"rows": 76, "digest": "12"}}


def test_recipe_of_a_run_gives_its_settings_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    run = run_stages(load_config(None, ["output=run", "model.path=model", "data.datasets=rows.jsonl"]), "sft")
    recorded = json.loads(run.description.read_text())["config"]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = load_config(tmp_path / "run" / "recipe.yaml")
    assert config.output == tmp_path / "run" and config.model.path == str(tmp_path / "model")
    assert config.data.datasets[0].path == str(tmp_path / "rows.jsonl")
    assert config.model_dump(mode="json") == recorded


@pytest.mark.parametrize("stages", [STAGES, ("reward",)])
def test_resume_without_a_recipe_takes_the_runs(tmp_path: Path, stages: tuple[Stage, ...]) -> None:
    run_stages(config_in(tmp_path / "run", "sft.batch_size=8", "ppo.kl_coef=0.3"), "sft")
    options = Options(output=tmp_path / "run", overrides=["ppo.steps=7"]).with_run_recipe(stages)
    config = options.load()
    assert options.config == tmp_path / "run" / "recipe.yaml"
    assert (config.sft.batch_size, config.ppo.kl_coef, config.ppo.steps) == (8, 0.3, 7)


def test_moved_run_resumes_in_its_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_stages(config_in(tmp_path / "run"), "sft")
    (tmp_path / "here" / "runs").mkdir(parents=True)
    moved = tmp_path / "here" / "runs" / "default"
    (tmp_path / "run").rename(moved)
    monkeypatch.chdir(tmp_path / "here")
    for options in (Options(output=moved), Options(overrides=[f"output={moved}"]), Options()):
        assert options.with_run_recipe(("reward",)).load().output.resolve() == moved


def test_overwrite_with_another_model_starts_from_the_defaults(tmp_path: Path) -> None:
    """What suits the embedded model would ruin it."""
    run_stages(config_in(tmp_path / "run", "ppo.kl_coef=0.3"), *STAGES)
    same = Options(output=tmp_path / "run", overwrite=True, overrides=["ppo.steps=7"]).with_run_recipe(STAGES).load()
    assert (same.ppo.kl_coef, same.ppo.steps) == (0.3, 7)
    options = Options(output=tmp_path / "run", overwrite=True, overrides=["model.path=./other"])
    assert options.with_run_recipe(STAGES).load().sft == Config().sft
    assert options.with_run_recipe(("ppo",)).load().sft == load_config().sft  # the others stay


def test_a_file_in_the_place_of_a_run_has_no_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--set output=5: expected a path"):
        Options(overrides=["output=5"]).with_run_recipe(STAGES).load()
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        assert Options(output=folder).with_run_recipe(STAGES).config is None


def test_backup_is_restored_before_the_recipe_is_read(tmp_path: Path) -> None:
    """The killed run's recipe is not that of the run that is resumed."""
    run = run_stages(config_in(tmp_path / "run", "ppo.steps=200"), "ppo", finish=False)
    new = config_in(tmp_path / "run", "ppo.steps=5")
    opened = run.open_for(new, stages=("ppo",), overwrite=True)
    opened.__enter__()  # and then the process dies
    (tmp_path / "run" / LOCK).unlink()
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "run", copy)
    assert load_config(copy / "recipe.yaml").ppo.steps == 5
    assert Options(output=copy, resume=True).with_run_recipe(("ppo",)).load().ppo.steps == 200
    opened.__exit__(None, None, None)


def test_lost_recipe_is_written_again(tmp_path: Path) -> None:
    run = run_stages(config_in(tmp_path / "run", "ppo.kl_coef=0.3"), "sft")
    run.recipe.unlink()
    assert Options(output=run.path).with_run_recipe(("reward",)).load().ppo.kl_coef == 0.3
    assert run.recipe.is_file()
    named = tmp_path / "named.yaml"
    named.write_text("seed: 5")
    assert Options(config=named, output=run.path).with_run_recipe(STAGES).load().seed == 5


def test_resume_with_prefer_none_is_no_difference(tmp_path: Path) -> None:
    """That it does not decide changes no row."""
    rows = "data.datasets=[{path: a}]"
    run_stages(config_in(tmp_path / "run", rows), "sft")
    check(config_in(tmp_path / "run", rows, "data.datasets.0.prefer=none"), stages=("reward",))
    decided = "data.datasets=[{path: a, columns: {first: x, second: y}, prefer: {scores: [s, t]}}]"
    with pytest.raises(RunError, match=r"prefer\.scores"):
        check(config_in(tmp_path / "run", decided), stages=("reward",))


@pytest.mark.parametrize("override", ["seed=5", "data.stage_split=[1,1,1]", "data.datasets.0.path=x", "model.path=x"])
def test_a_stage_of_other_shared_settings_is_no_continuation(tmp_path: Path, override: str) -> None:
    run_stages(config_in(tmp_path / "run"), "sft")
    key = override.split("=")[0]
    with pytest.raises(RunError, match=f"other settings.*{key}.*there.*now"):
        check(config_in(tmp_path / "run", override), stages=("reward",))


def test_sections_of_other_stages_may_change_and_stay_recorded(tmp_path: Path) -> None:
    run_stages(config_in(tmp_path / "run", "sft.batch_size=8"), "sft")
    run = run_stages(config_in(tmp_path / "run", "sft.batch_size=16", "ppo.kl_coef=0.3"), "reward")
    assert json.loads(run.description.read_text())["config"]["sft"]["batch_size"] == 8
    assert load_config(run.recipe).sft.batch_size == 8


def test_texts_of_ppo_may_be_named_when_it_begins_and_no_later(tmp_path: Path) -> None:
    run, texts = tmp_path / "run", "data.pretraining=[{path: texts.txt}]"
    run_stages(config_in(run), "sft", "reward")
    check(config_in(run, texts), stages=("ppo",))
    run_stages(config_in(run, texts), "ppo")
    for stage, wishes in (("ppo", {"resume": True}), ("dpo", {})):
        with pytest.raises(RunError, match=r"other settings: data.pretraining \("):
            check(config_in(run), stages=(stage,), **wishes)
    check(config_in(run), stages=("ppo",), overwrite=True)


def test_each_stage_is_compared_with_its_own_settings(tmp_path: Path) -> None:
    run_stages(config_in(tmp_path / "run", "engine.frozen=int8"), "ppo", finish=False)
    run_stages(config_in(tmp_path / "run", "engine.frozen=auto"), "sft")
    check(config_in(tmp_path / "run", "engine.frozen=int8"), stages=("ppo",), resume=True)
    with pytest.raises(RunError, match="frozen"):
        check(config_in(tmp_path / "run"), stages=("ppo",), resume=True)


@pytest.mark.parametrize(
    ("override", "unfinished", "complete"),
    [
        ("ppo.kl_coef=0.3", False, False),
        ("engine.frozen=int8", False, False),
        ("engine.zero_stage=2", True, True),
        ("precision=fp32", False, False),
        ("ppo.steps=200", True, False),
        ("ppo.log_every=5", True, True),
        ("ppo.checkpoint_every=7", True, True),
        ("ppo.micro_batch_size=1", True, True),
        ("ppo.generation_batch_size=1", True, True),
        ("ppo.ema=0.5", False, False),
        ("ppo.ema_on_host=true", True, True),
        ("model.gradient_checkpointing=true", True, True),
        ("accelerator=cpu", True, True),
    ],
)
def test_stage_resumes_with_settings_that_change_no_result(
    tmp_path: Path, override: str, unfinished: bool, complete: bool
) -> None:
    for finish, allowed in ((False, unfinished), (True, complete)):
        run = tmp_path / str(finish)
        run_stages(config_in(run, "ppo.ema=0.9"), "ppo", finish=finish)
        context = nullcontext() if allowed else pytest.raises(RunError, match=override.split("=")[0])
        with context:
            check(config_in(run, "ppo.ema=0.9", override), stages=("ppo",), resume=True)


HARMLESS = {
    *("output", "accelerator", "precision", "record_steps", "sinks", "sinks_timeout"),
    *("alarms.stop", "alarms.compare_every", "alarms.skip_not_finite"),
    *("model.gradient_checkpointing", "data.datasets.0.prefer.nothing"),
    *(
        "lora.share_base",
        "lora.merge",
        "lora.save",
        "engine.kernels",
        "engine.timeout",
        "engine.disk_wait",
        "engine.deterministic",
    ),
    *(f"engine.{key}" for key in ("zero_stage", "zero_persistence_threshold", "offload", "nvme")),
    *(f"roles.{role}.{key}" for role in RolesConfig.model_fields for key in ("offload", "gradient_checkpointing")),
    *(f"roles.{role}.zero_stage" for role in RolesConfig.model_fields),
    *(f"{stage}.{key}" for stage in EVERY_STAGE for key in ("micro_batch_size", "log_every", "epochs")),
    *(f"{stage}.{key}" for stage in EVERY_STAGE for key in ("checkpoint_every", "eval_every")),
    *("sft.max_steps", "reward.max_steps", "dpo.max_steps", "distill.max_steps", "ppo.steps"),
    *("ppo.reward_timeout", "ppo.save_critic", "ppo.samples_every", "ppo.samples", "ppo.generation_batch_size"),
    *("ppo.generation_weights", "ppo.tensor_parallel", "ppo.reuse_forward", "ppo.ema_on_host"),
    *("ppo.rollout.where", "ppo.rollout.weights", "ppo.rollout.timeout", "distill.generation_batch_size"),
    *("distill.teacher_servers", "distill.teacher_timeout"),
}
"""Keys that a resumed stage may change, because they change no row, no gradient and no step; `precision` is compared
once `auto` is resolved. Before you add one: does it change anything that is learned?"""


def find_leaves(value: Any, *path: str | int) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of each setting in a dumped configuration."""
    if isinstance(value, dict) and value:
        for key, below in value.items():
            yield from find_leaves(below, *path, key)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for index, below in enumerate(value):
            yield from find_leaves(below, *path, index)
    else:
        yield path


def test_only_harmless_keys_may_differ_on_resume() -> None:
    config = load_config(None, ["data.datasets=[{path: a.jsonl}]", "data.pretraining=[{path: texts.txt}]"])
    values = config.model_dump(mode="json")
    silent = set()
    for path in find_leaves(values):
        recorded = copy.deepcopy(values)
        section: Any = recorded
        for key in path[:-1]:
            section = section[key]
        section[path[-1]] = "another"
        if not find_differences({"config": recorded}, config, EVERY_STAGE):
            silent.add(".".join(map(str, path)))
    assert silent == HARMLESS


@pytest.mark.parametrize("finish", [False, True])
def test_stage_resumes_only_in_its_precision(tmp_path: Path, finish: bool) -> None:
    config = config_in(tmp_path / "run")
    run = RunDirectory(config.output)
    with run.open_for(config, stages=("sft",), accelerator=accelerator("bf16")):
        record(run.stage("sft"), 1)
        if finish:
            run.stage("sft").finish({"stage": "sft"})
    before = contents(run.path)
    wishes: Any = {"stages": ("sft",), "resume": True}
    check(config, **wishes)
    check(config_in(tmp_path / "run", "precision=bf16"), **wishes, accelerator=accelerator("bf16"))
    with pytest.raises(RunError, match="'bf16' there, 'fp32' now"):
        check(config_in(tmp_path / "run", "precision=fp32"), **wishes)
    if not finish:
        message = r"precision \('bf16' there, auto, which is fp32 here, now\)"
        with pytest.raises(RunError, match=message), run.open_for(config, **wishes, accelerator=accelerator("fp32")):
            pass
        with pytest.raises(RunError, match=message):  # as a dry run does
            check(config, **wishes, accelerator=accelerator("fp32"))
    assert contents(run.path) == before


@pytest.mark.parametrize("folder", ["absent", "empty"])
def test_a_folder_without_a_run_cannot_be_resumed(tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunError, match=f"{folder}: holds no run to resume; check --output"):
        check(config_in(tmp_path / folder), resume=True)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("override", "recorded", "now"),
    [
        ("ppo.steps=120", 40, 120),
        ("ppo.optimizer.learning_rate=0.1", 0.0002, 0.1),
        ("sft.epochs=3", 2, 3),
        ("reward.max_steps=2", 270, 2),
        ("lora.rank=4", 0, 4),
        ("precision=bf16", "fp32", "bf16"),
    ],
)
def test_complete_run_with_other_settings_is_refused(tmp_path: Path, override: str, recorded: Any, now: Any) -> None:
    run = run_stages(config_in(tmp_path / "run", "precision=fp32"), *STAGES)
    before = contents(run.path)
    config = config_in(tmp_path / "run", "precision=fp32", override)
    with pytest.raises(RunError) as caught:
        check(config, resume=True)
    key = override.partition("=")[0]
    assert f"trained with other settings: {key} ({recorded!r} there, {now!r} now)" in str(caught.value)
    assert contents(run.path) == before


def test_settings_of_later_stages_may_differ_from_complete_ones(tmp_path: Path) -> None:
    run_stages(config_in(tmp_path / "run"), "sft")
    check(config_in(tmp_path / "run", "ppo.steps=7", "engine.zero_stage=2"), resume=True)
    with pytest.raises(RunError, match=r"sft\.epochs"):
        check(config_in(tmp_path / "run", "sft.epochs=7"), resume=True)


def test_changed_source_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    config, run = config_in(tmp_path / "run"), RunDirectory(tmp_path / "run")
    with run.open_for(config, stages=("sft",), data=ROWS):
        record(run.stage("sft"), 1)
    before = contents(run.path)
    changed = {"a.jsonl": {"rows": 57, "digest": "34"}, "b.jsonl": {"rows": 1, "digest": "5"}}
    for stages, wishes in ((("sft",), {"resume": True}), (("reward",), {})):
        with (
            pytest.raises(
                RunError, match=r"made with other rows: a\.jsonl \(76 rows there, 57 now\); restore the original data"
            ),
            run.open_for(config, stages=stages, data=changed, **wishes),
        ):
            pass
    assert contents(run.path) == before
    with run.open_for(config, stages=("sft",), resume=True, data=ROWS):
        pass


def test_moved_project_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or is mounted elsewhere, in a container."""

    def project(name: str) -> Config:
        monkeypatch.chdir(tmp_path / name)
        return load_config(Path("recipe.yaml"))

    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "recipe.yaml").write_text("output: run\nmodel: {path: ./model}\ndata: {datasets: rows.jsonl}\n")
    config = project("a")
    run = RunDirectory(config.output)
    rows = {f"{tmp_path}/a/rows.jsonl": {"rows": 76, "digest": "12"}}
    with run.open_for(config, stages=("sft",), data=rows):
        record(run.stage("sft"), 1)
    (tmp_path / "a").rename(tmp_path / "b")
    moved = {f"{tmp_path}/b/rows.jsonl": {"rows": 76, "digest": "12"}}
    check(project("b"), stages=("sft",), resume=True, data=moved)
    with pytest.raises(RunError, match=r"b/rows\.jsonl \(as many rows, but others\)"):
        check(project("b"), stages=("sft",), resume=True, data={name: {"rows": 76, "digest": "3"} for name in moved})
    with pytest.raises(RunError, match=r"model\.path \('.*/a/model' there, '.*/b/other' now\)"):
        check(load_config(Path("recipe.yaml"), ["model.path=./other"]), stages=("sft",), resume=True)


def test_first_difference_names_the_key_and_the_ranks(tmp_path: Path) -> None:
    configs = [config_in(tmp_path / "run", f"ppo.steps={steps}").model_dump(mode="json") for steps in (7, 7, 9)]
    assert find_first_difference(configs[:2]) == ""
    assert find_first_difference(configs) == "ppo.steps (7 on rank 0, 9 on rank 2)"


def test_interruption_prints_the_command_that_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything of it is kept, that is the command that was given: the folder is as it was, with its settings."""

    def interrupted(config: Config, selection: Any, request: Any, pending: Any) -> None:
        directory = RunDirectory(config.output)
        with directory.open_for(config, stages=request.stages, resume=request.resume, overwrite=request.overwrite):
            if steps:
                record(directory.stage("reward"), *steps)
                directory.commit(directory.stage("reward"))
            raise KeyboardInterrupt

    run = run_stages(config_in(tmp_path / "run"), "sft")
    monkeypatch.setattr(launch, "_open", interrupted)
    monkeypatch.setenv("RLHF_ACCELERATOR", "cpu")
    config = config_in(tmp_path / "run", "reward.optimizer.learning_rate=0.7")
    steps: list[int] = []
    with pytest.raises(Interrupted, match=re.escape(f"sft is complete; to start again: {shlex.join(sys.orig_argv)}")):
        launch.run(config, stages=("reward",))
    assert load_config(run.recipe).reward.optimizer.learning_rate != 0.7
    steps = [1]
    with pytest.raises(Interrupted, match=rf"; to continue: rlhf reward --output {run.path} --resume$"):
        launch.run(config, stages=("reward",), accelerator="cpu")
    goes_on = Options(output=run.path, resume=True).with_run_recipe(("reward",)).load()
    assert goes_on.reward.optimizer.learning_rate == 0.7 and goes_on.accelerator == "cpu"
    with pytest.raises(Interrupted, match=rf"; to continue: rlhf --stages reward,dpo --output {run.path} --resume$"):
        launch.run(config, stages=("reward", "dpo"), resume=True)


def test_a_run_that_is_replaced_may_have_other_rows(tmp_path: Path) -> None:
    config, run = config_in(tmp_path / "run"), RunDirectory(tmp_path / "run")
    with run.open_for(config, stages=("sft",), data=ROWS):
        record(run.stage("sft"), 1)
    with run.open_for(config, stages=("sft",), overwrite=True, data={"a.jsonl": {"rows": 57, "digest": "34"}}):
        record(run.stage("sft"), 1)
    assert json.loads(run.description.read_text())["data"]["a.jsonl"]["rows"] == 57
