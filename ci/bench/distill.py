"""Measure how much of its teacher's quality a student of half the width reaches, with a tenth of PPO's samples.

    python ci/bench/distill.py                                               the embedded example; three seeds
    python ci/bench/distill.py --batch 8 --updates 1 --sft-steps 600          one update with each completion
    python ci/bench/distill.py --seeds 1 --set sft.max_steps=60 --sft-steps 60 --output /tmp/try.json     a quick try

The teacher is the embedded model after all three stages. The student has half its width, and four times as many steps
of SFT, since it learns more slowly. Then it completes a tenth as many prompts as PPO has drawn completions, and learns
from the teacher (`rlhf distill`), in several passes over each completion. A rule that no training uses approves
completions of held-out prompts or not, the same prompts for both. A control draws as often and learns from the
teacher's SFT model: what distillation brings without PPO. The results are written to
ci/bench/results. The exit code is 1 if the target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import report  # noqa: E402
from machine import machine, results_file  # noqa: E402

TARGET = 0.95  # of the teacher's approved share
SHARE = 10  # PPO's completions for one of the student's


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs, each with another seed (default: 3)")
    parser.add_argument("--batch", type=int, default=64, help="prompts of a step of distillation (default: 64)")
    parser.add_argument("--updates", type=int, default=32, help="updates on the completions of a step (default: 32)")
    parser.add_argument("--sft-steps", type=int, default=2400, help="steps of the student's SFT (default: 2400)")
    parser.add_argument("--steps", type=int, help="steps of distillation (default: a tenth of PPO's completions)")
    parser.add_argument("--rate", type=float, default=1e-3, help="its learning rate (default: 1e-3)")
    parser.add_argument("--divergence", choices=("reverse", "forward"), default="reverse", help="default: reverse")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of all runs; repeatable")
    parser.add_argument("--folder", type=Path, help="folder of the runs, which is kept (default: temporary)")
    parser.add_argument("--output", type=Path, help="file for the results (default: in ci/bench/results)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        outcomes = [compare(arguments, seed, folder / str(seed)) for seed in range(arguments.seeds)]
    shares = {name: statistics.fmean(outcome[name] for outcome in outcomes) for name in outcomes[0]}
    what = f"approved share of a student of half the width after {shares['completions']:.0f} completions"
    row = report.row(what, ours=shares["teacher"], baseline=shares["student"], unit="approved", target=TARGET)
    row |= {"ours": row["baseline"], "baseline": row["ours"]}  # the ratio is that of the student to the teacher
    print(report.table([row]))
    for seed, outcome in enumerate(outcomes):
        print(f"seed {seed}:", ", ".join(f"{name} {value:.3g}" for name, value in outcome.items()))
    output = arguments.output or results_file(Path(__file__).parent, f"distill-{arguments.divergence}")
    names = ("batch", "updates", "rate", "sft_steps", "set")
    settings = {name: getattr(arguments, name) for name in names}
    facts = {"machine": machine(), "settings": settings, "runs": outcomes, "rows": [row]}
    output.write_text(json.dumps(facts, indent=2) + "\n")
    return 0 if row["met"] else 1


def compare(arguments: argparse.Namespace, seed: int, folder: Path) -> dict[str, float]:
    """Train a teacher and a student, and return what the rule approves of, and the completions that each has drawn."""
    teacher, student = folder / "teacher", folder / "student"
    train((), teacher, [f"seed={seed}", *arguments.set])
    recipe = json.loads((teacher / "run.json").read_text())["config"]
    drawn = recipe["ppo"]["steps"] * recipe["ppo"]["batch_size"]
    steps = arguments.steps or drawn // SHARE // arguments.batch
    small = build_student(folder / "small", seed)
    own = [f"seed={seed}", *arguments.set, f"model.path={small}"]
    train(("sft",), student, [*own, f"sft.max_steps={arguments.sft_steps}", "sft.epochs=100"])
    keys = [
        *(*own, f"distill.divergence={arguments.divergence}", f"distill.updates={arguments.updates}"),
        *(f"distill.batch_size={arguments.batch}", f"distill.max_steps={steps}", f"distill.model={student}/sft/model"),
        *(f"distill.optimizer.learning_rate={arguments.rate}", "distill.epochs=100"),
    ]
    train(("distill",), student, [*keys, f"distill.teacher={teacher}/ppo/model"])
    control = folder / "control"
    train(("distill",), control, [*keys, f"distill.teacher={teacher}/sft/model"])
    taught, reinforced = summary(student, "distill"), summary(teacher, "ppo")
    return {
        "student": taught["after"]["approved_share"],
        "teacher": reinforced["after"]["approved_share"],
        "student_before": taught["before"]["approved_share"],
        "teacher_before": reinforced["before"]["approved_share"],
        "control": summary(control, "distill")["after"]["approved_share"],
        "completions": steps * arguments.batch,
        "ppo_completions": drawn,
        "student_seconds": taught["seconds"],
        "ppo_seconds": reinforced["seconds"],
    }


def build_student(folder: Path, seed: int) -> Path:
    """Write an untrained model of half the embedded one's width, with its tokenizer, and return its folder."""
    import torch
    from transformers import LlamaForCausalLM

    from rlhf.data.toy_world import build_world_tokenizer
    from rlhf.models.loading import build_llama

    tokenizer = build_world_tokenizer()
    config = build_llama(tokenizer, attention="sdpa", seed=seed, max_length=0).config
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        setattr(config, key, getattr(config, key) // 2)
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train(stages: Sequence[str], output: Path, keys: Sequence[str]) -> None:
    """Run stages of the embedded recipe, or all three, in a separate process."""
    recipe = ROOT / "rlhf" / "config" / "recipes" / "world.yaml"
    command = [sys.executable, "-m", "rlhf", *stages, "--config", str(recipe), "--output", str(output)]
    command += ["--accelerator", "cpu", *(part for key in keys for part in ("--set", key))]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def summary(run: Path, stage: str) -> dict[str, Any]:
    """Return a stage's summary."""
    content: dict[str, Any] = json.loads((run / stage / "stage.json").read_text())
    return content


if __name__ == "__main__":
    sys.exit(main())
