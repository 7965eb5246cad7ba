"""The command line as a user meets it: help, options before and after commands, errors and exit codes."""

import re
import subprocess
import sys
from collections.abc import Sequence
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
from rlhf.reporting.console import console
from rlhf.runs.directory import RunDirectory
from rlhf.trainers import run as launch
from tests.forks import Forks
from tests.helpers import user_environment


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, of a shell without a launcher."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RLHF_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(*arguments: str) -> str:
    """Return the one line of an error that the user can fix."""
    with pytest.raises(Exception) as error:  # noqa: PT011  # the exit status tells the kinds apart
        get_command(app).main(list(arguments), prog_name="rlhf", standalone_mode=False)
    status = ExitStatus.from_error(error.value)
    assert status.code == 2 and status.line.startswith("rlhf: error: ") and "\n" not in status.line
    return status.line.removeprefix("rlhf: error: ")


def test_every_command_and_option_is_explained() -> None:
    root = get_command(app)
    commands = getattr(root, "commands", {})
    assert {"sft", "reward", "dpo", "ppo", "chat", "config", "accelerators"} < set(commands)
    for command in (root, *commands.values()):
        assert command.help, command.name
        for parameter in command.params:
            assert getattr(parameter, "help", ""), f"{command.name}: {parameter.name}"
        assert "\n" not in command.help.replace("\n\n", ""), f"{command.name}: a line break within a paragraph"
    run_options = {field.name for field in fields(Options)}
    assert all(run_options <= {option.name for option in commands[stage].params} for stage in ("sft", "reward", "ppo"))


