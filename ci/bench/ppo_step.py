"""Benchmark: one PPO step (rollout, scoring, training) of a 135M-parameter Llama, ours against trl's PPOTrainer.

Two worker processes, one per environment, take turns on the whole machine: A B A B ..., so that whatever else the
machine does meets both. Both get the same model, prompts, batch, lengths and threads. Medians go to results/*.json.
Make the other environment first with `setup_trl.sh`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from channel import Worker
from machine import machine, results_file

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TRL_PYTHON = HERE / ".trl-venv" / "bin" / "python"

# The architecture of SmolLM2-135M. Weights are random: their values do not change the work of a step, and a
# random model draws every token with a chance of 1 in 49,152, so that hardly a row ends before the last token.
ARCHITECTURE = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
EOS, PAD = 2, 3
SETTINGS = {
    "both": "batch 16, 1 PPO epoch, 1 minibatch, 1 micro-batch; sampling at temperature 1 from the whole vocabulary; "
    "no gradient checkpointing; separate policy, reference, value and reward models; AdamW",
    "ours": "bf16 weights and gradients, float32 master weights and optimizer states (DeepSpeed ZeRO 1)",
    "trl bf16-weights": "bf16 weights, gradients and optimizer states, no autocast; "
    "no stop token, no sample completions, no reports, no checkpoints",
    "trl bf16-autocast": "float32 trained weights under bf16 autocast, bf16 frozen models; otherwise the same",
}


class Side:
    """A worker, and what its steps took."""

    def __init__(self, python: Path, script: str, workload: dict[str, Any], *options: str) -> None:
        self._worker = Worker(
            [str(python), str(HERE / script), json.dumps(workload), *options],
            errors=Path(workload["model"]) / f"{script}.log",
            environment={"PYTHONPATH": str(ROOT)},
        )
        self._facts = dict(self._worker.ready)
        self._generation: list[float] = []

    def step(self, *, record: bool) -> None:
        reply = self._worker.step(record=record)
        if record:
            self._generation.append(reply["generation"])
        self._facts["peak_gib"] = reply["peak_gib"]

    def summary(self, rows: int) -> dict[str, Any]:
        seconds = self._worker.seconds
        median = statistics.median(seconds)
        return {
            **self._facts,
            "seconds": [round(value, 3) for value in seconds],
            "median_seconds": round(median, 3),
            "median_generation_seconds": round(statistics.median(self._generation), 3),
            "median_other_seconds": round(statistics.median(map(float.__sub__, seconds, self._generation)), 3),
            "samples_per_second": round(rows / median, 3),
        }

    def stop(self) -> None:
        self._worker.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each side (default: 10)")
    parser.add_argument("--warmup", type=int, default=2, help="steps of each side before those (default: 2)")
    parser.add_argument("--sides", nargs="+", choices=("ours", "trl"), default=["ours", "trl"])
    parser.add_argument("--trl-precision", choices=("bf16-weights", "bf16-autocast"), default="bf16-weights")
    parser.add_argument("--output", type=Path, help="JSON file (default: results/ppo_step-<machine>.json)")
    arguments = parser.parse_args()
    if "trl" in arguments.sides and not TRL_PYTHON.exists():
        sys.exit(f"{TRL_PYTHON}: no such environment; run ci/bench/setup_trl.sh first")

    with tempfile.TemporaryDirectory() as folder:
        workload = {"batch_size": 16, "prompt_tokens": 16, "completion_tokens": 32, "model": folder}
        make_model(Path(folder))
        draw = random.Random(0)
        workload["prompts"] = [[draw.randrange(16, 49_152) for _ in range(16)] for _ in range(256)]
        start = {
            "ours": lambda: Side(Path(sys.executable), "ours_worker.py", workload),
            "trl": lambda: Side(TRL_PYTHON, "trl_worker.py", workload, "--precision", arguments.trl_precision),
        }
        sides = {side: start[side]() for side in arguments.sides}
        for number in range(arguments.warmup + arguments.steps):
            timed = number >= arguments.warmup
            for side in sides.values():
                side.step(record=timed)
            print(f"{'step' if timed else 'warm-up'} {number + 1} of {arguments.warmup + arguments.steps}", flush=True)
        found = {name: side.summary(workload["batch_size"]) for name, side in sides.items()}
        for side in sides.values():
            side.stop()

    result = {
        "what": "one PPO step of a 135M-parameter Llama (random weights), batch 16, 16 prompt + 32 completion tokens",
        "settings": {
            "both": SETTINGS["both"],
            "ours": SETTINGS["ours"],
            "trl": SETTINGS[f"trl {arguments.trl_precision}"],
        },
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        **found,
    }
    if len(found) == 2:
        result["ratio"] = round(found["trl"]["median_seconds"] / found["ours"]["median_seconds"], 3)
        print(f"samples per second, ours / trl: {result['ratio']}")
    output = arguments.output or results_file(HERE, "ppo_step")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=2) + "\n")
    print(output)


def make_model(folder: Path) -> None:
    """Save a model with random weights, and a tokenizer of as many words, which both sides load."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(**ARCHITECTURE, bos_token_id=1, eos_token_id=EOS, pad_token_id=PAD)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    words = {f"w{number}": number for number in range(ARCHITECTURE["vocab_size"])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")),
        bos_token="w1",
        eos_token=f"w{EOS}",
        pad_token=f"w{PAD}",
    )
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
