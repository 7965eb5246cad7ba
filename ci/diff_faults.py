"""Plant faults in the simulated Gaudi, and count how many of them `rlhf accelerators diff` names.

    pip install --no-deps --target build/gaudi-sim ./plugins/rlhf-gaudi-sim
    python ci/diff_faults.py                    # faults and clean pairs; writes ci/results/diff.json
    python ci/diff_faults.py --jobs 4           # the same in four processes
    python ci/diff_faults.py --only mm-scale    # faults with this word in their names; writes nothing

The simulated device, in lazy mode, takes a step of each stage as it is, and again with each fault. A fault is named
if the first operator of the report is the one whose kernel was replaced, in the phase in which it first runs. Clean
pairs differ in family, seed, stage and precision: fp32 is compared with the CPU, bf16 with the device itself, since
not every CPU has it. There every operator is judged, and none may be blamed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "ci" / "results" / "diff.json"

STAGES = ("sft", "reward", "dpo", "ppo")
FAMILIES = ("llama", "gpt2", "gpt_neox", "opt", "bloom", "mistral")
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "ffn_dim": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 64, "word_embed_proj_dim": 32}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

LATE = {"log-rounds": "scores"}
"""Faults of operators that first run in another phase than the first forward pass."""


def write_models(folder: Path, family: str, seed: int) -> dict[str, str]:
    """Save a tiny language model and a tiny reward model; return their folders."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        CONFIG_MAPPING,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        PreTrainedTokenizerFast,
    )

    names = ["<pad>", "<bos>", "<eos>", *(f"w{number}" for number in range(61))]
    words = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    folders = {}
    for kind, auto in (("policy", AutoModelForCausalLM), ("reward", AutoModelForSequenceClassification)):
        torch.manual_seed(seed)
        grouped = {"num_key_value_heads": 2, "head_dim": 8} if family == "mistral" else {}
        model = auto.from_config(CONFIG_MAPPING[family](**SIZES, **grouped, num_labels=1))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.2)
        folders[kind] = str(folder / f"{family}-{seed}-{kind}")
        model.save_pretrained(folders[kind])
        tokenizer.save_pretrained(folders[kind])
    return folders


