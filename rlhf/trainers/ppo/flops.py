"""What the phases of a PPO step did: the tokens that they worked on, and the operations that this takes."""

from __future__ import annotations

from dataclasses import replace

from rlhf.engine.metric_sums import Metrics
from rlhf.models.flops import Texts, generated
from rlhf.reporting.timers import Phase
from rlhf.trainers.context import StageContext
from rlhf.trainers.ppo.pretraining_loss import Pretraining


def tell(
    context: StageContext,
    found: Metrics,
    updates: float,
    pretraining: Pretraining | None = None,
    *,
    reused: bool = False,
) -> None:
    """Tell `context.phases` of a step.

    Args:
        found: sums of `rlhf.trainers.ppo.metrics.rollout_statistics` over all ranks.
        updates: how many were made of the rollout.
        pretraining: raw text that each update has beside the rollout's.
        reused: the update differentiates the passes that have scored policy and critic, and makes none of its own.
    """
    settings, products = context.config.ppo, context.products
    texts = Texts(found["text_tokens"], found["text_pairs"], found["tokens"])
    passes = settings.ppo_epochs * updates / settings.updates
    beside = pretraining.texts if pretraining else Texts(0, 0, 0)
    flops: dict[Phase, float] = {}
    if products is not None:
        values = texts._replace(outputs=texts.tokens)  # a scalar head is read at every token
        read = {name: values if name in ("critic", "reward") else texts for name in (*products, "reference")}
        actor = products["actor"]
        known = {"reference": replace(actor, adapters=0)} | products
        scored = {name: known[name].forward(read[name]) for name in read}
        trained = {name: products[name].update(read[name]) for name in ("actor", "critic") if name in products}
        updated = sum(trained.values()) - (sum(scored[name] for name in trained) if reused else 0)
        prompts = Texts(found["prompt_tokens"], found["prompt_pairs"], 0)
        flops = {
            "generation": actor.forward(generated(found["rows"], prompts, texts)),
            "scoring": sum(scored.values()),
            "training": passes * updated + updates * actor.update(beside),
        }
    tokens: dict[Phase, float] = {
        "generation": texts.outputs,
        "scoring": texts.tokens,
        "training": passes * texts.tokens + updates * beside.tokens,
    }
    for phase, count in tokens.items():
        context.phases.count_work(phase, tokens=count, flops=flops.get(phase))
