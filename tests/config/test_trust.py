"""Code that a recipe names runs only with the user's knowledge, and that of others only with consent."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

from rlhf.config import trust
from rlhf.config.schema import load_config
from rlhf.config.trust import admit_code, consents_path
from rlhf.contrib.sweep.grid import load_grid
from rlhf.errors import ConfigError
from tests.forks import Forks


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    trust._print_once.cache_clear()
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "rewards.py").write_text("def f(prompt, completion, row):\n    return 1.0\n")
    path = folder / "recipe.yaml"
    path.write_text("ppo: {reward_functions: [./rewards.py:f]}\n")
    return path


def give_away(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
    """Let these paths belong to another user, also for root."""
    stat = Path.stat

    def of_another(path: Path, **options: bool) -> os.stat_result:
        result = list(stat(path, **options))
        result[4] = os.geteuid() + 12345 if path in paths else result[4]
        return os.stat_result(result)

    monkeypatch.setattr(Path, "stat", of_another)


def admit(recipe: Path, *stages: str, **options: bool) -> None:
    admit_code([load_config(recipe, ())], [recipe], stages or ("ppo",), **options)  # type: ignore[arg-type]


def test_own_recipe_is_one_line(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    admit(theirs)
    admit(theirs)
    expected = f"rlhf: note: runs reward functions {theirs.parent}/rewards.py:f, named in {theirs} or options\n"
    assert capsys.readouterr().err == expected and not consents_path().exists()
    admit(theirs, "sft")  # calls no reward function
    assert not capsys.readouterr().err


@pytest.mark.parametrize("name", ["recipe.yaml", "run.json", "."])
def test_recipe_of_another_user_needs_consent_once(name: str, theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (theirs.parent / "run.json").write_text("{}")
    give_away(monkeypatch, theirs.parent / name)
    with pytest.raises(
        ConfigError, match=r"runs reward functions .*rewards.py:f, and it belongs to user \d+; .*--trust"
    ):
        admit(theirs)
    admit(theirs, trust=True)
    admit(theirs)
    assert consents_path().parent.stat().st_mode & 0o777 == 0o700 and len(list(theirs.parent.iterdir())) == 3


def test_consents_given_at_the_same_time_are_all_kept(theirs: Path) -> None:
    def consent(number: int) -> None:
        start.wait()
        trust._record_consent(str(number), "digest")

    context = multiprocessing.get_context("fork")
    start = context.Barrier(8)
    processes = [context.Process(target=consent, args=(number,)) for number in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert json.loads(consents_path().read_text()) == {str(number): "digest" for number in range(8)}


@pytest.mark.parametrize("change", ["function", "file", "model"])
def test_consent_ends_if_the_code_changes(change: str, theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = theirs.parent / "model"
    model.mkdir()
    (model / "code.py").write_text("1\n")
    theirs.write_text(theirs.read_text() + "model: {path: ./model, trust_remote_code: true}\n")
    give_away(monkeypatch, theirs)
    admit(theirs, trust=True)
    if change == "function":
        theirs.write_text(theirs.read_text().replace("rewards.py:f", "rewards.py:g"))
    else:
        (model / "code.py" if change == "model" else theirs.parent / "rewards.py").write_text("2\n")
    with pytest.raises(ConfigError, match="and code that comes with models"):
        admit(theirs)


def test_settings_may_hold_long_texts(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template is no path, and too long for the name of a file."""
    theirs.write_text(
        theirs.read_text() + f"data: {{datasets: [{{path: a.jsonl, template: '{'x' * 300}{{prompt}}'}}]}}\n"
    )
    give_away(monkeypatch, theirs)
    admit(theirs, trust=True)
    admit(theirs)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_of_a_machine_records_consent(rank: int, theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_away(monkeypatch, theirs)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, **address}.items():
        monkeypatch.setenv(name, str(value))
    admit(theirs, trust=True)
    assert consents_path().exists() == (rank == 0)


