"""Measure how long rlhf takes to start: its help, the first step of a run, and the first step after `--resume`.

    python ci/bench/startup.py                      all three: help, first-step and resume
    python ci/bench/startup.py help first-step      only these
    python ci/bench/startup.py resume --layers 2 --rounds 1 --output /tmp/startup.json     a quick try

Each figure is the median of several processes, from their start on. The first step is that of the embedded example in
a new folder. The run that is resumed is PPO with four models of random weights, at its first checkpoint; one more
process measures the part of its time that is spent on the checkpoint: comparing it with its manifest, and loading it.
Before each measurement one process runs untimed, so that modules are compiled and files are in memory. The limits are
the targets of a quiet machine with two cores. The results are written to ci/bench/results. The exit code is 1 if a
limit is exceeded.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import report  # noqa: E402
from machine import machine, results_file  # noqa: E402
from random_models import add_shape, make, rows  # noqa: E402

LIMITS = {"help": 0.5, "first-step": 6.0, "resume": 10.0}  # seconds
SHAPE = "smollm2-135m"
PROMPT, COMPLETION, BATCH = 16, 32, 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(LIMITS)} (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="timed processes of each part (default: %(default)s)")
    add_shape(parser, SHAPE)
    parser.add_argument("--layers", type=int, help="layers of its models (default: those of the shape)")
    parser.add_argument("--output", type=Path, help="file for the results (default: in ci/bench/results)")
    parser.add_argument("--time-checkpoint", type=Path, help=argparse.SUPPRESS)  # of a process started by `resume`
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.time_checkpoint:
        return time_checkpoint(arguments.run, arguments.time_checkpoint)
    if unknown := set(arguments.parts) - set(LIMITS):
        parser.error(f"{', '.join(sorted(unknown))}: no such part; choose from {', '.join(LIMITS)}")
    measures = {"help": measure_help, "first-step": measure_first_step, "resume": measure_resume}
    sides: dict[str, Any] = {}
    for part in arguments.parts or LIMITS:
        with tempfile.TemporaryDirectory() as folder:
            sides[part] = measures[part](Path(folder), arguments)
        print(f"{part}: {json.dumps(sides[part])}", flush=True)
    result_rows = [row(part, side, arguments) for part, side in sides.items()]
    print(report.table(result_rows))
    output = arguments.output or results_file(Path(__file__).parent, "startup")
    settings = {"rounds": arguments.rounds, "shape": arguments.shape, "layers": arguments.layers}
    settings |= {"prompt_tokens": PROMPT, "completion_tokens": COMPLETION, "batch": BATCH}
    facts = {"machine": machine(), "settings": settings, "sides": sides, "rows": result_rows}
    output.write_text(json.dumps(facts, indent=2) + "\n")
    return 0 if all(row["met"] for row in result_rows) else 1


def row(part: str, side: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the row of a part: ours is its median, the baseline its limit."""
    what = {
        "help": "rlhf --help",
        "first-step": "embedded example, start to the end of its first step",
        "resume": f"--resume of PPO, {arguments.shape}, start to the end of its first step",
    }[part]
    ours, limit = side["median_seconds"], LIMITS[part]
    return report.row(f"{what}, against its limit", ours=ours, baseline=limit, unit="s", goal="at most", target=1)


