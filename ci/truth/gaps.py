"""How far rounding moves the numbers that invariants judge, by precision: the stages of every model family.

Trains a tiny random model of each family (`tests/families/table.py`) for some steps of three stages, and the embedded
example whole, each in fp32 and in bf16 (on a processor with bf16 instructions). Writes `gaps.json` in this folder, and
prints the table of docs/diagnosis.md. Takes about a quarter of an hour on one core.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from itertools import product
from operator import itemgetter
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from rlhf.config.schema import load_config
from rlhf.data.toy_world import build_world_tokenizer
from rlhf.diagnosis.findings import examine_stage
from rlhf.diagnosis.records import RunRecords, StageRecords, read_run
from rlhf.reporting.console import console
from rlhf.trainers.run import run
from tests.families.table import FAMILIES, Family, build

RESULT = Path(__file__).with_name("gaps.json")
EMBEDDED = "the embedded example"
PRECISIONS = ("fp32", "bf16")
_SHORT = {"batch_size": 8, "max_steps": 4, "eval_rows": 8}
RECIPE = {
    "data": {
        "datasets": [{"path": "world", "limit": 400}],
        "max_prompt_length": 24,
        "max_completion_length": 16,
    },
    "sft": _SHORT,
    "reward": _SHORT,
    "ppo": {"batch_size": 8, "minibatch_size": 4, "steps": 4, "eval_rows": 8},
}

Gaps = dict[str, float]


def main() -> None:
    """Train, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--print", action="store_true", help="print the table of gaps.json, and train nothing")
    if not parser.parse_args().print:
        console.quiet = True
        runs: dict[str, dict[str, Any]] = {}
        for family, precision in product((*FAMILIES, None), PRECISIONS):
            name = f"{family.name if family else EMBEDDED}, {precision}"
            runs[name] = measure(family, precision)
            print(f"{name}: {runs[name]}", file=sys.stderr, flush=True)
        RESULT.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    for line in describe(json.loads(RESULT.read_text(encoding="utf-8"))):
        print(line)


def measure(family: Family | None, precision: str) -> dict[str, Any]:
    """Train the stages of a family, or of the embedded example, and return its largest gaps and broken invariants."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        settings = [f"output={folder / 'run'}", f"precision={precision}"]
        if family:
            save_random_model(family, folder / "base")
            (folder / "recipe.yaml").write_text(json.dumps(RECIPE), encoding="utf-8")
            settings.append(f"model.path={folder / 'base'}")
        run(load_config(folder / "recipe.yaml" if family else None, settings), accelerator="cpu")
        return read_gaps(read_run(folder / "run"))


def read_gaps(run: RunRecords) -> dict[str, Any]:
    """Return the largest gaps of a run, and its broken invariants."""
    gaps: Gaps = {}
    wrong = []
    for stage in run.stages:
        gaps |= read_stage_gaps(stage)
        wrong += [f"{stage.name}: {finding.text}" for finding in examine_stage(run, stage) if finding.state == "wrong"]
    return {"gaps": gaps, "wrong": wrong}


def save_random_model(family: Family, folder: Path) -> None:
    """Save a tiny model of a family, with random weights whose predictions are far from uniform."""
    tokenizer = build_world_tokenizer()
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = family.configuration(vocab_size=len(tokenizer), **special)
    torch.manual_seed(0)
    build(config, MODEL_FOR_CAUSAL_LM_MAPPING).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def read_stage_gaps(stage: StageRecords) -> Gaps:
    """Return the largest gaps of a stage, and KL per token before the first update."""
    gaps: Gaps = {}
    for name in ("draw_gap", "draw_gap_max", "update_gap", "score_gap"):
        if values := stage.curve(name).values:
            gaps[f"{name} of {stage.name}" if name == "score_gap" else name] = max(values)
    if kl := stage.curve("kl").values:
        gaps["first KL"] = abs(kl[0]) / max(stage.curve("response_length").values[0], 1)
    return gaps


def describe(runs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the table: of each number the median and the two largest of all families, and the embedded example's."""
    yield "| number | precision | median | largest | next largest | embedded example |"
    yield "|---|---|---|---|---|---|"
    for number in ("draw_gap", "draw_gap_max", "update_gap", "score_gap", "first KL"):
        for precision in PRECISIONS:
            own: dict[str, float] = {}
            for name, found in runs.items():
                values = [value for key, value in found["gaps"].items() if key.partition(" of ")[0] == number]
                if values and name.endswith(f", {precision}"):
                    own[name.removesuffix(f", {precision}")] = max(values)
            embedded = own.pop(EMBEDDED)
            falling = sorted(own.items(), key=itemgetter(1), reverse=True)
            largest = [f"{value:.1g} ({name})" if value else "0" for name, value in falling]
            numbers = f"{median(own.values()):.1g} | {' | '.join(largest[:2])} | {embedded:.1g}"
            yield f"| {number} | {precision} | {numbers} |"
    broken = [f"{name}: {text}" for name, found in runs.items() for text in found["wrong"]]
    yield from ("", f"{len(runs)} runs, {len(broken)} broken invariants", *broken)


if __name__ == "__main__":
    main()
