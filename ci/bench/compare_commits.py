"""Compare this code with an earlier commit: PPO steps, rollouts, or steps of SFT and reward training.

    python ci/bench/compare_commits.py v0.1.0                       PPO steps of 16 x (16 + 32) tokens
    python ci/bench/compare_commits.py HEAD~20 --stage rollout --copies 8
    python ci/bench/compare_commits.py 0c30c27 --stage sft

The commit is checked out and installed into a temporary folder, without its dependencies. Each side runs the
`ours_worker.py` of that side in this Python environment, and the two take turns step by step. The target is to
lose no more than a twentieth.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import ppo_step
import report
import rollout
import supervised
import turns
from arithmetic import Shape
from channel import Worker
from machine import ROOT
from random_models import add_shape, make

NOW = "this code"
SPEED, MEMORY = 0.95, 1.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    turns.add_arguments(parser, apart=False)
    parser.add_argument("commit", help="the commit to compare with")
    parser.add_argument("--stage", choices=("ppo", "rollout", "sft", "reward"), default="ppo")
    varied = "of SFT and reward: rows of different lengths"
    parser.add_argument("--prompt", type=int, help=f"tokens of a prompt (default: 16; {varied})")
    parser.add_argument("--completion", type=int, help=f"tokens of a completion (default: 32; {varied})")
    parser.add_argument("--batch", type=int, default=16, help="rows of a step (default: 16)")
    parser.add_argument("--copies", type=int, default=1, help="rows of each prompt of a rollout (default: 1)")
    parser.add_argument("--micro-batch", type=int, default=4, help="rows of a pass of SFT or reward (default: 4)")
    add_shape(parser, ppo_step.SHAPE)
    turns.add_precision(parser)
    arguments = parser.parse_args()
    turns.choose_precision(arguments)
    if (arguments.prompt is None) != (arguments.completion is None):
        sys.exit("--prompt and --completion: set both or neither")
    if arguments.prompt is None and arguments.stage in ("ppo", "rollout"):
        arguments.prompt, arguments.completion = 16, 32
    lengths = None if arguments.prompt is None else (arguments.prompt, arguments.completion)
    commit = resolve(arguments.commit)
    worker = subprocess.run(
        ["git", "show", f"{commit}:ci/bench/ours_worker.py"], cwd=ROOT, capture_output=True, text=True
    )
    if arguments.precision != "bf16" and 'work.get("precision"' not in worker.stdout:
        sys.exit(f"{commit}: its benchmarks run in bf16 only; compare with a later commit")

    what = f"{arguments.stage}, {arguments.shape}, {arguments.batch} rows, {supervised.describe_lengths(lengths)}"
    what += turns.mark_precision(arguments, ", ")
    settings = {"commit": commit, "what": what, "copies": arguments.copies, "micro_batch": arguments.micro_batch}
    sizes = str(arguments.batch) if lengths is None else f"{lengths[0]}+{lengths[1]}-x{arguments.batch}"
    name = f"commits-{arguments.stage}-{sizes}-{commit}{turns.mark_precision(arguments, '-')}"
    measured = turns.Turns(name, what, settings, arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = make(folder / "model", arguments.shape)
        work = turns.write(workload(model, arguments, lengths), folder)
        tree = folder / "tree"
        run("git", "worktree", "add", "--quiet", "--detach", str(tree), commit)
        try:
            sides = {NOW: (ROOT, ROOT), commit: (tree, install(tree, folder / "installed"))}
            measured.measure(
                {name: partial(start, *side, work, folder / f"{name}.log") for name, side in sides.items()}
            )
        finally:
            run("git", "worktree", "remove", "--force", str(tree))
    now, earlier = (measured.sides()[name] for name in (NOW, commit))
    seconds = {"ours": now["median_seconds"], "baseline": earlier["median_seconds"]}
    memory = {"ours": now["peak_gib"], "baseline": earlier["peak_gib"]}
    measured.finish(
        [
            report.row(f"{what}, against {commit}", **seconds, unit="s", target=SPEED),
            report.row(f"{what}, peak memory", **memory, unit="GiB", goal="at most", target=MEMORY),
        ]
    )


def workload(model: Path, arguments: argparse.Namespace, lengths: tuple[int, int] | None) -> dict[str, Any]:
    """Return what each side does, as in the benchmark of the stage."""
    if arguments.stage == "ppo":
        return ppo_step.workload(model, arguments)
    if arguments.stage == "rollout":
        return rollout.workload(model, Shape.of(model), arguments)
    return supervised.workload(model, arguments, lengths)


def install(tree: Path, target: Path) -> Path:
    """Install the packages of a tree into a folder, with the entry points of its built-in backends."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    run(*pip, "--no-deps", "--no-build-isolation", "--target", str(target), str(tree))
    return target


def start(tree: Path, packages: Path, work: Path, log: Path) -> Worker:
    """Start the worker of a tree, which imports rlhf and accelerators from `packages`."""
    command = [sys.executable, str(tree / "ci" / "bench" / "ours_worker.py"), str(work)]
    return Worker(command, errors=log, environment={"PYTHONPATH": str(packages)})


def resolve(commit: str) -> str:
    """Return the short name of a commit; exit with a line if there is none."""
    done = subprocess.run(
        ["git", "rev-parse", "--verify", "--quiet", "--short", f"{commit}^{{commit}}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{commit}: no such commit in {ROOT}; name one that git log shows")
    return done.stdout.strip()


def run(*command: str) -> None:
    subprocess.run(command, cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
