"""Measure the peak memory of each rank in real stages, against the peak that the memory plan predicted.

    python ci/bench/memory.py                          all rows that are planned to take at most 20 GiB
    python ci/bench/memory.py --shape opt-125m sft     rows whose names contain all of these words
    python ci/bench/memory.py --most 3GiB              skip rows that are planned to take more, all ranks together
    python ci/bench/memory.py --most 8GiB --jobs 2     two rows at a time; a row's peak counts only its processes

Each row runs one stage in separate processes, with ZeRO 0 to 3, offload, LoRA, a shared base or int8, on 1 or 2 ranks.
Models have random weights, and sequences are padded to their full length, as the plan assumes. The plan is the one that
the run makes when its stage starts. The peak is the accelerator's; on a CPU it is the peak of the process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from machine import machine, results_file  # noqa: E402
from random_models import make, rows  # noqa: E402

from rlhf.config.schema import Config, Stage, build_config  # noqa: E402
from rlhf.memory.advice import plan_stages  # noqa: E402
from rlhf.memory.environment import PROCESS, Environment  # noqa: E402
from rlhf.utils.units import parse_bytes  # noqa: E402

LENGTHS = {"max_prompt_length": 64, "max_completion_length": 64}
SHAPES = ("opt-125m", "opt-1.3b")


@dataclass(frozen=True)
class Row:
    """One run: a stage with a model of a shape, a number of ranks, and settings."""

    shape: str
    stage: Stage
    ranks: int
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        """The shape, the stage, the ranks and the settings in one line."""
        values = " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in self.settings.items())
        return f"{self.shape} {self.stage} x{self.ranks} {values}".strip()


LORA = {"lora.rank": 8, "lora.share_base": False}
SHARED = LORA | {"lora.share_base": True}
INT8, INT4 = {"engine.frozen": "int8"}, {"engine.frozen": "int4"}
OFFLOAD = {"engine.offload": "optimizer"}
BASE_CASES: tuple[tuple[Stage, dict[str, Any]], ...] = (("sft", {}), ("ppo", {}))
CASES_BY_ZERO_STAGE: dict[int, tuple[tuple[Stage, dict[str, Any]], ...]] = {
    0: (("reward", {}), ("ppo", LORA), ("ppo", SHARED), ("ppo", SHARED | INT8)),
    1: (("sft", {"precision": "fp32"}), ("sft", OFFLOAD), ("ppo", LORA | INT8), ("ppo", SHARED | OFFLOAD)),
    2: (("sft", {"model.gradient_checkpointing": True}), ("ppo", OFFLOAD), ("ppo", SHARED | INT8)),
    3: (
        ("reward", LORA),
        ("sft", OFFLOAD),
        ("ppo", LORA),
        ("ppo", {"engine.offload": "all"}),
        ("sft", LORA | INT8),
        ("ppo", LORA | INT8),
        ("ppo", LORA | INT4),
    ),
}
"""Further cases per ZeRO stage, so that offload, LoRA, a shared base and int8 each occur at several ZeRO stages, and in
combination. At ZeRO-3 models share no weights."""


def table() -> Iterator[Row]:
    """Yield all rows: each ZeRO stage with its cases, on 1 and 2 ranks. No row has settings that are rejected."""
    for shape, ranks, zero in itertools.product(SHAPES, (1, 2), CASES_BY_ZERO_STAGE):
        for stage, options in BASE_CASES + CASES_BY_ZERO_STAGE[zero]:
            yield Row(shape, stage, ranks, {"engine.zero_stage": zero} | options)


def settings(row: Row, folder: Path) -> dict[str, Any]:
    """Return the recipe of a row that runs in `folder`; models and data are in its parent."""
    values: dict[str, Any] = {
        "output": str(folder / "run"),
        "precision": "bf16",
        "model.path": str(folder.parent / row.shape),
        "data.datasets": [{"path": str(folder.parent / "rows.jsonl")}],
        "data.max_prompt_length": LENGTHS["max_prompt_length"],
        "data.max_completion_length": LENGTHS["max_completion_length"],
        "data.stage_split": "1:1:1",
        "data.chat_template": False,
        "engine.shapes": "static",
        "ppo.steps": 2,
        "ppo.actor": str(folder.parent / row.shape),
        "ppo.reward_model": str(reward_model(row, folder.parent)),
        "reward.model": str(folder.parent / row.shape),
    }
    for stage in ("sft", "reward", "ppo"):
        values |= {f"{stage}.batch_size": 4, f"{stage}.micro_batch_size": 2, f"{stage}.eval_rows": 4}
        values |= {f"{stage}.checkpoint_every": 0}
        values |= {f"{stage}.max_steps": 3, f"{stage}.dropout": 0.0} if stage != "ppo" else {}
    return nest_keys(values | row.settings)


def reward_model(row: Row, folder: Path) -> Path:
    """Return the reward model of a PPO row: one with an adapter if the row shares a base, otherwise a plain one."""
    if row.settings.get("lora.share_base"):
        return folder / f"{row.shape}-adapted" / "reward" / "model"
    return folder / f"{row.shape}-reward"


def prepare(row: Row, folder: Path) -> None:
    """Make the models that a row starts from, if they do not exist yet."""
    make(folder / row.shape, row.shape)
    make(folder / f"{row.shape}-reward", row.shape, scalar_head=True)
    if not (adapted := reward_model(row, folder)).exists():
        trained = Row(row.shape, "reward", 1, {"lora.rank": 8, "reward.max_steps": 1})
        values = settings(trained, folder / "row") | {"output": str(adapted.parents[1])}
        recipe = folder / "adapted.yaml"
        recipe.write_text(json.dumps(values))
        command = [sys.executable, "-m", "rlhf", "reward", "--config", str(recipe), "--accelerator", "cpu"]
        subprocess.run(command, check=True, capture_output=True, env=environment())


def environment() -> dict[str, str]:
    """Return the environment of a run: one thread per rank, and no network."""
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def nest_keys(flat: dict[str, Any]) -> dict[str, Any]:
    """Return the values with each key `section.name` as `name` in a mapping under `section`."""
    sections: dict[str, Any] = {}
    for key, value in flat.items():
        section, _, name = key.rpartition(".")
        (sections.setdefault(section, {}) if section else sections)[name] = value
    return sections


def run_row(row: Row, folder: Path, most: int) -> dict[str, Any]:
    """Run a row and return its planned and measured peak in bytes, or the reason why it was skipped."""
    values = settings(row, folder)
    try:
        config: Config = build_config(values)
        ranks = Environment(row.ranks, config.precision, unified_memory=True, process=PROCESS)
        expected = plan_stages(config, [row.stage], ranks)[0].fullest.device * row.ranks
    except Exception as error:
        return {"skipped": str(error)}
    if expected > most:
        return {"skipped": f"planned to take {expected / 2**30:.1f} GiB, but --most allows {most / 2**30:.1f} GiB"}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    recipe = folder / "recipe.yaml"
    recipe.write_text(json.dumps(values))
    command = [sys.executable, "-m", "rlhf", row.stage, "--config", str(recipe), "--accelerator", "cpu"]
    command += ["--ranks", str(row.ranks)] if row.ranks > 1 else []
    start = time.perf_counter()
    completed = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=1800)
    if completed.returncode:
        errors = completed.stderr.strip().splitlines() or ["no error message"]
        return {"skipped": errors[-1], "code": completed.returncode}
    stage = json.loads((folder / "run" / row.stage / "stage.json").read_text())
    shutil.rmtree(folder)
    return {
        "planned": stage["planned_memory"],
        "phase": stage["planned_phase"],
        "measured": stage["peak_memory"],
        "error": stage["planned_memory"] / stage["peak_memory"] - 1,
        "seconds": round(time.perf_counter() - start, 1),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="run only rows whose names contain all words")
    parser.add_argument("--shape", choices=SHAPES, help="run only rows of this shape")
    parser.add_argument(
        "--most", default="20GiB", help="memory that all ranks of a row may take together (default: %(default)s)"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="rows at a time; each may take --most (default: %(default)s)"
    )
    parser.add_argument("--folder", type=Path, help="folder of the models (default: temporary)")
    parser.add_argument("--write", action="store_true", help="write the results to ci/bench/results")
    arguments = parser.parse_args(argv)
    selected = [row for row in table() if arguments.shape in (None, row.shape)]
    selected = [row for row in selected if all(word in row.name.split() for word in arguments.words)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        rows(folder / "rows.jsonl")
        most = parse_bytes(arguments.most, "--most")
        for row in selected:
            prepare(row, folder)

        def measure(row: Row) -> dict[str, Any]:
            memory = run_row(row, folder / f"row-{selected.index(row)}", most)
            print(_format_line(row, memory), flush=True)
            return {"row": row.name, **memory}

        with ThreadPoolExecutor(arguments.jobs) as jobs:
            results = list(jobs.map(measure, selected))
    errors = [abs(result["error"]) for result in results if "error" in result]
    if errors:
        print(f"{len(errors)} rows measured; the largest error is {max(errors):.1%}")
    if arguments.write:
        file = results_file(
            Path(__file__).parent, "-".join(["memory", *filter(None, [arguments.shape]), *arguments.words])
        )
        file.write_text(json.dumps({"machine": machine(), "lengths": LENGTHS, "rows": results}, indent=1) + "\n")
        print(f"written to {file}")


def _format_line(row: Row, memory: dict[str, Any]) -> str:
    if "skipped" in memory:
        return f"{row.name:72} -  {memory['skipped']}"
    planned, measured = (memory[key] / 2**20 for key in ("planned", "measured"))
    figures = f"planned {planned:7,.0f} MiB  measured {measured:7,.0f} MiB  {memory['error']:+6.1%}"
    return f"{row.name:72} {figures}  {memory['phase']}"


if __name__ == "__main__":
    main()