def measure_help(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of `rlhf --help`."""

    def show() -> dict[str, float]:
        begin = time.time()
        subprocess.run(command("--help"), env=environment(), check=True, stdout=subprocess.DEVNULL)
        return {"seconds": time.time() - begin}

    return repeat(show, arguments.rounds)


def measure_first_step(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds to the first step of the embedded example; each process has a new folder."""
    folders = (folder / str(number) for number in range(arguments.rounds + 1))
    return repeat(lambda: run_until_step([], next(folders), "sft", 1), arguments.rounds)


def measure_resume(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds to the first step after a checkpoint of PPO; each process resumes from the same one."""
    words = ["ppo", "--config", str(write_recipe(folder, arguments))]
    run = folder / "run"
    first = run_until_step(words, run, "ppo", 1, end=signal.SIGINT)
    saved = int(max((run / "ppo" / "checkpoints").iterdir()).name.removeprefix("step-"))
    size = sum(path.stat().st_size for path in (run / "ppo" / "checkpoints").rglob("*") if path.is_file())
    side = repeat(lambda: run_until_step(["--resume"], run, "ppo", saved + 1), arguments.rounds)
    times = folder / "times.json"
    begin = time.time()
    words = [sys.executable, __file__, "--time-checkpoint", str(times), "--run", str(run)]
    wait_for_step(words, run, "ppo", saved + 1, begin, end=signal.SIGINT)
    return side | {"checkpoint_bytes": size, "checkpoint": json.loads(times.read_text()), "first_start": first}


def write_recipe(folder: Path, arguments: argparse.Namespace) -> Path:
    """Write the models, the rows and the recipe of the run that is resumed, and return the recipe."""
    for name in ("policy", "reward"):
        make(folder / name, arguments.shape, layers=arguments.layers, scalar_head=name == "reward")
    lengths = {"max_prompt_length": PROMPT, "max_completion_length": COMPLETION}
    models = {"actor": str(folder / "policy"), "reward_model": str(folder / "reward")}
    recipe = {
        "precision": "auto",
        "model": {"path": str(folder / "policy")},
        "data": {"datasets": str(rows(folder / "rows.jsonl")), "chat_template": False, **lengths},
        "ppo": {"steps": 100, "batch_size": BATCH, "checkpoint_every": 0, **models},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return folder / "recipe.yaml"


def repeat(measure: Callable[[], dict[str, float]], rounds: int) -> dict[str, Any]:
    """Return the summary of `rounds` measurements after one that does not count."""
    measure()
    return report.summarize([measure() for _ in range(rounds)])


def run_until_step(
    words: Sequence[str], run: Path, stage: str, step: int, *, end: signal.Signals = signal.SIGKILL
) -> dict[str, float]:
    """Start `rlhf` and return the seconds until it has recorded a step, and the step's own; then end it by a signal."""
    return wait_for_step(command(*words, "--output", str(run)), run, stage, step, time.time(), end=end)


def wait_for_step(
    words: Sequence[str], run: Path, stage: str, step: int, begin: float, *, end: signal.Signals
) -> dict[str, float]:
    """Start a process that trains, and return the times of a step that it takes; `begin` is when it was started."""
    metrics = run / stage / "metrics.jsonl"
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(words, env=environment(), stdout=log, stderr=subprocess.STDOUT)
        while not (found := find_step(metrics, step, begin)):
            if process.poll() is not None:
                log.seek(0)
                sys.exit(f"{' '.join(words)}\n{log.read()[-3000:]}")
            time.sleep(0.05)
        process.send_signal(end)
        process.wait()
    return {"seconds": found["time"] - begin, "step_seconds": found["seconds"]}


def find_step(metrics: Path, step: int, begin: float) -> dict[str, Any] | None:
    """Return the record of a step that was recorded after the time `begin`, if there is one."""
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    records = (json.loads(line) for line in lines if line.endswith("\n"))
    found = (record for record in records if record["step"] == step and "seconds" in record and record["time"] > begin)
    return next(found, None)


def time_checkpoint(run: Path, times: Path) -> int:
    """Resume a run in this process, and write the seconds that it takes to check and to load the checkpoint."""
    from rlhf.cli import main as rlhf
    from rlhf.config.schema import build_config
    from rlhf.engine.select import select_accelerator

    select_accelerator(build_config({}), "cpu")  # before torch is imported
    from rlhf.checkpoint import training_state

    seconds: dict[str, float] = {}

    def add_timer(name: str) -> None:
        function = getattr(training_state, name)

        def run_timed(*values: Any) -> Any:
            begin = time.perf_counter()
            result = function(*values)
            seconds[name] = round(seconds.get(name, 0.0) + time.perf_counter() - begin, 3)
            times.write_text(json.dumps(seconds))
            return result

        setattr(training_state, name, run_timed)

    for name in ("verify_checkpoint", "load_engine"):
        add_timer(name)
    sys.argv[1:] = ["--output", str(run), "--resume"]
    rlhf()
    return 0


def command(*words: str) -> list[str]:
    """Return the command that starts rlhf with these words, on a CPU if it trains."""
    return [sys.executable, "-m", "rlhf", *words, *([] if "--help" in words else ["--accelerator", "cpu"])]


def environment() -> dict[str, str]:
    """Return the environment of a user's shell: modules are compiled once, and all cores are used."""
    unwanted = ("PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS")
    common = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return {name: value for name, value in os.environ.items() if name not in unwanted} | common


if __name__ == "__main__":
    sys.exit(main())
