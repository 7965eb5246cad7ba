"""No secret of the environment reaches a run's files, its output, or the page that explains it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.conftest import KEYS
from tests.helpers import sets


def test_no_key_of_the_environment_is_written_or_printed(rlhf: Any, finished_run: Path, tmp_path: Path) -> None:
    files = [path for path in finished_run.rglob("*") if path.is_file()]
    assert {"run.json", "console.log", "report.html", "metrics.jsonl", "stage.json"} <= {path.name for path in files}
    contents = {str(path): path.read_bytes() for path in files}
    broken = tmp_path / "rewards.py"
    broken.write_text("import os\ndef reward(prompt, completion, row): raise KeyError(os.environ['HF_TOKEN'][:2])\n")
    keys = sets(f"ppo.reward_functions=[{broken}:reward]", "ppo.reward_weight=0", f"ppo.actor={finished_run}/sft/model")
    failed = rlhf("ppo", "--output", tmp_path / "run", "--debug", *keys, check=False)
    assert failed.returncode == 2 and "KeyError: 'hf'" in failed.stderr, "the function sees the variable"
    contents |= {"stdout": failed.stdout.encode(), "stderr": failed.stderr.encode()}
    contents |= {str(path): path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    for name, content in contents.items():
        for key, secret in KEYS.items():
            assert secret.encode() not in content, f"{key} is in {name}"


def test_control_sequences_of_a_reward_function_do_not_reach_the_terminal(
    rlhf: Any, finished_run: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "rewards.py"
    broken.write_text("def reward(prompt, completion, row): raise KeyError('\\x1b]0;owned\\x07')\n")
    keys = sets(f"ppo.reward_functions=[{broken}:reward]", "ppo.reward_weight=0", f"ppo.actor={finished_run}/sft/model")
    failed = rlhf("ppo", "--output", tmp_path / "run", *keys, check=False)
    log = (tmp_path / "run" / "ppo" / "console.log").read_text() if (tmp_path / "run" / "ppo").exists() else ""
    assert failed.returncode == 2 and "owned" in failed.stderr
    assert not {"\x1b", "\x07"} & set(failed.stdout + failed.stderr + log)
