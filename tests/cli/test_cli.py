"""The command line as a user meets it: help, options before and after commands, errors and exit codes."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from rlhf.cli.app import app
from rlhf.cli.options import Options
from rlhf.cli.tables import print_table
from rlhf.config.loader import parse_yaml
from rlhf.config.schema import Config, build_config, load_config
from rlhf.errors import RunError
from rlhf.launchers import local
from rlhf.launchers.exit_status import ExitStatus
from rlhf.runs.directory import RunDirectory
from rlhf.trainers import run as launch

Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def rlhf(tmp_path: Path) -> Command:
    """Runs the command in an empty folder."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("RLHF_", "RANK", "WORLD_", "LOCAL_", "MASTER_"))
    }
    environment |= {"COLUMNS": "100", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rlhf", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment | variables, capture_output=True, text=True, timeout=120, check=False
        )

    return run


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of an error that the user can fix."""
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("rlhf: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return lines[0].removeprefix("rlhf: error: ")


def test_help_shows_every_command_and_examples(rlhf: Command) -> None:
    done = rlhf("--help")
    assert done.returncode == 0
    for word in ("sft", "reward", "ppo", "chat", "config", "accelerators", "Examples"):
        assert word in done.stdout


def test_every_option_and_argument_is_explained() -> None:
    root = get_command(app)
    commands = [root, *(getattr(root, "commands", {}).values())]
    assert len(commands) > 5
    for command in commands:
        assert command.help, command.name
        for parameter in command.params:
            assert getattr(parameter, "help", ""), f"{command.name}: {parameter.name}"


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_every_stage_takes_every_run_option(rlhf: Command, stage: str) -> None:
    text = rlhf(stage, "--help").stdout
    for field in fields(Options):
        option = "--set" if field.name == "overrides" else f"--{field.name.replace('_', '-')}"
        assert option in text


def test_help_needs_no_heavy_import() -> None:
    script = (
        "import sys; sys.argv = ['rlhf', '--help']\n"
        "from rlhf.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'deepspeed', 'datasets', 'numpy'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_the_version_is_shown(rlhf: Command) -> None:
    assert re.fullmatch(r"rlhf \d+\.\d+\.\d+\n", rlhf("--version").stdout)


def test_stages_may_be_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[object] = []
    monkeypatch.setattr(launch, "run", lambda config, *, stages, **options: asked.append(stages))
    for listed in (["--stages", "sft,dpo"], ["--stages", "reward, ppo"], ["--stages", "sft"], []):
        assert CliRunner().invoke(app, [*listed, "--output", str(tmp_path)]).exit_code == 0
    assert asked == [("sft", "dpo"), ("reward", "ppo"), ("sft",), ("sft", "reward", "ppo")]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--stages", "sft,pp"], "--stages sft,pp: no stage 'pp'; use some of sft, reward, dpo, ppo"),
        (["--stages", ""], "--stages : no stage ''; use some of sft, reward, dpo, ppo"),
        (["--stages", "ppo,sft"], "--stages ppo,sft: each stage runs once, and in this order: sft,ppo; write that"),
        (["--stages", "sft,sft"], "--stages sft,sft: each stage runs once, and in this order: sft; write that"),
        (["--stages", "sft", "ppo"], "--stages sft: is for `rlhf` without a command; leave `ppo` out"),
    ],
)
def test_a_list_that_is_no_order_of_stages_is_refused_in_one_line(given: list[str], words: str) -> None:
    outcome = ExitStatus.from_error(CliRunner().invoke(app, given).exception)
    assert (outcome.code, outcome.line) == (2, f"rlhf: error: {words}")


def test_options_may_stand_before_and_after_a_command(rlhf: Command) -> None:
    done = rlhf("--seed", "3", "--set", "ppo.steps=5", "config", "--set", "ppo.kl_coef=0.25", "--output", "2024")
    config = parse_yaml(done.stdout)
    assert (config["seed"], config["ppo"]["steps"], config["ppo"]["kl_coef"]) == (3, 5, 0.25)
    assert config["output"] == "2024"


def test_an_option_after_the_command_stands_above_one_before(rlhf: Command) -> None:
    assert parse_yaml(rlhf("--seed", "3", "config", "--seed", "4").stdout)["seed"] == 4


def printed(*arguments: str, before: Sequence[str] = ()) -> str:
    """What `rlhf config` prints."""
    done = CliRunner().invoke(app, [*before, "config", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_seed_of_zero_counts(tmp_path: Path) -> None:
    assert config_of(printed("--seed", "0", before=["--seed", "3"])).seed == 0
    (tmp_path / "recipe.yaml").write_text("seed: 5\n")
    assert config_of(printed("--config", str(tmp_path / "recipe.yaml"), "--seed", "0")).seed == 0


def test_a_folder_may_have_any_name() -> None:
    assert config_of(printed("--output", "runs/😀 ä: #1")).output == Path("runs/😀 ä: #1")


def config_of(text: str) -> Config:
    return build_config(parse_yaml(text))


def test_the_printed_recipe_can_be_given_back(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(printed("--set", "ppo.steps=5", "--set", "ppo.optimizer.learning_rate=1.25e-5"))
    given = load_config(path)
    assert config_of(printed("--config", str(path))) == given
    assert (given.ppo.steps, given.output) == (5, tmp_path / "runs" / "default")


def test_the_printed_recipe_holds_the_defaults_of_a_real_run() -> None:
    assert config_of(printed()) == Config()
    assert printed().startswith("# The default of every key.")
    for changed in (["--set", "seed=4"], ["--seed", "4"]):
        assert config_of(printed(*changed)) == Config(seed=4)
        assert "the command line" in " ".join(printed(*changed).partition("\n\n")[0].replace("#", "").split())
    assert "the command line" not in " ".join(printed().partition("\n\n")[0].replace("#", "").split())


def test_the_example_is_printed_when_it_is_asked_for_and_says_what_it_is() -> None:
    assert config_of(printed("--example")) == load_config()
    assert printed("--example").startswith("# The embedded example")
    kept = config_of(printed("--example", "--set", "model.path=x"))
    assert kept.model.path == "x" and kept.sft == load_config().sft


def test_a_recipe_is_printed_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("seed: 3\n")
    text = printed("--config", str(tmp_path / "mine.yaml"))
    assert "mine.yaml, and the default" in " ".join(text.replace("#", "").split())
    assert config_of(text) == Config(seed=3, output=Path.cwd() / "runs" / "default")


def test_paths_of_a_recipe_are_printed_so_that_they_hold_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text("model: {path: ./model}\ndata: {datasets: [../x.jsonl, world]}\n")
    monkeypatch.chdir(tmp_path)
    text = printed("--config", "recipes/mine.yaml", "--output", "run")
    assert "Paths are absolute." in " ".join(text.replace("#", "").split())
    shown = config_of(text)
    assert (shown.model.path, shown.output) == (str(tmp_path / "recipes" / "model"), tmp_path / "run")
    assert [source.path for source in shown.data.datasets] == [str(tmp_path / "x.jsonl"), "world"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--zzz"], "No such option: --zzz; see `rlhf --help`"),
        (["train"], "No such command 'train'"),
        (["sft", "--seed", "x"], "Invalid value for '--seed'"),
        (["--set", "ppo.stepz=5"], "unknown key 'ppo.stepz'; did you mean 'steps'?"),
        (["--config", "absent.yaml"], "absent.yaml: cannot be read"),
        (["--precision", "bf8"], "--precision bf8: expected 'auto', 'bf16', 'fp16' or 'fp32', got 'bf8'"),
        (["--set", "seed=x"], "--set seed=x: expected a whole number"),
        (["--accelerator", "tpu9"], "accelerator 'tpu9'"),
        (["--set", "sft.batch_size=9", "--ranks", "2"], "sft.batch_size: 9 rows cannot be divided among 2 ranks"),
        (["--resume", "--overwrite"], "--resume and --overwrite"),
        (["config", "--example", "--config", "absent.yaml"], "--example and --config"),
        (["chat", "absent"], "absent: no folder here"),
        (["chat", "./absent"], "absent: no such folder"),
        (["evaluate", "./absent", "--text", "world"], "absent: no such folder"),
        (["chat", "."], "holds no config.json"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    rlhf: Command, tmp_path: Path, arguments: list[str], message: str
) -> None:
    assert message in error_of(rlhf(*arguments))
    assert list(tmp_path.iterdir()) == [], "nothing is written"


def test_an_accelerator_before_the_command_counts(rlhf: Command) -> None:
    assert "accelerator 'tpu9'" in error_of(rlhf("--accelerator", "tpu9", "sft"))


def test_the_command_line_and_the_environment_must_agree(rlhf: Command) -> None:
    assert "contradicts" in error_of(rlhf("--accelerator", "cpu", RLHF_ACCELERATOR="tpu9"))


def test_debug_shows_the_traceback_of_a_mistake(rlhf: Command) -> None:
    done = rlhf("--debug", "--set", "sead=1")
    assert "Traceback" in done.stderr
    assert done.returncode == 2


def test_an_output_folder_of_other_files_is_left_alone(rlhf: Command, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert "is not empty and holds no run" in error_of(rlhf("--output", ".", "--overwrite"))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_model_folder_that_is_not_there_leaves_no_run(rlhf: Command, tmp_path: Path) -> None:
    assert "./absent: no such model folder" in error_of(rlhf("sft", "--set", "model.path=./absent", "--output", "run"))
    assert list(tmp_path.iterdir()) == []


def test_the_end_of_the_ranks_is_told_even_where_the_folder_cannot_be_tidied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: RunDirectory) -> None:
        if begun:
            raise RunError("another process is writing")

    begun: list[bool] = []
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(RunDirectory, "recover", refuse)
    monkeypatch.setattr("rlhf.engine.select.select_accelerator", lambda *arguments: None)
    monkeypatch.setattr(
        local, "spawn_ranks", lambda *arguments, **options: begun.append(True) or ExitStatus(1, "the cause", 0)
    )
    command = ["sft", "--ranks", "2", "--output", str(tmp_path / "run")]
    assert get_command(app).main(command, standalone_mode=False) == 1
    assert capsys.readouterr().err == "the cause\n"


def test_brackets_in_a_table_are_no_markup(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_table("Conformance of [/x]", ("name",), [("[/y]",)])
    shown = capsys.readouterr().out
    assert "[/x]" in shown and "[/y]" in shown
