"""Does PPO learn the same if other software or another device draws its rollouts?

    python ci/truth/servers.py --list                    the runs, and which of them have results
    python ci/truth/servers.py --jobs 2 --seconds 3000   train those without results; start none after 3,000 s
    python ci/truth/servers.py --print                   the comparison

PPO with LoRA on the embedded world, in fp32 on the CPU, with ten seeds. Its rollouts are drawn by itself, or by a
server: the CPU in bf16, the simulated Gaudi (built as plugins/rlhf-gaudi-sim says), or vLLM (RLHF_TEST_VLLM names an
interpreter that has it), with and without correction. The quality is the share of held-out replies that the world's
rule approves, which training never uses.

Two ways of drawing are equivalent if the mean difference of their quality, over seeds, lies within the spread of the
seeds: both one-sided t-tests at 5 % (TOST) reject a difference of one standard deviation of the runs that draw
themselves. Runs of one seed share the SFT model, the reward model and the prompts, so differences are paired.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import rollout_server
from run import ROOT, WORK, describe_pairs, train_stage

from rlhf.diagnosis.records import read_run
from rlhf.utils.statistics import student_quantile

RESULTS = ROOT / "ci" / "results" / "servers.json"
PAIRS = 2048
SEEDS = range(10)
HERE = "here"
_SETTINGS = {
    "lora.rank": 8,
    "ppo.steps": 60,
    "ppo.batch_size": 32,
    "ppo.minibatch_size": 16,
    "ppo.eval_rows": 256,
    "ppo.score_clip": 50,
    "ppo.samples_every": 0,
    "ppo.checkpoint_every": 0,
    "ppo.save_critic": "false",
}


class Way(NamedTuple):
    """A way of drawing rollouts.

    Attributes:
        options: of `rlhf serve`; None: the trainer draws.
        environment: of the server.
        settings: keys of the run.
    """

    options: tuple[str, ...] | None = None
    environment: Mapping[str, str] = MappingProxyType({})
    settings: Mapping[str, Any] = MappingProxyType({})


def list_ways() -> dict[str, Way]:
    """Return the ways of drawing, by name."""
    simulated = {"RLHF_GAUDI_SIM": "1", "PT_HPU_LAZY_MODE": "1"}
    simulated["PYTHONPATH"] = f"{ROOT / 'build' / 'gaudi-sim'}{os.pathsep}{ROOT}"
    vllm = os.environ.get("RLHF_TEST_VLLM", "vllm")
    small = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    servers = {
        "bf16": Way(("--accelerator", "cpu", "--precision", "bf16")),
        "gaudi-sim": Way(("--accelerator", "hpu", "--precision", "bf16"), simulated),
        "vllm": Way(("--engine", vllm, "--engine-options", "--enforce-eager --max-model-len 96"), small),
    }
    ways = {HERE: Way()}
    for name, way in servers.items():
        for correction in ("none", "tis"):
            ways[f"{name}, {correction}"] = Way(way.options, way.environment, {"ppo.rollout.correction": correction})
    ahead = {"ppo.rollout.correction": "tis", "ppo.rollout.staleness": 1}
    return ways | {"bf16, one step ahead": Way(servers["bf16"].options, {}, ahead)}


def main() -> None:
    """Train what has no result yet, or print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list the runs")
    parser.add_argument("--print", action="store_true", help="print the comparison, and train nothing")
    parser.add_argument("--only", default="", help="train only ways whose names contain this")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each with a server; default: 1")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run after this many seconds")
    options = parser.parse_args()
    results = read_results()
    missing = [(seed, name) for name in list_ways() for seed in SEEDS if str(seed) not in results.get(name, {})]
    if options.list:
        for seed, name in ((seed, name) for name in list_ways() for seed in SEEDS):
            print(f"{'' if (seed, name) in missing else 'done':5} seed {seed}, {name}")
        return
    end = time.time() + options.seconds
    writing = threading.Lock()

    def train_in_time(seed: int, name: str) -> None:
        if (started := time.time()) >= end:
            return
        approved = train(name, seed)
        with writing:
            results = read_results()
            results.setdefault(name, {})[str(seed)] = approved
            write_results({way: results[way] for way in list_ways() if way in results})
        print(f"seed {seed}, {name}: {approved:.3f} ({time.time() - started:.0f} s)", flush=True)

    chosen = [] if options.print else [(seed, name) for seed, name in missing if options.only in name]
    with ThreadPoolExecutor(options.jobs) as threads:
        list(threads.map(lambda run: train_in_time(*run), chosen))  # raises what a thread has raised
    print(format_comparison(read_results()))


