"""`ci/gpu.sh` on the CPU's backend; on a machine with a GPU it checks `cuda`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from accelerators.backends.cpu import info as cpu_info
from ci.gpu import FAMILIES
from tests.helpers import user_environment

SCRIPT = Path(__file__).parents[2] / "ci" / "gpu.py"


@pytest.mark.slow
def test_everything_is_examined_and_written_down(tmp_path: Path) -> None:
    output = tmp_path / "cpu.json"
    command = [sys.executable, str(SCRIPT), "--accelerator", "cpu", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, env=user_environment(), timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(output.read_text())
    assert report["passed"]
    skipped = {check["check"] for check in report["conformance"]["report"] if check["result"] != "passed"}
    assert skipped == (set() if "avx512_bf16" in cpu_info.cpu_flags() else {"fused-layers"})
    assert "DeepSpeed's CPU accelerator does not train in fp16" in report["stages"]["fp16"]["refused"]
    assert [len(report["zero"][stage]["losses"]) for stage in "0123"] == [4, 4, 4, 4]
    families = {name: facts for name, facts in report["rollout"].items() if name != "passed"}
    assert {name: facts["same_tokens"] for name, facts in families.items()} == dict.fromkeys(FAMILIES, True)


def test_a_backend_that_cannot_run_is_refused_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--accelerator", "hpu", "--output", str(tmp_path / "hpu.json")]
    done = subprocess.run(command, capture_output=True, text=True, env=user_environment(), timeout=100, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "no Gaudi driver" in done.stderr
    assert not list(tmp_path.iterdir())