def test_help_needs_no_heavy_import() -> None:
    script = (
        "import sys; sys.argv = ['rlhf', '--help']\n"
        "from rlhf.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "names = {'torch', 'transformers', 'deepspeed', 'datasets', 'numpy', 'rlhf.contrib', 'rlhf.trainers.run'}\n"
        "print(sorted(names & set(sys.modules)), len(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    heavy, count = done.stderr.rsplit(maxsplit=1)
    assert heavy == "[]"
    assert int(count) < 700, "the help needs about 630 modules; import what a command needs in its function"
    assert "accelerators" in done.stdout and "Examples" in done.stdout


def test_version_is_shown() -> None:
    assert re.fullmatch(r"rlhf \d+\.\d+\.\d+\n", CliRunner().invoke(app, ["--version"]).stdout)


def test_stages_option_lists_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    stages_run: list[object] = []
    monkeypatch.setattr(launch, "run", lambda config, *, stages, **options: stages_run.append(stages))
    for arguments in (["--stages", "sft,dpo"], ["--stages", "reward, ppo"], ["--stages", "sft"], []):
        assert CliRunner().invoke(app, [*arguments, "--output", "run"]).exit_code == 0
    assert stages_run == [("sft", "dpo"), ("reward", "ppo"), ("sft",), ("sft", "reward", "ppo")]


def printed(*arguments: str, before: Sequence[str] = ()) -> str:
    """Return the output of `rlhf config`."""
    done = CliRunner().invoke(app, [*before, "config", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def config_of(text: str) -> Config:
    return build_config(parse_yaml(text))


def test_options_may_stand_before_and_after_a_command() -> None:
    before = ["--seed", "3", "--set", "ppo.steps=5"]
    config = config_of(printed("--set", "ppo.kl_coef=0.25", "--output", "2024", before=before))
    assert (config.seed, config.ppo.steps, config.ppo.kl_coef, config.output) == (3, 5, 0.25, Path("2024"))
    assert config_of(printed("--seed", "4", before=before)).seed == 4


def test_seed_of_zero_counts(tmp_path: Path) -> None:
    assert config_of(printed("--seed", "0", before=["--seed", "3"])).seed == 0
    (tmp_path / "recipe.yaml").write_text("seed: 5\n")
    assert config_of(printed("--config", str(tmp_path / "recipe.yaml"), "--seed", "0")).seed == 0


def test_folder_may_have_any_name() -> None:
    assert config_of(printed("--output", "runs/😀 ä: #1")).output == Path("runs/😀 ä: #1")


def test_printed_recipe_loads_with_the_same_values(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(printed("--set", "ppo.steps=5", "--set", "ppo.optimizer.learning_rate=1.25e-5"))
    given = load_config(path)
    assert config_of(printed("--config", str(path))) == given
    assert (given.ppo.steps, given.output) == (5, tmp_path / "runs" / "default")


def test_printed_recipe_has_the_defaults() -> None:
    assert config_of(printed()) == Config()
    assert printed().startswith("# The default of every key.") and "the command line" not in head_of(printed())
    for arguments in (["--set", "seed=4"], ["--seed", "4"]):
        text = printed(*arguments)
        assert config_of(text) == Config(seed=4) and "the command line" in head_of(text)


def head_of(text: str) -> str:
    """Return the comment above the keys, without line ends."""
    return " ".join(text.partition("\n\n")[0].replace("#", "").split())


def test_config_example_prints_the_embedded_example() -> None:
    assert config_of(printed("--example")) == load_config()
    assert printed("--example").startswith("# The embedded example")
    config = config_of(printed("--example", "--set", "model.path=x"))
    assert config.model.path == "x" and config.sft == load_config().sft


def test_config_names_the_recipe_that_it_prints(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("seed: 3\n")
    text = printed("--config", str(tmp_path / "mine.yaml"))
    assert "mine.yaml, and the default" in head_of(text)
    assert config_of(text) == Config(seed=3, output=Path.cwd() / "runs" / "default")


def test_config_prints_absolute_paths_of_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text("model: {path: ./model}\ndata: {datasets: [../x.jsonl, world]}\n")
    text = printed("--config", "recipes/mine.yaml", "--output", "run")
    assert "Paths are absolute." in head_of(text)
    shown = config_of(text)
    assert (shown.model.path, shown.output) == (str(tmp_path / "recipes" / "model"), tmp_path / "run")
    assert [source.path for source in shown.data.datasets] == [str(tmp_path / "x.jsonl"), "world"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--zzz"], "No such option: --zzz; see `rlhf --help`"),
        (["train"], "No such command 'train': rlhf trains without one; use `rlhf --config recipe.yaml`"),
        (["train", "--config", "x.yaml", "--epochs", "3", "more"], "No such command 'train': rlhf trains without one"),
        (["evalute"], "No such command 'evalute'. Did you mean 'evaluate'? See `rlhf --help`"),
        (["sft", "--seed", "x"], "Invalid value for '--seed'"),
        (["--set", "ppo.stepz=5"], "unknown key 'ppo.stepz'; did you mean 'steps'?"),
        (["--config", "absent.yaml"], "absent.yaml: cannot be read"),
        (["--precision", "bf8"], "--precision bf8: expected 'auto', 'bf16', 'fp16' or 'fp32', got 'bf8'"),
        (["--set", "seed=x"], "--set seed=x: expected a whole number"),
        (["--accelerator", "tpu9", "sft"], "accelerator 'tpu9'"),
        (["--set", "sft.batch_size=9", "--ranks", "2"], "sft.batch_size: 9 rows cannot be divided among 2 ranks"),
        (["--resume", "--overwrite"], "--resume and --overwrite"),
        (["--stages", "sft,pp"], "--stages sft,pp: no stage 'pp'; use some of sft, reward, dpo, ppo"),
        (["profile", "--stage", "pp"], "--stage: no stage 'pp'; use some of sft, reward, dpo, ppo"),
        (["plan", "--stage", "pp"], "--stage: no stage 'pp'; use some of sft, reward, dpo, ppo"),
        (["--stages", "ppo,sft"], "--stages ppo,sft: each stage runs once, and in this order: sft,ppo; write that"),
        (["--stages", "sft,sft"], "--stages sft,sft: each stage runs once, and in this order: sft; write that"),
        (["--stages", "sft", "ppo"], "--stages sft: not allowed with a command; leave out `ppo`"),
        (["--seed", "7", "evaluate", "runs/a"], "--seed: `rlhf evaluate` has no such option; leave it out"),
        (["--dry-run", "profile"], "--dry-run: `rlhf profile` has no such option"),
        (["--ranks", "8", "plan"], "--ranks: `rlhf plan` has no such option"),
        (["--output", "all.jsonl", "compare", "a", "b"], "--output: `rlhf compare` has no such option"),
        (["--set", "seed=1", "chat", "a"], "--set: `rlhf chat` has no such option"),
        (["--resume", "sweep", "grid.yaml"], "--resume: `rlhf sweep` has no such option"),
        (["--accelerator", "cpu", "accelerators", "list"], "--accelerator: `rlhf accelerators` has no such option"),
        (["sft", "--set", "model.path=./absent", "--output", "run"], "./absent: no such model folder"),
        (["config", "--example", "--config", "absent.yaml"], "--example and --config"),
        (["config", "--devices", "8"], "--devices: is for --from-deepspeed-chat"),
        (["chat", "absent"], "absent: no folder here"),
        (["chat", "./absent"], "absent: no such folder"),
        (["evaluate", "./absent", "--text", "world"], "absent: no such folder"),
        (["chat", "."], "holds no config.json"),
    ],
)
def test_mistake_is_one_line(empty_folder: Path, arguments: list[str], message: str) -> None:
    assert message in refusal(*arguments)
    assert list(empty_folder.iterdir()) == [], "nothing is written"


@pytest.mark.parametrize("debug", [False, True])
def test_mistake_ends_the_process_with_code_2(forks: Forks, debug: bool) -> None:
    options = [*(["--debug"] if debug else []), "--accelerator", "cpu"]
    done = forks.run(*options, timeout=60, environment={"RLHF_ACCELERATOR": "tpu9"})
    assert done.returncode == 2 and "contradicts" in done.stderr.splitlines()[-1]
    assert ("Traceback" in done.stderr) == debug
    assert debug or re.fullmatch(r"rlhf: error: .*\n", done.stderr)


def test_terminal_that_lacks_a_letter_stops_nothing(empty_folder: Path) -> None:
    (empty_folder / "plüm.yaml").write_text("seed: 3\n")
    command = [sys.executable, "-m", "rlhf", "config", "--config", "plüm.yaml"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=user_environment() | {"PYTHONIOENCODING": "ascii"}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii() and r"pl\xfcm.yaml" in done.stdout


def test_output_folder_of_other_files_is_left_alone(empty_folder: Path) -> None:
    (empty_folder / "notes.txt").write_text("mine")
    assert "is not empty and holds no run" in refusal("--output", ".", "--overwrite")
    assert "notes.txt: is a file; choose a folder with --output" in refusal("--output", "notes.txt")
    assert [path.name for path in empty_folder.iterdir()] == ["notes.txt"]


def test_failed_ranks_are_reported_if_recovery_fails_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[bool] = []

    def recover(self: RunDirectory) -> None:
        if started:
            raise RunError("another process is writing")

    monkeypatch.setattr(RunDirectory, "recover", recover)
    monkeypatch.setattr("rlhf.engine.select.select_accelerator", lambda *arguments: None)
    monkeypatch.setattr(
        local, "spawn_ranks", lambda *arguments, **options: started.append(True) or ExitStatus(1, "the cause", 0)
    )
    assert get_command(app).main(["sft", "--ranks", "2", "--output", "run"], standalone_mode=False) == 1
    assert capsys.readouterr().err == "the cause\n"


def test_table_on_a_terminal_cuts_nothing_and_reads_no_markup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Points of a sweep differ at the ends of their names, and reasons may have brackets."""
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "30"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(console, "_force_terminal", console._force_terminal)  # rich 13 keeps FORCE_COLOR there
    names = ["zero2-offload-lora8", "zero2-offload-lora64", "[/x]"]
    print_table("Sweep [/y]", ["point", "peak\nmemory"], [[name, "1,234.5 GiB"] for name in names])
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)
    assert max(map(len, shown.splitlines())) <= 30 and "…" not in shown and "Sweep [/y]" in shown
    cells = [re.findall(r"│([^│]*)│", line)[0].strip() for line in shown.splitlines() if line.startswith("│")]
    assert "".join(cells) == "".join(names)
