"""Stage 3, PPO: reinforcement learning of a policy from a reward model.

Prompts flow in; a policy and what it does on held-out prompts, before and after, flow out. The algorithm is
`rlhf.trainers.ppo.trainer.PPO`'s; this is the stage around it.
"""

from __future__ import annotations

from typing import Any

from rlhf.data.examples import Prompt
from rlhf.data.stage_dataset import StageData
from rlhf.engine.metric_sums import Metrics
from rlhf.trainers.context import StageContext
from rlhf.trainers.evaluation_schedule import Found
from rlhf.trainers.loop import run_steps
from rlhf.trainers.outputs import leave, say_what_is_left
from rlhf.trainers.ppo.evaluation import Judge, evaluate
from rlhf.trainers.ppo.samples import tell
from rlhf.trainers.ppo.trainer import PPO, Models


def run(
    context: StageContext, models: Models, tokenizer: Any, data: StageData, judge: Judge | None = None
) -> dict[str, Any]:
    """Train the policy on `data.train`'s prompts, save it, and return the stage's summary.

    Args:
        judge: (prompt, completion) -> approved; used in evaluation only.
    """
    ppo = PPO(context, models, tokenizer, data)
    settings = context.config.ppo

    def step(index: int) -> Metrics:
        numbers = ppo.step(index)
        if settings.shows_samples(index + 1, ppo.steps):
            tell(context, ppo, index + 1)
        return numbers

    summary = run_steps(
        context,
        total_steps=ppo.steps,
        step=step,
        measure=lambda when: measure(context, ppo, data, when, judge),
        leave=lambda folder: leave(context, ppo.actor, tokenizer, folder, ppo.critic),
        engines=ppo.engines,
        settings=settings,
        unit="tokens",
        shown=("reward", "kl", "response_length"),
        save_state=ppo.save_state,
        load_state=ppo.load_state,
    )
    return summary | left(context, ppo)


def measure(context: StageContext, ppo: PPO, data: StageData, when: str, judge: Judge | None) -> Found:
    """What the policy does on the held-out prompts, and its moving average where there is one."""
    examples = [example for example in data.heldout if isinstance(example, Prompt)][: context.config.ppo.eval_rows]
    found = evaluate(context, ppo, examples, when, judge)
    if not ppo.actor.ema or when == "before":  # which it begins at
        return found
    with ppo.actor.ema.in_place():
        average = evaluate(context, ppo, examples, f"{when}, by the average", judge)
    return found._replace(numbers=found.numbers | {f"ema_{key}": value for key, value in average.numbers.items()})


def left(context: StageContext, ppo: PPO) -> dict[str, Any]:
    """Say what the stage has left, and what its summary says of that."""
    say_what_is_left(context, ppo.actor)
    return {"parameters": {name: engine.parameter_counts for name, engine in ppo.engines.items()}}