def test_numbers_may_change(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_away(monkeypatch, theirs)
    admit(theirs, trust=True)
    theirs.write_text(theirs.read_text() + "seed: 5\n")
    admit(theirs)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize(("change", "expected"), [("owner", "belongs to user 12345"), ("mode", "every user")])
def test_code_that_others_can_change_needs_consent(change: str, expected: str, theirs: Path) -> None:
    code = theirs.parent / "rewards.py"
    if change == "owner":
        os.chown(code, 12345, 12345)
    else:
        code.chmod(0o666)
    with pytest.raises(ConfigError, match=rf"recipe.yaml: runs .*rewards.py:f, and {code} .*{expected}; .*--trust"):
        admit(theirs)
    admit(theirs, trust=True)
    admit(theirs)


def test_dry_run_runs_no_code_of_a_model(rlhf, model_folder: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    mark, model = tmp_path / "mark", tmp_path / "model"
    shutil.copytree(model_folder, model)
    (model / "manifest.json").unlink(missing_ok=True)
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "unheard-of", "auto_map": {"AutoConfig": "code.Config"}}
    (model / "config.json").write_text(json.dumps(config))
    (model / "code.py").write_text(f"open({str(mark)!r}, 'w')\nclass Config: pass\n")
    options = (
        "--set",
        f"model.path={model}",
        "--set",
        "model.trust_remote_code=true",
        "--output",
        tmp_path / "out",
        "--dry-run",
    )
    done = rlhf("sft", *options, check=False)
    assert done.returncode == 2 and "--dry-run runs no code, but model.trust_remote_code" in done.stderr
    assert not mark.exists() and not (tmp_path / "out").exists()
    rlhf("sft", *options, "--trust", check=False)
    assert mark.exists(), "this code would have run"


def test_recipe_without_code_needs_no_consent(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs.write_text("seed: 5\n")
    give_away(monkeypatch, theirs)
    admit(theirs)


@pytest.mark.parametrize("name", ["grid.yaml", "recipe.yaml"])
def test_grid_of_another_user_needs_consent_once(name: str, theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = theirs.with_name("grid.yaml")
    grid.write_text("recipe: ./recipe.yaml\nstages: [ppo]\nshare: [sft, reward]\ngrid: {ppo.kl_coef: [0.1, 0.2]}\n")
    give_away(monkeypatch, theirs.with_name(name))
    with pytest.raises(
        ConfigError, match=rf"{name}: runs reward functions .*rewards.py:f, and it belongs to user \d+; "
    ):
        load_grid(grid).admit_code()
    load_grid(grid).admit_code(trust=True)
    load_grid(grid).admit_code()
    (theirs.parent / "rewards.py").write_text("2\n")
    with pytest.raises(ConfigError, match="--trust"):
        load_grid(grid).admit_code()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_command_runs_nothing_of_another_users_folder(rlhf, theirs: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    mark, own = tmp_path / "mark", theirs.parent / "rewards.py"
    own.write_text(f"open({str(mark)!r}, 'w')\n" + own.read_text())
    output = ("--output", tmp_path / "out")
    os.chown(theirs, 12345, 12345)
    done = rlhf("ppo", *output, recipe=theirs, check=False)
    assert done.returncode == 2 and "belongs to user 12345" in done.stderr and not mark.exists()
    dry = rlhf("ppo", "--dry-run", *output, recipe=theirs, check=False)
    assert "belongs to" not in dry.stderr and not mark.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_sweep_of_another_users_grid_writes_and_runs_nothing(forks: Forks, theirs: Path, tmp_path: Path) -> None:
    grid = theirs.with_name("grid.yaml")
    grid.write_text("recipe: ./recipe.yaml\nstages: [ppo]\nshare: [sft, reward]\ngrid: {ppo.kl_coef: [0.1, 0.2]}\n")
    os.chown(grid, 12345, 12345)
    done = forks.run("sweep", str(grid), "--output", str(tmp_path / "out"), timeout=60)
    assert done.returncode == 2 and f"{grid}: runs" in done.stderr and "it belongs to user 12345" in done.stderr
    assert not (tmp_path / "out").exists()
