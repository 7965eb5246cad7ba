"""The models of each stage as the plan sees them: which shape each role has, and whose weights it shares."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rlhf.config import Config, Stage
from rlhf.planning.held import Model
from rlhf.planning.shapes import Shape, shape_from, shape_of
from rlhf.roles import ROLES, Name, holdings
from rlhf.settings import STARTS
from rlhf.sharing import base_of

EMBEDDED = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "tie_word_embeddings": True,
}
"""The embedded Llama (rlhf.models.embedded), with the vocabulary of the embedded world's tokenizer."""

Shapes = Mapping[str | None, Shape]
"""By the path that a stage starts from; None is the embedded model."""


def models_of(config: Config, stage: Stage, shapes: Shapes | None = None) -> dict[Name, Model]:
    """The models of a stage, each of the shape of what it is loaded from.

    Args:
        shapes: those that are known already.

    Raises:
        ConfigError: the shape of a model is not known.
    """
    found = {}
    shared = _shared(config) if stage == "ppo" else ()
    for role in ROLES[stage]:
        path, _ = source(config, role.start)
        shape = (shapes or {}).get(path)
        if shape is None:
            shape = shape_of(path) if path else shape_from(EMBEDDED, "the embedded model")
        found[role.name] = Model(role.name, shape, role.scalar_head, shared=role.name in shared)
    return found


def source(config: Config, key: str) -> tuple[str | None, tuple[str, ...]]:
    """The model that the start `key` comes down to, and the stages that train it before; None: the embedded one."""
    start = next(start for starts in STARTS.values() for start in starts if start.key == key)
    section, name = key.split(".")
    named: str | None = getattr(getattr(config, section), name)
    if named or start.earlier is None:
        return named, ()
    path, through = source(config, STARTS[start.earlier][0].key)
    return path, (*through, start.earlier)


def _shared(config: Config) -> Collection[Name]:
    """PPO's models that stand on the frozen weights of another; as `rlhf.sharing` decides it once folders are there."""
    held = holdings(config, "ppo")
    if config.lora.share_base is False or any(holding.zero_stage == 3 for holding in held.values()):
        return ()
    if len({holding.engine.frozen for holding in held.values()}) > 1:
        return ()
    adapted = {name for name in ("actor", "critic") if held[name].lora.rank}
    found: set[Name] = {"reward"} if "critic" in adapted else set()
    if "reference" in held and "actor" in adapted:
        found.add("reference")
    actor, through = source(config, "ppo.actor")
    reward, longer = source(config, "ppo.reward_model")
    trained_on_it = bool(actor and reward and base_of(reward) == actor)
    if (reward, longer) == (actor, (*through, "reward")):
        trained_on_it = holdings(config, "reward")["reward"].lora.rank > 0
    if adapted == {"actor", "critic"} and trained_on_it:
        found.add("critic")
    elif adapted == {"actor"} and trained_on_it:
        found.add("reward")
    return found
