"""Run the TRL side of a benchmark: one of trl's trainers, one step per line on stdin.

The benchmarks start this script, in the environment that setup_trl.sh creates; it is not for use from a shell. A
trainer's `train()` is a single loop, so a callback waits for the next command at the end of each step.
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
Phases = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=tuple(MAKERS), help="trainer of TRL")
    parser.add_argument("workload", type=Path, help="JSON file of the work")
    parser.add_argument("--precision", choices=("bf16-weights", "bf16-autocast", "fp32"), required=True)
    parser.add_argument(
        "--options", type=json.loads, default={}, help="JSON object of options for the trainer's configuration"
    )
    arguments = parser.parse_args()
    work = json.loads(arguments.workload.read_text())
    channel = Channel()
    with tempfile.TemporaryDirectory() as output:
        options = common(work, arguments.precision, output) | arguments.options
        phases: Phases = {}
        if arguments.trainer == "ppo":
            time_generation(phases)
        trainer = MAKERS[arguments.trainer](work, arguments.precision, options, command_callback(channel, phases))
        if arguments.trainer in ("rloo", "grpo"):
            time_group_generation(trainer, phases)
        trainer.train()


def common(work: dict[str, Any], precision: str, output: str) -> dict[str, Any]:
    """Return the options that the configurations of all trainers share."""
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


def schedule(work: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the supervised trainers: a constant rate, and rows in the order of the work."""
    return {
        "num_train_epochs": 100_000,
        "learning_rate": work["learning_rate"],
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
    }


def causal(path: str, dtype: Any) -> Any:
    """Load a language model."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def scalar(path: str, dtype: Any) -> Any:
    """Load a model with a scalar head."""
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype, num_labels=1)


def trained_dtype(work: dict[str, Any], precision: str) -> Any:
    """Return the dtype of the weights of a trained model, or of those that its adapters leave as they are."""
    import torch

    return torch.float32 if precision == "bf16-autocast" and not work.get("lora") else frozen_dtype(precision)


def frozen_dtype(precision: str) -> Any:
    """Return the dtype of the weights that are not trained."""
    import torch

    return torch.float32 if precision == "fp32" else torch.bfloat16


def adapters(work: dict[str, Any], task: str = "CAUSAL_LM") -> dict[str, Any]:
    """Return the argument of a trainer for LoRA as in ours: on all linear layers but the last, scaled by 16 / rank."""
    if not work.get("lora"):
        return {}
    from peft import LoraConfig

    return {
        "peft_config": LoraConfig(r=work["lora"], lora_alpha=16, target_modules="all-linear", task_type=task),
    }


def ppo_trainer(work: dict[str, Any], precision: str, options: dict[str, Any], callback: Any) -> Any:
    """Return TRL's PPO trainer on the prompts of the work."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    path, batch = work["model"], work["batch_size"]
    # With autocast only the trained models need float32 weights.
    trained, frozen = trained_dtype(work, precision), frozen_dtype(precision)
    return PPOTrainer(
        args=PPOConfig(
            num_mini_batches=1,
            num_ppo_epochs=1,
            local_rollout_forward_batch_size=batch,
            total_episodes=batch * 100_000,  # the benchmark decides when to stop
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
        callbacks=[callback],
    )


def rloo_trainer(work: dict[str, Any], precision: str, options: dict[str, Any], callback: Any) -> Any:
    """Return TRL's RLOO trainer on the prompts of the work."""
    from trl import RLOOConfig, RLOOTrainer

    return RLOOTrainer(
        args=RLOOConfig(**group_options(work, precision, options)), **group_parts(work, precision, callback)
    )


def grpo_trainer(work: dict[str, Any], precision: str, options: dict[str, Any], callback: Any) -> Any:
    """Return TRL's GRPO trainer on the prompts of the work, with the loss of the paper, which is ours."""
    from trl import GRPOConfig, GRPOTrainer

    loss = {"loss_type": "grpo", "use_bias_correction_kl": False}
    return GRPOTrainer(
        args=GRPOConfig(**group_options(work, precision, options), **loss), **group_parts(work, precision, callback)
    )


def group_options(work: dict[str, Any], precision: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a trainer that compares the completions of a prompt."""
    return options | {
        "num_train_epochs": 100_000,
        "num_generations": work["ppo"]["completions_per_prompt"],
        "max_completion_length": work["completion_tokens"],
        "temperature": 1.0,
        "beta": work["ppo"]["kl_coef"],
        "model_init_kwargs": {"dtype": str(frozen_dtype(precision)).removeprefix("torch.")},  # of the reference
    }


def group_parts(work: dict[str, Any], precision: str, callback: Any) -> dict[str, Any]:
    """Return the models, the reward model's tokenizer and the prompts of such a trainer.

    It takes prompts as texts, and passes texts to the reward model.
    """
    from datasets import Dataset

    path = work["model"]
    policy = causal(path, trained_dtype(work, precision))
    policy.generation_config.eos_token_id = None  # that of the tokenizer takes its place
    tokenizer = number_tokenizer(policy.config.vocab_size)
    prompts = [tokenizer.decode(ids) + " " for ids in work["prompts"]]
    both = work["prompts"][0] + work["prompts"][1]
    if tokenizer(prompts[0] + tokenizer.decode(work["prompts"][1]))["input_ids"] != both:
        raise SystemExit("the tokens of a text are not those that it was made from")
    return {
        "model": policy,
        "processing_class": tokenizer,
        "reward_funcs": scalar(path, frozen_dtype(precision)),
        "reward_processing_classes": tokenizer,
        "train_dataset": Dataset.from_dict({"prompt": prompts}),
        "callbacks": [callback],
        **adapters(work),
    }


def number_tokenizer(vocabulary: int) -> Any:
    """Return a tokenizer whose words are the numbers of its tokens, so that texts keep all tokens.

    Padding and end token come after the vocabulary: no model draws them, so all completions are equally long.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    numbers = Tokenizer(WordLevel({str(number): number for number in range(vocabulary)}, unk_token="0"))
    numbers.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=numbers, pad_token="<pad>", eos_token="<end>")


def sft_trainer(work: dict[str, Any], precision: str, options: dict[str, Any], callback: Any) -> Any:
    """Return TRL's SFT trainer on the rows of the work."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    rows = {
        "input_ids": [prompt + completion for prompt, completion in work["rows"]],
        "completion_mask": [[0] * len(prompt) + [1] * len(completion) for prompt, completion in work["rows"]],
    }
    return SFTTrainer(
        args=SFTConfig(completion_only_loss=True, max_length=None, **schedule(work), **options),
        model=causal(work["model"], trained_dtype(work, precision)),
        processing_class=AutoTokenizer.from_pretrained(work["model"]),
        train_dataset=Dataset.from_dict(rows),
        callbacks=[callback],
        **adapters(work),
    )


def reward_trainer(work: dict[str, Any], precision: str, options: dict[str, Any], callback: Any) -> Any:
    """Return TRL's reward trainer on the pairs of the work."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    rows = {
        "chosen_ids": [prompt + chosen for prompt, chosen, _ in work["rows"]],
        "rejected_ids": [prompt + rejected for prompt, _, rejected in work["rows"]],
    }
    return RewardTrainer(
        args=RewardConfig(max_length=None, **schedule(work), **options),
        model=scalar(work["model"], trained_dtype(work, precision)),
        processing_class=AutoTokenizer.from_pretrained(work["model"]),
        train_dataset=Dataset.from_dict(rows),
        callbacks=[callback],
        **adapters(work, "SEQ_CLS"),
    )


