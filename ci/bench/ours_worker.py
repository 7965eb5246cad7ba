"""Run our side of a benchmark: a stage of `rlhf`, or only PPO's rollouts, one step per line on stdin.

The benchmarks start this script, in the project's environment; it is not for use from a shell. It sets little more
than the sizes of the work: every key that `settings` leaves out is at its default.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from channel import Channel

from rlhf.config.schema import Stage, build_config
from rlhf.engine.select import select_accelerator
from rlhf.runs.directory import RunDirectory

SUPERVISED = ("sft", "reward", "dpo")
LARGE = 2e9  # parameters; above this, rollouts are those of a policy that LoRA trains


def main() -> None:
    work = json.loads(Path(sys.argv[1]).read_text())
    channel = Channel()
    with tempfile.TemporaryDirectory() as output:
        config = build_config(settings(work, output))
        selection = select_accelerator(config)
        # This imports torch and DeepSpeed, which read the environment that `select_accelerator` has set.
        from rlhf.engine import distributed

        with distributed.start_process_group(selection) as accelerator:
            serve(channel, work, config, accelerator)


def settings(work: dict[str, Any], output: str) -> dict[str, Any]:
    """Return the recipe for the work.

    `work["stage"]` is sft, reward, dpo, ppo or rollout. The last is PPO's generation with a policy and no critic. Of
    ppo, `work["ppo"]` has further keys.
    """
    values: dict[str, Any] = {
        "output": output,
        "accelerator": work["accelerator"],
        "precision": work.get("precision", "bf16"),
        "model": {"path": work["model"]},
        "data": {"max_prompt_length": work["prompt_tokens"], "max_completion_length": work["completion_tokens"]},
    }
    if work.get("lora"):
        values |= {"lora": {"rank": work["lora"]}}
    if work.get("zero_stage") is not None:
        values |= {"engine": {"zero_stage": work["zero_stage"]}}
    rows = {"batch_size": work["batch_size"], "micro_batch_size": work.get("micro_batch_size")}
    if work["stage"] in SUPERVISED:
        optimizer = {"learning_rate": work["learning_rate"], "schedule": "constant"}
        start = {} if work["stage"] == "sft" else {"model": work["model"]}  # else that of a finished sft stage
        start |= {"loss": "last"} if work["stage"] == "reward" else {}  # as TRL's
        return values | {work["stage"]: rows | start | {"optimizer": optimizer, "epochs": 100_000, "dropout": 0.0}}
    ppo = rows | {"ppo_epochs": 1, "steps": 100_000, "actor": work["model"], "reward_model": work["model"]}
    ppo |= work.get("ppo", {})
    if work["stage"] == "rollout":
        ppo["estimator"] = "reinforce++"
        values |= {"lora": {"rank": 8}} if work["parameters"] > LARGE else {}
    return values | {"ppo": ppo}


def serve(channel: Channel, work: dict[str, Any], config: Any, accelerator: Any) -> None:
    """Build the stage of the work, and run one of its steps for each command."""
    import deepspeed
    import torch
    import transformers

    import rlhf
    from rlhf.trainers import pipeline

    names = ("attention", "inference_weights", "graph_capture", "adamw")
    capabilities = accelerator.kernels.capabilities()
    facts = {
        "versions": {
            "rlhf": rlhf.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "deepspeed": deepspeed.__version__,
        },
        "threads": torch.get_num_threads(),
        "chosen": {name: capabilities[name].implementation for name in names if name in capabilities},
    }
    stage: Stage = "ppo" if work["stage"] == "rollout" else work["stage"]
    with pipeline.stage_context(stage, config, accelerator, RunDirectory(Path(config.output))) as context:
        answer = partial(_answer_commands, channel, accelerator)
        if work["stage"] in SUPERVISED:
            train(context, work, lambda step: answer(facts, step))
            return
        ppo = make_ppo(context, work)
        if work["stage"] == "ppo":
            answer(facts, time_phases(ppo, context.recorder))
        else:
            copies = work.get("copies", 1)
            drawn = {name: rows[::copies].repeat_interleave(copies, 0) for name, rows in ppo.prompts(0).items()}
            prompts = accelerator.to_device(drawn)

            def rollout(index: int) -> dict[str, float]:
                ppo.generate(prompts, copies)
                ppo.decoder.release_if_large()
                return {}

            answer(facts, rollout)


def _answer_commands(
    channel: Channel, accelerator: Any, facts: dict[str, Any], step: Callable[[int], dict[str, Any]]
) -> None:
    """Reply with the facts, then run a step for each command until there are no more."""
    channel.reply(**facts)
    index = 0
    while channel.wait():
        phases = step(index)
        accelerator.synchronize()
        on_device = accelerator.device() != accelerator.host_device()
        channel.reply(**phases, **({"device_gib": round(accelerator.memory().peak / 2**30, 2)} if on_device else {}))
        index += 1
    sys.exit(0)


def time_phases(ppo: Any, recorder: Any) -> Callable[[int], dict[str, float]]:
    """Return a function that runs a PPO step and returns the seconds of each phase."""
    seconds: dict[str, float] = {}

    def add_timer(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run_timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start
            return result

        return run_timed

    ppo.draw, ppo.score = add_timer("generation", ppo.draw), add_timer("scoring", ppo.score)

    def step(index: int) -> dict[str, float]:
        seconds.clear()
        start = time.perf_counter()
        recorder.log(index, metrics := ppo.step(index))
        assert not (ppo.settings.generation_exact and metrics["draw_gap"]), "drawn log-probabilities are not exact"
        training = time.perf_counter() - start - sum(seconds.values())
        return {**seconds, "training": training, "tokens": metrics["tokens"]}

    return step


def make_ppo(context: Any, work: dict[str, Any]) -> Any:
    """Return a PPO trainer on the prompts of the work."""
    from rlhf.data.examples import Prompt
    from rlhf.data.records import Message, Row
    from rlhf.data.stage_dataset import StageData
    from rlhf.trainers.ppo.trainer import PPOTrainer

    tokenizer, models = loaders(context, work)
    row = Row((Message("user", ""),), "", None, None, None, "benchmark")
    prompts = [Prompt(ids, row) for ids in work["prompts"]]
    ppo = PPOTrainer(context, models, tokenizer, StageData(train=prompts, heldout=prompts, reports=[]))
    if not ppo.servers:  # which end completions themselves
        ppo.decoder.eos_ids.fill_(-1)  # no token ends a completion, as on the other side
    return ppo


def train(context: Any, work: dict[str, Any], answer: Callable[[Callable[[int], dict[str, Any]]], None]) -> None:
    """Build the trainer of a supervised stage on the rows of the work, and pass its step to `answer`."""
    from rlhf.data.examples import Demonstration, Pair
    from rlhf.data.records import Message, Row
    from rlhf.data.stage_dataset import StageData
    from rlhf.trainers.dpo import DPOTrainer
    from rlhf.trainers.supervised import RewardTrainer, SFTTrainer

    tokenizer, models = loaders(context, work)
    row = Row((Message("user", ""),), "", "", "", "", "benchmark")
    kind: Any = Demonstration if work["stage"] == "sft" else Pair
    examples = [kind(*ids, row) for ids in work["rows"]]
    trainer_class: Any = {"sft": SFTTrainer, "reward": RewardTrainer, "dpo": DPOTrainer}[work["stage"]]
    trainer = trainer_class(context, models, tokenizer, StageData(train=examples, heldout=examples, reports=[]))

    def step(index: int) -> dict[str, Any]:
        context.recorder.log(index, metrics := trainer.step(index))
        return {"loss": metrics["loss"]}

    answer(step)


def loaders(context: Any, work: dict[str, Any]) -> tuple[Any, Any]:
    """Return the tokenizer, and the loaders of a role's language model or model with a scalar head."""
    from rlhf.models.compatibility import choose_attention
    from rlhf.models.loading import load_causal_lm, load_model_tokenizer, load_scalar_head

    model, path = context.config.model, work["model"]
    tokenizer, _ = load_model_tokenizer(model)
    options: dict[str, Any] = {"attention": choose_attention(context.accelerator, path, model).name, "path": path}
    models = SimpleNamespace(
        causal_lm=lambda role: load_causal_lm(model, tokenizer, **options),
        scalar_head=lambda role: load_scalar_head(model, tokenizer, seed=0, **options),
    )
    return tokenizer, models


if __name__ == "__main__":
    main()
