"""The recipes that come of DeepSpeed-Chat's commands run, with toys in the place of their models and data."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf.contrib.deepspeed_chat.translate import format_translation, translate_commands
from tests.contrib.deepspeed_chat.originals import SCRIPTS
from tests.forks import Forks
from tests.recipes import toys
from tests.recipes.test_toy_runs import assert_trained, run


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_a_translated_recipe_runs_at_toy_size(name: str, forks: Forks, tmp_path: Path) -> None:
    recipe = translate_commands([SCRIPTS[name]], {}, 2)
    path = tmp_path / "recipe.yaml"
    path.write_text(format_translation(recipe), encoding="utf-8")
    stages = recipe.stages if len(recipe.stages) == 1 else []
    config = run(forks, path, tmp_path / "toys", tmp_path / "run", *stages)
    for stage in recipe.stages:
        assert_trained(config, stage, tmp_path / "run")  # type: ignore[arg-type]
    assert toys.models(config)
