"""The plan against what is measured: peak memory of each rank, for real stages in processes of their own.

    python ci/bench/memory.py                          every row that this machine has the memory for
    python ci/bench/memory.py --shape opt-125m sft     rows whose names contain all of these words
    python ci/bench/memory.py --most 3GiB              leave out what the plan says would take more, ranks together
    python ci/bench/memory.py --most 8GiB --jobs 2     two rows at a time: the peak is that of a row's own processes

Models have random weights; rows are padded to their full length, as the plan counts them. The plan is the one that
the run itself made when its stage began; the peak is the accelerator's, which on a CPU is that of the process.
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
    """One run: a stage of a shape on some ranks, with settings."""

    shape: str
    stage: Stage
    ranks: int
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        listed = " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in self.settings.items())
        return f"{self.shape} {self.stage} x{self.ranks} {listed}".strip()


LORA = {"lora.rank": 8, "lora.share_base": False}
SHARED = LORA | {"lora.share_base": True}
INT8 = {"engine.frozen": "int8"}
OFFLOAD = {"engine.offload": "optimizer"}
EVERYWHERE: tuple[tuple[Stage, dict[str, Any]], ...] = (("sft", {}), ("ppo", {}))
SOME: dict[int, tuple[tuple[Stage, dict[str, Any]], ...]] = {
    0: (("reward", {}), ("ppo", LORA), ("ppo", SHARED), ("ppo", SHARED | INT8)),
    1: (("sft", {"precision": "fp32"}), ("sft", OFFLOAD), ("ppo", LORA | INT8), ("ppo", SHARED | OFFLOAD)),
    2: (("sft", {"model.gradient_checkpointing": True}), ("ppo", OFFLOAD), ("ppo", SHARED | INT8)),
    3: (("reward", LORA), ("sft", OFFLOAD), ("ppo", LORA), ("ppo", {"engine.offload": "all"})),
}
"""Beside those, so that each of offload, LoRA, a shared base and int8 is met at several stages of ZeRO, and together;
at ZeRO-3 models share nothing, and all their weights are in the compute precision."""


def table() -> Iterator[Row]:
    """ZeRO 0-3 with offload, LoRA, a shared base and int8, on 1 and 2 ranks; nothing that would be refused."""
    for shape, ranks, zero in itertools.product(SHAPES, (1, 2), SOME):
        for stage, own in EVERYWHERE + SOME[zero]:
            yield Row(shape, stage, ranks, {"engine.zero_stage": zero} | own)


def settings(row: Row, folder: Path) -> dict[str, Any]:
    """The recipe of a row."""
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
    return nested(values | row.settings)


def reward_model(row: Row, place: Path) -> Path:
    """The one that a row's PPO starts from: where a base is to be shared, one with its adapter next to it."""
    if row.settings.get("lora.share_base"):
        return place / f"{row.shape}-adapted" / "reward" / "model"
    return place / f"{row.shape}-reward"


def prepare(row: Row, place: Path) -> None:
    """Make the models that a row starts from, where they are not there."""
    make(place / row.shape, row.shape)
    make(place / f"{row.shape}-reward", row.shape, scalar_head=True)
    if not (adapted := reward_model(row, place)).exists():
        trained = Row(row.shape, "reward", 1, {"lora.rank": 8, "reward.max_steps": 1})
        values = settings(trained, place / "row") | {"output": str(adapted.parents[1])}
        recipe = place / "adapted.yaml"
        recipe.write_text(json.dumps(values))
        command = [sys.executable, "-m", "rlhf", "reward", "--config", str(recipe), "--accelerator", "cpu"]
        subprocess.run(command, check=True, capture_output=True, env=environment())


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in flat.items():
        section, _, name = key.rpartition(".")
        (found.setdefault(section, {}) if section else found)[name] = value
    return found


def run(row: Row, folder: Path, most: int) -> dict[str, Any]:
    """Run a row and compare; or say why it was left out."""
    values = settings(row, folder)
    try:
        config: Config = build_config(values)
        machine = Environment(row.ranks, config.precision, unified_memory=True, process=PROCESS)
        expected = plan_stages(config, [row.stage], machine)[0].fullest.device * row.ranks
    except Exception as error:
        return {"skipped": str(error)}
    if expected > most:
        return {"skipped": f"would take {expected / 2**30:.1f} GiB, and {most / 2**30:.1f} GiB are allowed"}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    recipe = folder / "recipe.yaml"
    recipe.write_text(json.dumps(values))
    command = [sys.executable, "-m", "rlhf", row.stage, "--config", str(recipe), "--accelerator", "cpu"]
    command += ["--ranks", str(row.ranks)] if row.ranks > 1 else []
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=1800)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no reason was given"]
        return {"skipped": said[-1], "code": done.returncode}
    found = json.loads((folder / "run" / row.stage / "stage.json").read_text())
    shutil.rmtree(folder)
    return {
        "planned": found["planned_memory"],
        "phase": found["planned_phase"],
        "measured": found["peak_memory"],
        "error": found["planned_memory"] / found["peak_memory"] - 1,
        "seconds": round(time.perf_counter() - began, 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="rows whose names contain all of them")
    parser.add_argument("--shape", choices=SHAPES, help="rows of this shape alone")
    parser.add_argument("--most", default="20GiB", help="memory that all ranks of a row may take together")
    parser.add_argument("--jobs", type=int, default=1, help="rows at a time, each of which may take --most")
    parser.add_argument("--folder", type=Path, help="where models are kept; default: a temporary folder")
    parser.add_argument("--write", action="store_true", help="write the results to ci/bench/results")
    wanted = parser.parse_args(arguments)
    chosen = [row for row in table() if wanted.shape in (None, row.shape)]
    chosen = [row for row in chosen if all(word in row.name.split() for word in wanted.words)]
    with tempfile.TemporaryDirectory() as temporary:
        place = wanted.folder or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        rows(place / "rows.jsonl")
        most = parse_bytes(wanted.most, "--most")
        for row in chosen:
            prepare(row, place)

        def measured(row: Row) -> dict[str, Any]:
            found = run(row, place / f"row-{chosen.index(row)}", most)
            print(_line(row, found), flush=True)
            return {"row": row.name, **found}

        with ThreadPoolExecutor(wanted.jobs) as jobs:
            results = list(jobs.map(measured, chosen))
    errors = [abs(result["error"]) for result in results if "error" in result]
    if errors:
        print(f"{len(errors)} rows measured; the largest error is {max(errors):.1%}")
    if wanted.write:
        file = results_file(Path(__file__).parent, "-".join(["memory", *filter(None, [wanted.shape]), *wanted.words]))
        file.write_text(json.dumps({"machine": machine(), "lengths": LENGTHS, "rows": results}, indent=1) + "\n")
        print(f"written to {file}")


def _line(row: Row, found: dict[str, Any]) -> str:
    if "skipped" in found:
        return f"{row.name:72} -  {found['skipped']}"
    planned, measured = (found[key] / 2**20 for key in ("planned", "measured"))
    figures = f"planned {planned:7,.0f} MiB  measured {measured:7,.0f} MiB  {found['error']:+6.1%}"
    return f"{row.name:72} {figures}  {found['phase']}"


if __name__ == "__main__":
    main()
