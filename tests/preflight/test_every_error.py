"""Every error line that a stage can end with: found before the first step, or the reason why that cannot be."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.preflight.mistakes import MISTAKES
from tests.preflight.raised import raised

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("errors.yaml")
# What runs before, beside or around the stages; `cli` and `evaluation` are commands of their own,
# `accelerators/testing` is the kit.
RLHF = ("data", "models", "engine", "rollout", "stages", "metrics", "config.py", "config_data.py", "kinds.py")
RLHF += ("files.py", "lock.py", "outcome.py", "pipeline.py", "preflight.py", "ranks.py", "run.py", "settings.py")
RLHF += ("stage_directory.py", "launch.py", "values.py", "hub.py", "place.py", "nodes.py", "companions.py")
RLHF += ("connections.py", "config_engine.py", "config_dpo.py", "config_ppo.py", "config_rewards.py")
RLHF += ("config_training.py", "roles.py", "sharing.py", "planning", "rl", "rewards", "api.py", "learner.py")
RLHF += ("ending.py", "origins.py", "profiling.py", "sweep")
CODE = [f"rlhf/{name}" for name in RLHF]
CODE += [str(path.relative_to(ROOT)) for path in sorted((ROOT / "accelerators").rglob("*.py"))]
CODE = [name for name in CODE if not name.startswith("accelerators/testing/")]


def verdicts() -> dict[str, dict[str, str]]:
    table: dict[str, dict[str, str]] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    return table


def test_every_error_in_the_code_has_its_line_in_the_table_and_none_is_left_over() -> None:
    whole = {file for file, errors in verdicts().items() if list(errors) == ["*"]}
    found = raised(*CODE)
    assert whole <= {line.partition(": ")[0] for line in found}, "has no errors"
    lines = {line for line in found if line.partition(": ")[0] not in whole}
    table = {f"{file}: {words}" for file, errors in verdicts().items() for words in errors if words != "*"}
    assert sorted(lines - table) == [], "no verdict in errors.yaml"
    assert sorted(table - lines) == [], "no longer in the code"


def test_every_module_of_rlhf_is_looked_at() -> None:
    root = ROOT / "rlhf"
    quiet = {"aside.py", "errors.py", "names.py", "objectives", "problems.py", "quiet.py", "recipe.py", "starts.py"}
    quiet |= {"estimators.py", "invocation.py", "signals.py", "__init__.py", "__main__.py", "cli", "recipes"}
    quiet |= {"version.py", "evaluation", "migration"}
    there = {path.name for path in root.iterdir() if path.name != "__pycache__"}
    assert there == quiet | set(RLHF)
    assert raised(*(f"rlhf/{name}" for name in quiet if name.endswith(".py"))) == []


def test_what_the_table_says_is_found_beforehand_is_shown_by_a_mistake() -> None:
    for file, errors in verdicts().items():
        for words, verdict in errors.items():
            how, _, said = verdict.partition(": ")
            assert how in {"before", "elsewhere", "settings", "later"} and said, f"{file}: {words}"
            if how in {"elsewhere", "settings"}:
                assert (ROOT / said.partition(": ")[0]).is_file(), f"{file}: {words}: {said}"
            assert how != "before" or set(said.split(", ")) <= set(MISTAKES), f"{file}: {words}: {said}"


def test_every_mistake_stands_in_the_table() -> None:
    named = {
        name
        for errors in verdicts().values()
        for verdict in errors.values()
        if verdict.startswith("before: ")
        for name in verdict.removeprefix("before: ").split(", ")
    }
    assert set(MISTAKES) == named
