"""The TRL side of `ppo_step.py`: runs trl's PPOTrainer, one step for each line on stdin.

`PPOTrainer.train()` is one loop, so it is held at the end of each step by a callback. Runs in the environment
that `setup_trl.sh` makes.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from typing import Any

from channel import Channel

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", type=json.loads)
    parser.add_argument("--precision", choices=("bf16-weights", "bf16-autocast"), required=True)
    arguments = parser.parse_args()
    channel = Channel()
    with tempfile.TemporaryDirectory() as output:
        trainer = make_trainer(arguments.workload, arguments.precision, output, Hold(channel))
        trainer.train()


def make_trainer(workload: dict[str, Any], precision: str, output: str, hold: Any) -> Any:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    path, batch = workload["model"], workload["batch_size"]
    autocast = precision == "bf16-autocast"
    # With autocast only the trained models need float32 weights.
    trained, frozen = torch.float32 if autocast else torch.bfloat16, torch.bfloat16

    def causal(dtype: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)

    def scalar(dtype: Any) -> Any:
        return AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype, num_labels=1)

    return PPOTrainer(
        args=PPOConfig(
            output_dir=output,
            use_cpu=True,
            bf16=autocast,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=1,
            num_mini_batches=1,
            num_ppo_epochs=1,
            local_rollout_forward_batch_size=batch,
            total_episodes=batch * 100_000,  # the driver decides when to stop
            response_length=workload["completion_tokens"],
            stop_token=None,
            temperature=1.0,
            gradient_checkpointing=False,
            num_sample_generations=0,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            seed=0,
        ),
        processing_class=AutoTokenizer.from_pretrained(path),
        model=causal(trained),
        ref_model=causal(frozen),
        reward_model=scalar(frozen),
        value_model=scalar(trained),
        train_dataset=Dataset.from_dict({"input_ids": workload["prompts"]}),
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
            channel.reply(generation=generated.pop())
            wait()

    return Callback()


if __name__ == "__main__":
    main()
