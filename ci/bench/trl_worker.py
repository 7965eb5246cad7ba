"""The TRL side of the benchmarks: a trainer of trl, one step for each line on stdin.

A trainer's `train()` is one loop, so it is held at the end of each step by a callback. Runs in the environment
that `setup_trl.sh` makes.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from channel import Channel

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", type=Path, help="JSON file")
    parser.add_argument("--precision", choices=("bf16-weights", "bf16-autocast"), required=True)
    parser.add_argument("--options", type=json.loads, default={}, help="of the trainer's configuration")
    given = parser.parse_args()
    work = json.loads(given.workload.read_text())
    channel = Channel()
    make = {"ppo": ppo_trainer, "sft": sft_trainer, "reward": reward_trainer}[work["stage"]]
    with tempfile.TemporaryDirectory() as output:
        options = common(work, given.precision, output) | given.options
        make(work, given.precision, options, Hold(channel)).train()


def common(work: dict[str, Any], precision: str, output: str) -> dict[str, Any]:
    """What the configurations of all trainers have."""
    rows = work["batch_size"]
    micro = work.get("micro_batch_size") or rows
    return {
        "output_dir": output,
        "use_cpu": work["accelerator"] == "cpu",
        "bf16": precision == "bf16-autocast",
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": rows // micro,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 0,
    }


def causal(path: str, dtype: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def scalar(path: str, dtype: Any) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype, num_labels=1)


def dtype_of(precision: str) -> Any:
    """Of the weights that are trained."""
    import torch

    return torch.float32 if precision == "bf16-autocast" else torch.bfloat16


def ppo_trainer(work: dict[str, Any], precision: str, options: dict[str, Any], hold: Any) -> Any:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    path, batch = work["model"], work["batch_size"]
    # With autocast only the trained models need float32 weights.
    trained, frozen = dtype_of(precision), torch.bfloat16
    return PPOTrainer(
        args=PPOConfig(
            num_mini_batches=1,
            num_ppo_epochs=1,
            local_rollout_forward_batch_size=batch,
            total_episodes=batch * 100_000,  # the driver decides when to stop
            response_length=work["completion_tokens"],
            stop_token=None,
            temperature=1.0,
            num_sample_generations=0,
            **options,
        ),
        processing_class=AutoTokenizer.from_pretrained(path),
        model=causal(path, trained),
        ref_model=causal(path, frozen),
        reward_model=scalar(path, frozen),
        value_model=scalar(path, trained),
        train_dataset=Dataset.from_dict({"input_ids": work["prompts"]}),
        callbacks=[hold],
    )


def sft_trainer(work: dict[str, Any], precision: str, options: dict[str, Any], hold: Any) -> Any:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    rows = {
        "input_ids": [prompt + completion for prompt, completion in work["rows"]],
        "completion_mask": [[0] * len(prompt) + [1] * len(completion) for prompt, completion in work["rows"]],
    }
    lasting = {"num_train_epochs": 100_000, "learning_rate": work["learning_rate"], "lr_scheduler_type": "constant"}
    return SFTTrainer(
        args=SFTConfig(completion_only_loss=True, max_length=None, **lasting, **options),
        model=causal(work["model"], dtype_of(precision)),
        processing_class=AutoTokenizer.from_pretrained(work["model"]),
        train_dataset=Dataset.from_dict(rows),
        callbacks=[hold],
    )


def reward_trainer(work: dict[str, Any], precision: str, options: dict[str, Any], hold: Any) -> Any:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    rows = {
        "chosen_ids": [prompt + chosen for prompt, chosen, _ in work["rows"]],
        "rejected_ids": [prompt + rejected for prompt, _, rejected in work["rows"]],
    }
    lasting = {"num_train_epochs": 100_000, "learning_rate": work["learning_rate"], "lr_scheduler_type": "constant"}
    return RewardTrainer(
        args=RewardConfig(max_length=None, **lasting, **options),
        model=scalar(work["model"], dtype_of(precision)),
        processing_class=AutoTokenizer.from_pretrained(work["model"]),
        train_dataset=Dataset.from_dict(rows),
        callbacks=[hold],
    )


def Hold(channel: Channel) -> Any:
    """A callback that waits for a command before each step and replies after it."""
    import torch
    import transformers
    import trl
    from transformers import TrainerCallback
    from trl.experimental.ppo import ppo_trainer

    generated: list[float] = []
    generate = ppo_trainer.batch_generation

    def timed_generation(*arguments: Any) -> Any:
        begun = time.perf_counter()
        result = generate(*arguments)
        generated.append(time.perf_counter() - begun)
        return result

    ppo_trainer.batch_generation = timed_generation

    def wait() -> None:
        if not channel.wait():
            raise SystemExit

    class Callback(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            channel.reply(
                versions={"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
                threads=torch.get_num_threads(),
            )
            wait()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            phases = {"generation": generated.pop()} if generated else {}
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                phases["device_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            channel.reply(**phases)
            wait()

    return Callback()


if __name__ == "__main__":
    main()
