"""Compute random steps of random runs again, and compare every gradient with that of the original step, bit for bit.

    python ci/replay.py --pairs 100 --seed 1     # pairs of a run and a step
    python ci/replay.py --faults                 # 20 planted changes, each expected at its phase

The runs are of all stages, on one and two ranks, at ZeRO 0 to 3, some with adapters, dropout, a moving average, an
adaptive KL coefficient, `ppo.kl_stop` and all kinds of shapes. An observer records the tensors of each original step; a
step is computed again from the stage's beginning or from a checkpoint, in the processes of the run, which have imported
the libraries. With --keep, counts are kept in ci/results/replay.json.

Exit codes: 0 all steps are identical and all changes are named, 1 some are not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlhf.config.schema import build_config  # noqa: E402
from rlhf.launchers import local  # noqa: E402
from rlhf.replay.job import Job, RankOutcome  # noqa: E402
from rlhf.replay.recording import Entry, compare_entries  # noqa: E402
from rlhf.reporting.console import console  # noqa: E402
from rlhf.reporting.step_records import read_steps  # noqa: E402
from rlhf.runs.stage_directory import StageDirectory  # noqa: E402
from rlhf.utils.atomic_io import atomic_write_json  # noqa: E402
from tests.helpers import WORDS, build_tokenizer, llama  # noqa: E402

RESULTS = ROOT / "ci" / "results" / "replay.json"
STEPS_A_RUN = 4
_STAGES = ("sft", "reward", "dpo", "ppo", "grpo", "rloo")
_RATE = {"learning_rate": 1e-2, "warmup": 0}

FAULTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "another learning rate": ("sft", {"sft.optimizer.learning_rate": 1e-3}, "update"),
    "another weight decay": ("sft", {"sft.optimizer.weight_decay": 0.5}, "update"),
    "another momentum": ("sft", {"sft.optimizer.betas": (0.5, 0.9)}, "update"),
    "another clip of gradients": ("sft", {"sft.optimizer.max_grad_norm": 0.01}, "update"),
    "another seed": ("sft", {"seed": 7}, "rows"),
    "another row": ("sft", {"data.datasets.0.path": "{changed}"}, "rows"),
    "loss on prompts too": ("sft", {"sft.loss_on": "all"}, "rows"),
    "dropout": ("sft", {"sft.dropout": 0.2}, "scores"),
    "another margin": ("reward", {"reward.margin": 0.5}, "loss"),
    "centred scores": ("reward", {"reward.center": 0.1}, "loss"),
    "another beta": ("dpo", {"dpo.beta": 0.7}, "loss"),
    "other labels": ("dpo", {"dpo.label_smoothing": 0.2}, "loss"),
    "another temperature": ("ppo", {"ppo.sampling.temperature": 0.5}, "rollout"),
    "another reward model": ("ppo", {"ppo.reward_model": "{reward}"}, "scores"),
    "another reference": ("ppo", {"ppo.actor": "{actor}"}, "scores"),
    "another KL coefficient": ("ppo", {"ppo.kl_coef": 0.9}, "advantages"),
    "another lambda": ("ppo", {"ppo.lam": 0.5}, "advantages"),
    "another clip of ratios": ("ppo", {"ppo.clip": 1e-4}, "loss"),
    "an entropy bonus": ("ppo", {"ppo.entropy_coef": 0.5}, "loss"),
    "another rate of the critic": ("ppo", {"ppo.critic_optimizer.learning_rate": 1e-4}, "update"),
}
"""Changes by name: the stage, the keys, and the phase that they move first."""


def make_assets(folder: Path) -> dict[str, str]:
    """Write a model, two reward models and rows; return their paths."""
    from tests.in_process import scalar_llama

    tokenizer = build_tokenizer()
    for name, model in {
        "model": llama(len(tokenizer)),
        "actor": llama(len(tokenizer), seed=3),
        "scores": scalar_llama(len(tokenizer), seed=1),
        "reward": scalar_llama(len(tokenizer), seed=2),
    }.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rng = random.Random(1)

    def words(low: int, high: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))

    rows = [
        {
            "prompt": f"{words(1, 8)} {number}",
            "response": words(1, 8),
            "chosen": f"please {words(1, 6)}",
            "rejected": f"go away {words(1, 6)}",
        }
        for number in range(60)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for row in rows:
        row["response"] += " moo"
    (folder / "changed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = {name: str(folder / name) for name in ("model", "actor", "scores", "reward")}
    return paths | {"rows": str(folder / "rows.jsonl"), "changed": str(folder / "changed.jsonl")}


def draw_run(rng: random.Random, assets: dict[str, str], number: int, folder: Path) -> dict[str, Any]:
    """Return the settings of a random run of one stage."""
    stage = _STAGES[number % len(_STAGES)]
    section: dict[str, Any] = {
        "batch_size": 4,
        "micro_batch_size": rng.choice([1, 2]),
        "checkpoint_every": rng.choice([0, 2, 3]),
        "eval_rows": 4,
        "optimizer": _RATE,
    }
    if stage in ("sft", "reward", "dpo"):
        section |= {"max_steps": 6, "epochs": 3, "dropout": rng.choice([0.0, 0.1])}
        name = stage
    else:
        name = "ppo"
        section |= {"steps": 5, "estimator": "gae" if stage == "ppo" else stage, "actor": assets["model"]}
        section |= {"reward_model": assets["scores"], "samples_every": 0, "sampling": {"temperature": 0.8}}
        if stage != "ppo":
            section |= {"completions_per_prompt": 2}
        else:
            section |= {"ppo_epochs": rng.choice([1, 2]), "minibatch_size": rng.choice([2, 4])}
            section |= rng.choice([{}, {"kl_target": 0.1}, {"kl_stop": 1e-3}, {"ema": 0.9}, {"dropout": 0.1}])
            section |= rng.choice([{}, {"normalize_scores": "running"}])
    if number // len(_STAGES) % 2:  # two ranks share the smallest minibatch
        section["micro_batch_size"] = 1
    model = {"model": {"path": assets["model"]}}
    if name in ("reward", "dpo"):
        section |= {"model": assets["model"]}
    return {
        "stage": name,
        "kind": stage,
        "ranks": 1 + number // len(_STAGES) % 2,
        "config": {
            **model,
            "output": str(folder / f"run-{number}"),
            "precision": "fp32",
            "accelerator": "cpu",
            "seed": rng.randrange(100),
            "engine": {
                "zero_stage": rng.randrange(4),
                "zero_persistence_threshold": 0,
                "shapes": rng.choice(["static", "dynamic", "bucketed"]),
            },
            "lora": {"rank": rng.choice([0, 0, 2])},
            "data": {
                "datasets": [{"path": assets["rows"]}],
                "max_prompt_length": 16,
                "max_completion_length": 12,
                "heldout_fraction": 0.1,
            },
            name: section,
        },
        "steps": sorted(rng.sample(range(1, (6 if name != "ppo" else 5) + 1), STEPS_A_RUN)),
    }


@contextmanager
def observed_run() -> Iterator[list[Any]]:
    """In this block, runs keep their checkpoints, and an observer keeps the tensors of all of their steps."""
    from rlhf.checkpoint import training_state
    from rlhf.engine import distributed
    from rlhf.replay.recording import StepRecording
    from rlhf.trainers import pipeline

    recordings: list[Any] = []
    real_build, real_remove = pipeline.build_trainer, StageDirectory.remove_candidates

    def build(context: Any) -> Any:
        trainer = real_build(context)
        by_step: dict[int, StepRecording] = {}

        def observe(place: Any, name: str, tensor: Any) -> None:
            new = StepRecording(distributed.world().rank, context.accelerator.host_device())
            by_step.setdefault(place.step, new)(place, name, tensor)

        context.observation.observer = observe
        recordings.append(by_step)
        return trainer

    pipeline.build_trainer, StageDirectory.remove_candidates = build, lambda self: None  # type: ignore[method-assign]
    kept, training_state._KEPT = training_state._KEPT, 99
    try:
        yield recordings
    finally:
        training_state._KEPT = kept
        pipeline.build_trainer = real_build
        StageDirectory.remove_candidates = real_remove  # type: ignore[method-assign]


def run_original(case: dict[str, Any]) -> dict[int, list[Entry]]:
    """Run a case on this rank; return the entries of its steps."""
    import torch

    from rlhf.trainers import run as launch

    torch.set_num_threads(1)
    config = build_config(case["config"])
    console.quiet = True
    with launch.open_run(config, [case["stage"]]) as (resolved, accelerator):
        from rlhf.runs.directory import RunDirectory
        from rlhf.trainers import pipeline

        with observed_run() as recordings:
            pipeline.run(resolved, accelerator, RunDirectory(config.output), [case["stage"]])
    (by_step,) = recordings
    return {step: recording.entries for step, recording in by_step.items()}


def compute(
    case: dict[str, Any], step: int, folder: Path, rank: int, changes: dict[str, Any] | None = None
) -> RankOutcome:
    """Compute a step of a case again on this rank, from the nearest checkpoint before it."""
    from rlhf.config.loader import apply_overrides, track
    from rlhf.replay.worker import recompute

    run = Path(case["config"]["output"])
    place = StageDirectory(run / case["stage"], case["stage"])
    record = next(record for record in read_steps(place.steps) if record.step == step)
    before = [path for path in place.all_checkpoints if int(path.name[5:]) < step]
    config = dict(record.session["config"])
    if changes:
        texts = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
        config = build_config(apply_overrides(track(config, "ci"), texts)).model_dump(mode="json")
    start = str(before[-1]) if before else ""
    session = dict(record.session) | {"config": config}
    job = Job(str(run), str(folder), case["stage"], step, session, start, changed=bool(changes))
    ready = folder / "ready"
    if rank == 0:
        folder.mkdir(parents=True)
        job.write()
        if start:
            (job.stage_folder / "checkpoints").mkdir()
            (job.stage_folder / "checkpoints" / before[-1].name).symlink_to(before[-1])
        (folder / "run").mkdir()
        ready.touch()
    else:
        while not ready.exists():
            time.sleep(0.02)
    recompute(job.file)
    return next(outcome for outcome in RankOutcome.read_all(folder) if outcome.rank == rank)


def work(spec: Path) -> None:
    """Do the cases of a file as one rank, and append a line for each pair to a file of this rank."""
    content = json.loads(spec.read_text())
    rank = int(os.environ.get("RANK", "0"))
    results = spec.with_name(f"{spec.stem}-rank{rank}.jsonl")
    for case in content["cases"]:
        original = run_original(case)
        for step in case["steps"]:
            folder = Path(case["config"]["output"]).with_name(f"{Path(case['config']['output']).name}-step-{step}")
            outcome = compute(case, step, folder, rank, case.get("changes"))
            differences = compare_entries(original[step], outcome.entries)
            gradients = sum(entry.phase == "gradients" for entry in outcome.entries)
            line = {
                "kind": case["kind"],
                "ranks": case["ranks"],
                "zero": case["config"]["engine"]["zero_stage"],
                "lora": case["config"]["lora"]["rank"],
                "step": step,
                "gradients": gradients,
                "different": [str(item) for item in differences[:3]],
                "phase": differences[0].entry.phase if differences else "",
                "record": list(outcome.differences.values()),
                "name": case.get("name", ""),
                "config": case["config"] if differences else {},
            }
            with results.open("a") as file:
                file.write(json.dumps(line) + "\n")


def run_cases(cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Run cases in as few processes as there are numbers of ranks; return the lines of all ranks."""
    lines = []
    for ranks in sorted({case["ranks"] for case in cases}):
        spec = folder / f"cases-{ranks}.json"
        spec.write_text(json.dumps({"cases": [case for case in cases if case["ranks"] == ranks]}))
        status = local.spawn_ranks(ranks, [sys.executable, str(Path(__file__).resolve()), "--work", str(spec)])
        if status:
            print(f"{ranks} ranks ended early: {status.line}", file=sys.stderr)
            lines.append({"failed": status.line})
        for path in sorted(folder.glob(f"cases-{ranks}-rank*.jsonl")):
            rank = int(path.stem[-1])
            lines += [json.loads(line) | {"rank": rank} for line in path.read_text().splitlines()]
    return lines