def read_results() -> dict[str, dict[str, float]]:
    """Return the quality of each run with these settings, by way and seed."""
    content = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    return content["approved"] if content.get("settings") == _SETTINGS else {}


def write_results(results: dict[str, dict[str, float]]) -> None:
    """Replace the file of results."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    partial = RESULTS.with_suffix(".partial")
    content = {"commit": commit.strip(), "settings": _SETTINGS, "approved": results}
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.rename(RESULTS)


def train(way_name: str, seed: int) -> float:
    """Train a run, and the models that it starts from if they do not exist yet; return its quality."""
    sft = train_stage(f"sft-{seed}", "sft", seed, {})
    settings = {"reward.model": sft, "reward.epochs": 20, "data.datasets": describe_pairs(PAIRS)}
    reward = train_stage(f"reward-{seed}-{PAIRS}", "reward", seed, settings)
    way = list_ways()[way_name]
    name = f"servers-{seed}-{re.sub('[^a-z0-9]+', '-', way_name)}"
    shutil.rmtree(WORK / name, ignore_errors=True)
    settings = {**_SETTINGS, **way.settings, "ppo.actor": sft, "ppo.reward_model": reward}
    with serving(way, sft, WORK / f"{name}.log") as addresses:
        train_stage(name, "ppo", seed, settings | addresses)
    (stage,) = read_run(WORK / name).stages
    approved: float = stage.curve("heldout_approved_share").values[-1]
    shutil.rmtree(WORK / name)
    return approved


@contextmanager
def serving(way: Way, model: Path, log: Path) -> Iterator[dict[str, str]]:
    """Run the server of a way for the duration of the block, and yield the keys that name it."""
    if way.options is None:
        yield {}
        return
    with rollout_server.serving(model, way.options, log, way.environment) as address:
        yield {"ppo.rollout.where": address}


class Comparison(NamedTuple):
    """Paired differences of two ways: their number, mean, and half the width of the 90 % interval of the mean."""

    pairs: int
    mean: float
    error: float

    @classmethod
    def between(cls, own: dict[str, float], other: dict[str, float]) -> Comparison:
        """Compare the seeds that both have."""
        differences = [other[seed] - own[seed] for seed in own if seed in other]
        if len(differences) < 2:
            return cls(len(differences), math.nan, math.inf)
        # Both one-sided tests at 5 % reject the margin if this interval lies within it.
        quantile = student_quantile(len(differences) - 1, 0.9)
        return cls(len(differences), fmean(differences), quantile * stdev(differences) / math.sqrt(len(differences)))

    def is_within(self, margin: float) -> bool:
        """Return whether both one-sided tests reject a difference of the margin."""
        return abs(self.mean) + self.error < margin


def format_comparison(results: dict[str, dict[str, float]]) -> str:
    """Return the table of the comparison with the runs that draw themselves."""
    own = results.get(HERE, {})
    margin = stdev(own.values()) if len(own) > 1 else math.nan
    lines = ["| drawn by | seeds | approved | difference, 90 % interval | equivalent |", "|---|---|---|---|---|"]
    for name, values in results.items():
        if name == HERE:
            lines.append(f"| itself, fp32 | {len(values)} | {fmean(values.values()):.3f} | margin {margin:.3f} | |")
            continue
        compared = Comparison.between(own, values)
        low, high = compared.mean - compared.error, compared.mean + compared.error
        verdict = "yes" if compared.is_within(margin) else "not shown"
        lines.append(
            f"| {name} | {compared.pairs} | {fmean(values.values()):.3f} | {low:+.3f} to {high:+.3f} | {verdict} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