def dpo_trainer(work: dict[str, Any], precision: str, options: dict[str, Any], callback: Any) -> Any:
    """Return TRL's DPO trainer on the pairs of the work, which have tokens already."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    class TokenizedDPOTrainer(DPOTrainer):
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    rows = {name: list(ids) for name, ids in zip(names, zip(*work["rows"]))}
    return TokenizedDPOTrainer(
        args=DPOConfig(max_length=None, **schedule(work), **options),
        model=causal(work["model"], trained_dtype(work, precision)),
        processing_class=AutoTokenizer.from_pretrained(work["model"]),
        train_dataset=Dataset.from_dict(rows),
        callbacks=[callback],
        **adapters(work),
    )


def time_generation(phases: Phases) -> None:
    """Let the PPO trainer write the seconds and the tokens of each generation into `phases`."""
    from trl.experimental.ppo import ppo_trainer

    generate = ppo_trainer.batch_generation

    def generate_timed(model: Any, queries: Any, *args: Any) -> Any:
        start = time.perf_counter()
        rows, logits = generate(model, queries, *args)
        phases.update(generation=time.perf_counter() - start, tokens=rows.numel() - queries.numel())
        return rows, logits

    ppo_trainer.batch_generation = generate_timed


def time_group_generation(trainer: Any, phases: Phases) -> None:
    """Let an RLOO or GRPO trainer write the seconds and the tokens of each generation into `phases`."""
    generate = trainer._generate

    def generate_timed(prompts: list[str]) -> Any:
        start = time.perf_counter()
        result = generate(prompts)
        phases.update(generation=time.perf_counter() - start, tokens=sum(map(len, result[1])))
        return result

    trainer._generate = generate_timed


def command_callback(channel: Channel, phases: Phases) -> Any:
    """Return a callback that waits for a command before each step and replies after it."""
    import torch
    import transformers
    import trl
    from transformers import TrainerCallback

    def wait_for_command() -> None:
        if not channel.wait():
            raise SystemExit

    class Callback(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            channel.reply(
                versions={"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
                threads=torch.get_num_threads(),
            )
            wait_for_command()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                phases["device_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            channel.reply(**phases)
            wait_for_command()

    return Callback()


MAKERS = {
    "ppo": ppo_trainer,
    "rloo": rloo_trainer,
    "grpo": grpo_trainer,
    "sft": sft_trainer,
    "reward": reward_trainer,
    "dpo": dpo_trainer,
}


if __name__ == "__main__":
    main()
