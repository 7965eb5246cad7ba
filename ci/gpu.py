"""Everything of a backend that only its device can show, through the command line and the decoder that users run.

In: the name of a backend. Out: a table on the terminal, and a JSON file with each finding and the figures behind it.
Exit code 0 if all is as it should be, 1 if not, 2 if the backend cannot run here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# The embedded model and data, in as few rows and steps as still exercise every part.
TOY = {
    "sft.max_steps": 20,
    "reward.max_steps": 10,
    "ppo.steps": 4,
    "sft.eval_rows": 32,
    "reward.eval_rows": 32,
    "ppo.eval_rows": 16,
    "ppo.batch_size": 16,
    "ppo.minibatch_size": 8,
}
TWO_STEPS = TOY | {"sft.max_steps": 2, "reward.max_steps": 2, "ppo.steps": 2, "engine.zero_persistence_threshold": 0}
UNRECORDED = "generation is slower than possible"  # a note of rlhf.generation.decoder
ZERO_TOLERANCE = 0.02  # relative, in the losses of two steps of a 16-bit model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="cuda", help="backend to examine (cuda)")
    parser.add_argument("--output", type=Path, help="file for the results (ci/results/BACKEND-CHIP.json)")
    parser.add_argument("--rollout-worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rollout_worker:
        print(json.dumps(rollout(options.accelerator)))
        return 0

    explained = rlhf("accelerators", "explain", options.accelerator, "--json")
    if explained.returncode:
        sys.stderr.write(explained.stderr)
        return 2
    backend = json.loads(explained.stdout)
    chip = re.sub(r"[^a-z0-9]+", "-", backend["device"]["model"].lower()).strip("-")
    output = options.output or ROOT / "ci" / "results" / f"{options.accelerator}-{chip}.json"

    say(f"{backend['device']['model']}: {backend['device']['software']}")
    found = {
        "conformance": conformance(options.accelerator),
        "stages": stages(options.accelerator, backend["precisions"]),
        "zero": zero(options.accelerator),
        "rollout": rollout_apart(options.accelerator),
    }
    passed = all(part["passed"] for part in found.values())
    report = {
        "accelerator": options.accelerator,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "passed": passed,
        "backend": {key: value for key, value in backend.items() if key != "memory"},
        **found,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=2) + "\n")
    say(f"{'passed' if passed else 'FAILED'}; {output}")
    return 0 if passed else 1


def conformance(name: str) -> dict[str, Any]:
    """The conformance kit's own report."""
    say("conformance kit")
    done = rlhf("accelerators", "check", name, "--json")
    if not done.stdout.strip():
        return verdict("conformance", False, {"error": last_line(done)})
    report = json.loads(done.stdout)
    failed = [f"{check['check']}: {check['reason']}" for check in report if check["result"] == "failed"]
    return verdict("conformance", done.returncode == 0, {"report": report} | ({"error": failed[0]} if failed else {}))