def write_rows(path: Path) -> Path:
    """Write rows of different lengths, so that there is padding."""

    def words(first: int, count: int) -> str:
        return " ".join(f"w{(7 * first + 3 * number) % 61}" for number in range(count))

    rows = [
        {
            "prompt": words(row, 1 + row % 6),
            "response": words(row + 1, 1 + row % 5),
            "chosen": words(row + 2, 1 + row % 4),
            "rejected": words(row + 3, 1 + row % 5),
        }
        for row in range(24)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def describe_case(folder: Path, models: dict[str, str], stage: str, seed: int, precision: str) -> dict[str, Any]:
    """Return a case: a recipe of one stage, and the folder of its recording."""
    training = {"batch_size": 4, "eval_rows": 2, "optimizer": {"learning_rate": 1e-3, "warmup": 0}}
    settings = {
        "precision": precision,
        "seed": seed,
        "model": {"path": models["policy"]},
        "engine": {"shapes": "static", "kernels": {"graph_capture": "none"}},
        "data": {
            "datasets": [{"path": str(folder / "rows.jsonl")}],
            "max_prompt_length": 8,
            "max_completion_length": 6,
            "heldout_fraction": 0.2,
        },
        "sft": training | {"max_steps": 2},
        "reward": training | {"max_steps": 2, "model": models["policy"]},
        "dpo": training | {"max_steps": 2, "model": models["policy"]},
        "ppo": training
        | {"steps": 2, "actor": models["policy"], "reward_model": models["reward"]}
        | {"critic_optimizer": {"learning_rate": 1e-3, "warmup": 0}},
    }
    name = f"{stage}-{Path(models['policy']).name}-{seed}-{precision}"
    return {"name": name, "stage": stage, "settings": settings, "folder": str(folder / name)}


class InProcess:
    """A side of this process, called as one of another process."""

    def __init__(self, side: Any) -> None:
        self.side, self.facts = side, side.describe()

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the side."""
        return getattr(self.side, method)(*args, **options)


def open_cases(cases: Sequence[dict[str, Any]], accelerator: str) -> Iterator[tuple[dict[str, Any], InProcess]]:
    """Yield each case with its side, opened."""
    from rlhf.config.schema import build_config
    from rlhf.reporting.console import console
    from rlhf.trainers import run as launch

    console.quiet = True
    for case in cases:
        with tempfile.TemporaryDirectory() as output:
            config = build_config(case["settings"] | {"accelerator": accelerator, "output": output})
            with launch.open_run(config, (case["stage"],), overwrite=True) as (resolved, device):
                from rlhf.lockstep.side import Side

                side = InProcess(Side(resolved, device))
                side.call("open", case["stage"])
                yield case, side
                side.call("close", keep=False)


def record(cases: Sequence[dict[str, Any]]) -> None:
    """Take a step of each case on the CPU, and keep it in the case's folder."""
    for case, side in open_cases(cases, "cpu"):
        record_steps(case, side)


def record_steps(case: dict[str, Any], side: InProcess) -> None:
    """Take two steps of an open case, of a clean pair one, and keep them in the case's folder."""
    from rlhf.lockstep.reference import LiveReference

    reference = LiveReference(side, Path(case["folder"]))
    for number in range(1 if case["faults"] == [""] else 2):
        reference.step(case["stage"], number)
    reference.describe()


def compare(cases: Sequence[dict[str, Any]], results: Path) -> None:
    """Compare the device with each case's recording: as it is, and with each fault of the case."""
    import gaudi_sim

    gaudi_sim.install()  # here, since what a run changes in the environment ends with it
    lines = results.open("a")
    for case, side in open_cases(cases, "hpu"):
        from gaudi_sim.faults import FAULTS, plant

        from rlhf.lockstep.driver import Outcome, compare_step
        from rlhf.lockstep.reference import Recording

        if not (Path(case["folder"]) / "golden.json").exists():
            record_steps(case, side)
        recording, stage = Recording(Path(case["folder"])), case["stage"]
        for fault in case["faults"]:
            # Adam's first step is the same with any betas.
            step = 1 if fault.startswith("adamw") else 0
            start, outcome = time.monotonic(), Outcome(recording.facts, side.facts)
            outcome.ratios[stage] = {}
            finding, failure = None, ""
            try:
                with plant(fault) if fault else nullcontext():
                    finding = compare_step(
                        recording, side, stage, step, outcome, judge_always=not fault, say=lambda line: None
                    )
            except Exception as error:  # a fault may end a step; it counts as missed
                failure = " ".join(str(error).split())[:200]
            print(case["name"], fault, failure, flush=True)
            first = finding.faults[0] if finding and finding.faults else None
            tensor = finding.differences[0] if finding and finding.differences else None
            entry = {
                "case": case["name"],
                "stage": stage,
                "fault": fault,
                "kind": FAULTS[fault].kind if fault else "",
                "planted": [FAULTS[fault].operator, expect_phase(fault, stage, FAULTS[fault])] if fault else [],
                "named": [first.operator, first.phase] if first else [],
                "how": first.kind if first else failure,
                "place": [first.module, first.line] if first else [],
                "tensor": [tensor.phase, tensor.role, tensor.name] if tensor else [],
                "ratios": outcome.ratios[stage],
                "seconds": round(time.monotonic() - start, 1),
            }
            lines.write(json.dumps(entry) + "\n")
            lines.flush()


def expect_phase(name: str, stage: str, fault: Any) -> str:
    """Return the phase in which a fault's operator first runs."""
    if fault.operator.startswith("adamw"):
        return "update"
    if fault.backward or "backward" in fault.operator:
        return "gradients"
    return "rollout" if stage == "ppo" and name not in LATE else "scores"


def summarize(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the counts."""
    planted = [entry for entry in entries if entry["fault"]]
    # Recorded and taken by the same device: if all numbers are the same, the operator was not called in that way.
    idle = [entry for entry in planted if not entry["named"] and entry["ratios"] and not any(entry["ratios"].values())]
    faults = [entry for entry in planted if entry not in idle]
    clean = [entry for entry in entries if not entry["fault"]]
    named = [entry for entry in faults if entry["named"] == entry["planted"]]
    kinds = {
        kind: [sum(entry["kind"] == kind for entry in group) for group in (named, faults)]
        for kind in sorted({entry["kind"] for entry in faults})
    }
    missed = [
        {key: entry[key] for key in ("fault", "stage", "planted", "named", "tensor")}
        for entry in faults
        if entry not in named
    ]
    ratios: Counter[str] = Counter()
    for entry in clean:
        for phase, ratio in entry["ratios"].items():
            ratios[phase] = max(ratios[phase], round(ratio, 3))
    return {
        "faults": len(faults),
        "named": len(named),
        "named and planted by kind": kinds,
        "missed": missed,
        "without effect, not counted": [f"{entry['stage']}: {entry['fault']}" for entry in idle],
        "clean pairs": len(clean),
        "false": [entry["case"] for entry in clean if entry["named"] or entry["tensor"]],
        "largest difference of clean pairs in bands": dict(ratios),
    }


def run(command: str, cases: Sequence[dict[str, Any]], folder: Path, site: str, jobs: int, *rest: str) -> None:
    """Run a part of the cases in each of `jobs` processes, on one device each."""
    simulated = {"RLHF_GAUDI_SIM": "1", "PT_HPU_LAZY_MODE": "1", "RLHF_ACCELERATOR": "hpu"}
    variables = {"PYTHONPATH": os.pathsep.join((site, str(ROOT), os.environ.get("PYTHONPATH", "")))}
    variables |= simulated if command == "compare" else {}
    processes = []
    for job in range(min(jobs, len(cases))):
        path = folder / f"{command}-{job}.json"
        path.write_text(json.dumps(cases[job::jobs]))
        arguments = [sys.executable, __file__, "--site", site, "--part", command, str(path), *rest]
        environment = os.environ | variables | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        processes.append(subprocess.Popen(arguments, env=environment))
    codes = [process.wait() for process in processes]
    if any(codes):
        sys.exit(f"{command}: a process failed; see above")


def list_cases(folder: Path, only: str, clean: int) -> list[dict[str, Any]]:
    """Return the cases: each stage with all faults, and clean pairs of families, seeds and precisions."""
    from gaudi_sim.faults import FAULTS

    write_rows(folder / "rows.jsonl")
    cases = []
    for stage in STAGES:
        case = describe_case(folder, write_models(folder, "llama", 0), stage, 0, "fp32")
        names = [
            name for name in FAULTS if only in name and (stage == "ppo" or not name.startswith(("cache", "random")))
        ]
        cases.append(case | {"faults": names})
    pairs = [
        (family, seed, precision, stage)
        for seed in (1, 2, 3)
        for precision in ("fp32", "bf16")
        for family in FAMILIES
        for stage in STAGES
    ]
    # In an order in which each value comes early: steps of 7 through a list whose length 7 does not divide.
    for number in range(clean):
        family, seed, precision, stage = pairs[7 * number % len(pairs)]
        case = describe_case(folder, write_models(folder, family, seed), stage, seed, precision)
        cases.append(case | {"faults": [""]})
    return cases


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", default="build/gaudi-sim", help="folder into which pip installed the simulated Gaudi")
    parser.add_argument("--only", default="")
    parser.add_argument("--clean", type=int, default=50, help="clean pairs")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the cases")
    parser.add_argument("--folder", help="keep everything here; what is there is not done again")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        command, cases, *rest = options.part
        given = json.loads(Path(cases).read_text())
        if command == "compare":
            compare(given, Path(rest[0]))
        else:
            record(given)
        return
    sys.path[:0] = [options.site, str(ROOT)]
    folder = Path(options.folder or tempfile.mkdtemp(prefix="rlhf-diff-faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    cases = list_cases(folder, options.only, 0 if options.only else options.clean)
    results = folder / "results.jsonl"
    done = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    known = {(entry["case"], entry["fault"]) for entry in done}
    for case in cases:
        case["faults"] = [fault for fault in case["faults"] if (case["name"], fault) not in known]
    cases = [case for case in cases if case["faults"]]
    on_host = [case for case in cases if case["faults"] == [""] and case["settings"]["precision"] == "fp32"]
    if missing := [case for case in on_host if not (Path(case["folder"]) / "golden.json").exists()]:
        run("record", missing, folder, options.site, options.jobs)
    if cases:
        run("compare", cases, folder, options.site, options.jobs, str(results))
    entries = [json.loads(line) for line in results.read_text().splitlines()]
    summary = summarize(entries)
    print(json.dumps(summary, indent=1))
    if not options.only:
        RESULTS.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    if summary["false"] or summary["named"] < 0.95 * summary["faults"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
