"""The process that tests fork imports in advance only what runs import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.forks import IMPORTS
from tests.helpers import sets, user_environment

NEW_INTERPRETER = """
import atexit, pathlib, runpy, sys
modules = pathlib.Path(sys.argv.pop(1))
atexit.register(lambda: modules.write_text("\\n".join(sys.modules)))
runpy.run_module("rlhf", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_run_in_a_new_interpreter_imports_the_listed_modules(rlhf: Any, tmp_path: Path) -> None:
    """Modules of rlhf need no check: the import of one that is gone fails."""
    keys = sets("engine.zero_stage=3", "sft.max_steps=1", "lora.rank=2")
    run = ["sft", "--output", str(tmp_path / "run"), "--config", str(rlhf.recipe), *keys]
    command = [sys.executable, "-c", NEW_INTERPRETER, str(tmp_path / "modules"), *run]
    subprocess.run(command, env=user_environment(), check=True, timeout=300)
    imported = (tmp_path / "modules").read_text().split()
    assert [name for name in IMPORTS if not name.startswith("rlhf.") and name not in imported] == []
