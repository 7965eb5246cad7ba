"""Actions of rank 0 alone, for which the others wait and learn how they ended; and sessions one after the other."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.forks import RANKS, Forks
from tests.helpers import user_environment

SCRIPT = """
import sys, time
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
from rlhf.engine import distributed
dist.init_process_group("gloo", timeout=timedelta(seconds=1.5))
outcome = Path({folder!r}, f"rank{{dist.get_rank()}}")
try:
    for _ in range(2):
        with distributed.on_main("downloading", takes_long={takes_long}) as main:
            if main:
                time.sleep(2.5)
                {then}
    outcome.write_text("done")
except BaseException as error:
    outcome.write_text(f"{{type(error).__name__}}: {{error}}")
"""


CHUNKS = """
import accelerators
from accelerators.backends.cpu.backend import CPU
from rlhf.config.schema import Config
from rlhf.engine.distributed import start_process_group
from rlhf.evaluation.models import EvaluationDevice
from rlhf.losses import log_probs
CPU.chunk_elements = 77
with start_process_group(accelerators.select("cpu")):
    print(log_probs.CHUNK_ELEMENTS)
CPU.chunk_elements = 88
EvaluationDevice.select(Config(), "cpu")
print(log_probs.CHUNK_ELEMENTS)
"""


def test_losses_have_the_chunks_of_the_accelerator_in_runs_and_evaluations(forks: Forks) -> None:
    assert forks.python("-c", CHUNKS, timeout=60).stdout.split()[-2:] == ["77", "88"]  # after Gloo's lines


def on_two_ranks(forks: Forks, folder: Path, *, takes_long: bool = True, then: str = "pass") -> list[str]:
    """Return the outcome of each rank, in a process group whose collectives wait for a second and a half."""
    script = SCRIPT.format(folder=str(folder), takes_long=takes_long, then=then)
    forks.python("-c", RANKS, "2", script, timeout=60)
    return [(folder / f"rank{rank}").read_text() for rank in range(2)]


@pytest.mark.slow
def test_the_others_wait_longer_than_a_collective_does(forks: Forks, tmp_path: Path) -> None:
    assert on_two_ranks(forks, tmp_path) == ["done", "done"]


def test_late_failure_of_rank_0_fails_on_all_ranks(forks: Forks, tmp_path: Path) -> None:
    first, other = on_two_ranks(forks, tmp_path, then="raise OSError('disk')")
    assert first == "OSError: disk"
    assert other == "RemoteRankError: downloading failed on rank 0: OSError('disk')"


@pytest.mark.slow
def test_the_others_do_not_outwait_a_rank_0_that_is_gone(forks: Forks, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):  # it said nothing, and the launcher ended the other in the end
        on_two_ranks(forks, tmp_path, then="import os; os._exit(3)")


SESSIONS = """
import os, sys, time
from pathlib import Path
import torch.distributed as dist
import accelerators
from rlhf.engine import distributed
def late(function):
    def call(*arguments, **options):
        time.sleep(1 if os.environ["RANK"] == "0" else 0)
        return function(*arguments, **options)
    return call
dist.destroy_process_group, dist.init_process_group = late(dist.destroy_process_group), late(dist.init_process_group)
for number in range(3):
    with distributed.start_process_group(accelerators.select("cpu", environ={{}}), timeout=20):
        found = distributed.all_gather_objects([number, distributed.world().rank])
Path({folder!r}, f"rank{{os.environ['RANK']}}").write_text(str(found))
"""


@pytest.mark.slow
def test_a_rank_may_begin_a_session_before_rank_0_does(forks: Forks, tmp_path: Path) -> None:
    script = SESSIONS.format(folder=str(tmp_path))
    forks.ranks(2, script)
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["[[2, 0], [2, 1]]"] * 2


BEFORE_THE_DEVICE = """
import sys
from accelerators.backends.cpu.backend import CPU
prepare = CPU.prepare_deepspeed
def first(self):
    sys.stderr.write(f"DeepSpeed is imported: {'deepspeed' in sys.modules}\\n")
    return prepare(self)
CPU.prepare_deepspeed = first
from rlhf.cli import main
main()
"""


def test_run_imports_deepspeed_after_it_knows_the_device(tmp_path: Path) -> None:
    """It would take the first device that it finds: with a card in the machine, a run on the CPU would be refused."""
    command = [sys.executable, "-c", BEFORE_THE_DEVICE, "sft", "--dry-run", "--output", str(tmp_path / "run")]
    done = subprocess.run(command, env=user_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "DeepSpeed is imported: False\n" in done.stderr
