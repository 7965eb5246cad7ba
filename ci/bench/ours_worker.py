"""Our side of `ppo_step.py`: runs `rlhf`'s PPO, one step for each line on stdin. Runs in the project's environment."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from channel import Channel

from rlhf.config import build_config
from rlhf.launch import select
from rlhf.run import RunDirectory


def main() -> None:
    workload = json.loads(sys.argv[1])
    channel = Channel()
    with tempfile.TemporaryDirectory() as output:
        config = build_config(
            {
                "output": output,
                "accelerator": "cpu",
                "precision": "bf16",
                "model": {"path": workload["model"]},
                "data": {
                    "max_prompt_length": workload["prompt_tokens"],
                    "max_completion_length": workload["completion_tokens"],
                },
                "engine": {"shapes": "static"},
                "ppo": {"batch_size": workload["batch_size"], "ppo_epochs": 1, "steps": 100_000},
            }
        )
        selection = select(config)
        # These import torch and DeepSpeed, which must find the environment that `select` has set.
        from rlhf.engine import distributed

        with distributed.session(selection) as accelerator:
            serve(channel, workload, config, accelerator)


def serve(channel: Channel, workload: dict[str, Any], config: Any, accelerator: Any) -> None:
    import deepspeed
    import torch
    import transformers

    import rlhf
    from accelerators import ShapePolicy
    from rlhf.engine import distributed
    from rlhf.metrics.recorder import Recorder
    from rlhf.stages.context import StageContext

    directory = RunDirectory(Path(config.output))
    stage = directory.stage("ppo")
    with Recorder(stage) as recorder:
        context = StageContext(
            config=config,
            accelerator=accelerator,
            precision=accelerator.precision(config.precision),
            shapes=ShapePolicy(config.engine.shapes),
            world=distributed.world(),
            run=directory,
            directory=stage,
            recorder=recorder,
        )
        ppo = make_ppo(context, workload)
        generation = 0.0
        generate = ppo.generate

        def timed_generation(prompts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            nonlocal generation
            begun = time.perf_counter()
            result = generate(prompts)
            generation = time.perf_counter() - begun
            return result

        ppo.generate = timed_generation
        channel.reply(
            versions={
                "rlhf": rlhf.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "deepspeed": deepspeed.__version__,
            },
            threads=torch.get_num_threads(),
        )
        index = 0
        while channel.wait():
            recorder.log(index, ppo.step(index))
            channel.reply(generation=generation)
            index += 1


def make_ppo(context: Any, workload: dict[str, Any]) -> Any:
    from rlhf.data.examples import Prompt
    from rlhf.data.rows import Message, Row
    from rlhf.data.tokenization import StageData
    from rlhf.models.attention import choose_attention
    from rlhf.models.loading import load_causal_lm, load_model_tokenizer, load_scalar_head
    from rlhf.rl.trainer import PPO, Models

    model, path = context.config.model, workload["model"]
    tokenizer, _ = load_model_tokenizer(model)
    loaded = {"attention": choose_attention(context.accelerator, path, model).name, "path": path}
    policy = partial(load_causal_lm, model, tokenizer, **loaded)
    scalar = partial(load_scalar_head, model, tokenizer, seed=0, **loaded)
    row = Row((Message("user", ""),), "", None, None, None, "benchmark")
    prompts = [Prompt(ids, row) for ids in workload["prompts"]]
    models = Models(*(lambda holding, load=load: load() for load in (policy, policy, scalar, scalar)))
    return PPO(context, models, tokenizer, StageData(train=prompts, heldout=prompts, reports=[]))


if __name__ == "__main__":
    main()