def make_faults(assets: dict[str, str], folder: Path, chosen: int) -> list[dict[str, Any]]:
    """Return a case for each of the first `chosen` planted changes."""
    cases = []
    for number, (name, (stage, changes, phase)) in enumerate(list(FAULTS.items())[:chosen]):
        kind = _STAGES.index(stage)
        case = draw_run(random.Random(number), assets, kind, folder)
        section: dict[str, Any] = {
            "micro_batch_size": 2,
            "checkpoint_every": 1,
            "dropout": None if stage == "ppo" else 0.0,
        }
        section |= {"optimizer": _RATE | {"max_grad_norm": 1.0}}
        if stage == "ppo":
            section |= {"ppo_epochs": 2, "minibatch_size": 2, "kl_target": None, "kl_stop": None, "ema": None}
            section |= {"normalize_scores": "none", "reuse_forward": False}
        config = case["config"] | {stage: case["config"][stage] | section, "lora": {"rank": 0}}
        config |= {"output": str(folder / f"fault-{number}"), "seed": 1}
        filled = {key: value.format(**assets) if isinstance(value, str) else value for key, value in changes.items()}
        cases.append(
            case | {"config": config, "ranks": 1, "steps": [3], "changes": filled, "name": name, "phase": phase}
        )
    return cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=0, help="number of pairs of a run and a step")
    parser.add_argument("--faults", type=int, nargs="?", const=len(FAULTS), default=0, help="plant changes (all, or N)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help=f"keep the counts in {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return 0
    kept: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    good = True
    with tempfile.TemporaryDirectory(prefix="rlhf-ci-replay-") as name:
        folder = Path(name)
        assets = make_assets(folder)
        if options.pairs:
            rng = random.Random(options.seed)
            count = -(-options.pairs // STEPS_A_RUN)
            lines = run_cases([draw_run(rng, assets, number, folder) for number in range(count)], folder)
            pairs = [line for line in lines if line.get("rank") == 0]
            wrong = [line for line in lines if line.get("failed") or line["different"] or line["record"]]
            for line in wrong:
                print(json.dumps(line), file=sys.stderr)
            print(f"{len(pairs)} pairs, {sum(line['gradients'] for line in pairs):,} gradients: {len(wrong)} wrong")
            kinds = Counter(f"{line['kind']}, {line['ranks']} ranks, ZeRO {line['zero']}" for line in pairs)
            kept["pairs"] = {
                "seed": options.seed,
                "pairs": len(pairs),
                "gradients": sum(line["gradients"] for line in pairs),
                "wrong": len(wrong),
                "by_kind": dict(sorted(kinds.items())),
            }
            good = not wrong and len(pairs) >= options.pairs
        if options.faults:
            cases = make_faults(assets, folder, options.faults)
            seen = {line["name"]: line for line in run_cases(cases, folder) if "name" in line}
            named = {
                case["name"]: {"expected": case["phase"], "named": seen.get(case["name"], {}).get("phase", "none")}
                for case in cases
            }
            for fault, phases in named.items():
                right = phases["expected"] == phases["named"]
                good = good and right
                print(f"{'right' if right else 'WRONG':6}{fault}: {phases['named']} (expected {phases['expected']})")
                if not right:
                    print(json.dumps(seen.get(fault, {})), file=sys.stderr)
            kept["faults"] = named
    if options.keep:
        RESULTS.parent.mkdir(exist_ok=True)
        atomic_write_json(RESULTS, kept)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