def stages(name: str, precisions: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The three stages at toy size in each 16-bit precision that the backend has."""
    runs = {}
    for wish in ("bf16", "fp16"):
        if not precisions[wish]["ok"]:
            runs[wish] = {"passed": True, "refused": precisions[wish]["reason"]}
            say(f"  {wish}: refused ({precisions[wish]['reason']})")
            continue
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            done = train(name, Path(folder) / "run", TOY | {"precision": wish})
            facts: dict[str, Any] = {"seconds": round(time.perf_counter() - started, 1)}
            passed = done.returncode == 0
            if passed and UNRECORDED in done.stderr:
                passed, facts["error"] = False, "steps of the rollouts were not recorded; --debug shows the reason"
            facts |= summaries(Path(folder) / "run") if done.returncode == 0 else {"error": last_line(done)}
        runs[wish] = verdict(f"three stages in {wish}", passed, facts)
    return {"passed": all(run["passed"] for run in runs.values()), **runs}


def zero(name: str) -> dict[str, Any]:
    """Two steps of every stage at ZeRO 0, 1, 2 and 3: the supervised losses are the same."""
    runs: dict[str, Any] = {}
    for stage in range(4):
        with tempfile.TemporaryDirectory() as folder:
            done = train(name, Path(folder) / "run", TWO_STEPS | {"engine.zero_stage": stage})
            if done.returncode:
                runs[str(stage)] = verdict(f"two steps at ZeRO {stage}", False, {"error": last_line(done)})
                continue
            losses = [
                entry["loss"] for part in ("sft", "reward") for entry in steps(Path(folder) / "run", part, "loss")
            ]
        expected = runs.get("0", {}).get("losses", losses)
        same = all(abs(a - b) <= ZERO_TOLERANCE * abs(b) for a, b in zip(losses, expected, strict=True))
        runs[str(stage)] = verdict(f"two steps at ZeRO {stage}", same, {"losses": losses})
    return {"passed": all(run["passed"] for run in runs.values()), **runs}


def rollout_apart(name: str) -> dict[str, Any]:
    """`rollout`, in a separate process."""
    command = [sys.executable, __file__, "--rollout-worker", "--accelerator", name]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        return verdict("generation with and without recorded steps", False, {"error": last_line(done)})
    families = json.loads(done.stdout.splitlines()[-1])
    for family, facts in families.items():
        recorded = facts["recordings"] > 0 if facts["graph_capture"]["ok"] else True
        what = f"generation with and without recorded steps, {family}"
        families[family] = verdict(what, facts["same_tokens"] and recorded, facts)
    return {"passed": all(facts["passed"] for facts in families.values()), **families}


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 48},  # a recording must not repeat the window of the step that it saw
    "gemma3_text": {"sliding_window": 48, "layer_types": ["sliding_attention", "full_attention"] * 4, "head_dim": 64},
}


def rollout(name: str) -> dict[str, Any]:
    """Greedy completions of 50M-parameter models with steps recorded and plain, in turns: tokens and seconds."""
    import accelerators
    from rlhf.engine import distributed

    selection = accelerators.select(name, environ={})
    selection.export(os.environ)
    with distributed.start_process_group(selection) as accelerator:
        return {family: _rollout(accelerator, family, changes) for family, changes in FAMILIES.items()}


def _rollout(
    accelerator: Any,
    family: str,
    changes: dict[str, Any],
    *,
    rows: int = 8,
    prompt: int = 64,
    tokens: int = 128,
    repeats: int = 5,
) -> dict[str, Any]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import accelerators
    from rlhf.config.schema import SamplingConfig
    from rlhf.generation.decoder import Decoder
    from rlhf.models.loading import place_model

    torch.manual_seed(0)
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    attention = accelerator.kernels.get("attention", required=True)
    config = AutoConfig.for_model(family, vocab_size=32_000, num_hidden_layers=8, **sizes, **changes)
    precision = accelerator.precision("auto")
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    place_model(model, accelerator.device(), precision.dtype)
    ids = torch.randint(3, 32_000, (rows, prompt))
    mask = (torch.arange(prompt) >= torch.arange(rows).unsqueeze(1) * 4).long()  # padding of different lengths
    ids, mask = accelerator.to_device((ids * mask, mask))

    def decoder() -> Decoder:
        shapes = accelerators.ShapePolicy("static")
        return Decoder(accelerator, eos_ids=[], pad_id=0, max_new_tokens=tokens, shapes=shapes)

    recorded = decoder()
    capture, accelerator.capture = accelerator.capture, lambda fn, key: fn
    plain = decoder()
    accelerator.capture = capture
    seconds: dict[str, list[float]] = {"recorded": [], "plain": []}
    completions = {}
    before = accelerator.compilations() or 0
    for repeat in range(repeats + 1):  # the first warms up
        for kind, one in (("recorded", recorded), ("plain", plain)):
            accelerator.synchronize()
            started = time.perf_counter()
            completions[kind] = one.generate(model, ids, mask, SamplingConfig(temperature=0)).ids
            accelerator.synchronize()
            if repeat:
                seconds[kind].append(time.perf_counter() - started)
    medians = {kind: statistics.median(times) for kind, times in seconds.items()}
    capability = accelerator.kernels.capabilities()["graph_capture"]
    return {
        "same_tokens": bool(torch.equal(completions["recorded"], completions["plain"])),
        "graph_capture": {"ok": capability.ok, "implementation": capability.implementation},
        "recordings": (accelerator.compilations() or 0) - before,
        "precision": precision.name,
        "work": f"{rows} x ({prompt} + {tokens}) tokens, median of {repeats}, in turns",
        "tokens_per_second": {kind: round(rows * tokens / median) for kind, median in medians.items()},
        "speedup": round(medians["plain"] / medians["recorded"], 2),
    }


def rlhf(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlhf", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def train(name: str, output: Path, settings: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    changes = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return rlhf("--accelerator", name, "--output", str(output), *changes)


def summaries(run: Path) -> dict[str, Any]:
    """What each stage says of itself, without its samples."""
    found = {}
    for stage in ("sft", "reward", "ppo"):
        summary = json.loads((run / stage / "stage.json").read_text())
        found[stage] = {key: summary[key] for key in ("before", "after", "seconds", "peak_memory")}
    return found


def steps(run: Path, stage: str, key: str) -> list[dict[str, Any]]:
    lines = (run / stage / "metrics.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if key in entry]


def verdict(what: str, passed: bool, facts: dict[str, Any]) -> dict[str, Any]:
    say(f"  {what}: {'passed' if passed else 'FAILED'}{': ' + facts['error'] if 'error' in facts else ''}")
    return {"passed": passed, **facts}


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
