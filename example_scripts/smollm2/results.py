"""Print a finished run as Markdown: `python example_scripts/smollm2/results.py RUN > RESULTS.md`.

Its settings, the machine, what each stage changed, and how its numbers moved.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

STAGES = {
    "sft": ("loss", "learning_rate", "grad_norm", "tokens_per_second"),
    "reward": ("loss", "accuracy", "chosen_score", "rejected_score", "pairs_per_second"),
    "ppo": ("reward", "kl", "entropy", "clip_fraction", "value_loss", "response_length", "tokens_per_second"),
}
POINTS = 8  # rows of a table of steps
READING = """\
<!-- measured: made by ci/bench/figures.py -->
<!-- end of measured -->

How to read it:

- SFT perplexity: on 256 held-out sentences. Reward accuracy: on all 458 held-out pairs, whose mean human ratings
  differ by at least 1.0 (on a scale from -4 to 4). Each mean is of 15 to 29 people's ratings, most often 15. Held-out
  sentences are never trained on; some of their openings are.
- PPO: on 96 held-out prompts that no stage trains on, sampled at temperature 1. `reward` is the reward model's score
  and `reward std` its deviation over prompts; `kl` is the mean KL per sequence against the SFT model, in nats, for
  which 15 was the bound; `distinct 2` is the share of different neighbouring pairs among all pairs of tokens.
"""


def main() -> None:
    run = Path(sys.argv[1])
    description = json.loads((run / "run.json").read_text())
    stages = {name: json.loads((run / name / "stage.json").read_text()) for name in STAGES}
    accelerator = description["accelerator"]
    print("# Results\n")
    print("```\nbash example_scripts/smollm2/prepare.sh")
    for command in dict.fromkeys(invocation["command"] for invocation in description["invocations"]):
        print(command)  # once, where a stage was started again
    print("```\n")
    print(f"Machine: {accelerator['device']['model']}, {os.cpu_count()} cores, accelerator `{accelerator['name']}`,")
    print(f"{accelerator['precision']['name']} ({accelerator['precision']['reason']}).")
    print("Versions: " + ", ".join(f"{name} {version}" for name, version in description["versions"].items()) + ".")
    print(f"Seed {description['seed']}. Time in all: {sum(s['seconds'] for s in stages.values()) / 60:.1f} minutes.\n")
    print(READING)
    print("## Before and after\n\n| stage | measure | before | after |\n|---|---|---|---|")
    for name, summary in stages.items():
        for key, before in summary["before"].items():
            print(f"| {name} | {key.replace('_', ' ')} | {before:.4g} | {summary['after'][key]:.4g} |")
    print("\n| stage | steps | minutes | peak memory |\n|---|---|---|---|")
    for name, summary in stages.items():
        minutes, peak = summary["seconds"] / 60, summary["peak_memory"] / 2**30
        print(f"| {name} | {summary['steps']} | {minutes:.1f} | {peak:.1f} GiB |")

    before, after = stages["ppo"]["before"], stages["ppo"]["after"]
    rise = (after["reward"] - before["reward"]) / before["reward_std"]
    print(f"\nThe mean reward on held-out prompts rose by {rise:.2f} standard deviations of the SFT model's rewards.\n")
    print("## The same prompts, before and after PPO\n")
    for sample in stages["ppo"]["samples"]:
        print(f"- {sample['prompt'].strip()}\n  - before: {sample['before']}\n  - after: {sample['after']}")

    for name, keys in STAGES.items():
        records = steps(run / name / "metrics.jsonl", keys[0])
        print(f"\n## {name}: from metrics.jsonl\n\nMeans over the steps up to the one named.\n")
        print("| step | " + " | ".join(keys) + " |\n|" + "---|" * (len(keys) + 1))
        size = max(1, -(-len(records) // POINTS))
        for start in range(0, len(records), size):
            part = records[start : start + size]
            means = [sum(record[key] for record in part) / len(part) for key in keys]
            print(f"| {part[-1]['step']} | " + " | ".join(f"{value:.4g}" for value in means) + " |")


def steps(path: Path, key: str) -> list[dict[str, Any]]:
    """The records of training steps."""
    return [record for line in path.read_text().splitlines() if key in (record := json.loads(line))]


if __name__ == "__main__":
    main()
