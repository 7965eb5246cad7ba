"""Stage 3, PPO: reinforcement learning of a policy from a reward model.

Prompts flow in; a policy and what it does on held-out prompts, before and after, flow out. The algorithm is
`rlhf.rl.trainer.PPO`'s; this is the stage around it.
"""

from __future__ import annotations

from typing import Any

from rlhf.data.tokenization import Prompt, StageData
from rlhf.engine.statistics import Numbers
from rlhf.rl.trainer import PPO, Models
from rlhf.stages.context import StageContext
from rlhf.stages.evaluation import Judge, evaluate, record
from rlhf.stages.leaving import leave, leave_average
from rlhf.stages.loop import measure_once, run_steps


def run(
    context: StageContext, models: Models, tokenizer: Any, data: StageData, judge: Judge | None = None
) -> dict[str, Any]:
    """Train the policy on `data.train`'s prompts, save it, and return the stage's summary.

    Args:
        judge: (prompt, completion) -> approved; used in evaluation only.
    """
    ppo = PPO(context, models, tokenizer, data)
    settings = context.config.ppo
    examples = [example for example in data.heldout if isinstance(example, Prompt)][: settings.eval_rows]

    def measure(when: str) -> dict[str, Any]:
        found = evaluate(context, ppo, examples, when, judge)
        record(context, 0 if when == "before" else settings.steps, found)
        return found

    before = measure_once(context, lambda: measure("before"))
    every = max(1, settings.steps // 10)

    def step(index: int) -> Numbers:
        numbers = ppo.step(index)
        if (index + 1) % every == 0:
            _record_sample(context, ppo, index + 1)
        return numbers

    run_steps(
        context,
        total_steps=settings.steps,
        step=step,
        engines=ppo.engines,
        settings=settings,
        unit="tokens",
        shown=("reward", "kl", "response_length"),
        save_state=ppo.save_state,
        load_state=ppo.load_state,
    )
    after = measure("after")
    leave(context, ppo.actor, tokenizer)
    if ppo.actor.ema:
        with ppo.actor.ema.in_place():
            found = evaluate(context, ppo, examples, "of the average", judge)
            average = {f"ema_{key}": value for key, value in found["numbers"].items()}
            context.recorder.log(settings.steps, {f"heldout_{key}": value for key, value in average.items()})
            after["numbers"] |= average
            leave_average(context, ppo.actor, tokenizer)
    samples = [
        {"prompt": old["prompt"], "before": old["completion"], "after": new["completion"]}
        for old, new in zip(before["samples"], after["samples"])
    ]
    return {
        "before": before["numbers"],
        "after": after["numbers"],
        "steps": settings.steps,
        "parameters": {name: engine.parameter_counts for name, engine in ppo.engines.items()},
        "samples": samples,
    }


def _record_sample(context: StageContext, ppo: PPO, step: int) -> None:
    """The first sequence of the latest rollout, as text."""
    if context.world.is_main and ppo.experience is not None:
        real = ppo.experience.attention_mask[0].bool()
        context.recorder.text("completion", step, ppo.tokenizer.decode(ppo.experience.input_ids[0][real]))
