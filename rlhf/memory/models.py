"""The models of each stage as the plan sees them: which shape each role has, and whose weights it shares."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf.config.schema import Config, Stage
from rlhf.memory.model_state import Model
from rlhf.models.shape import Shape, shape_from, shape_of
from rlhf.roles.base_sharing import predict_sharing
from rlhf.roles.lineage import resolve_base_model
from rlhf.roles.roles import RoleName, model_placements

EMBEDDED = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "tie_word_embeddings": True,
}
"""The embedded Llama (rlhf.models.toy_model), with the vocabulary of the embedded world's tokenizer."""

Shapes = Mapping[str | None, Shape]
"""By the path that a stage starts from; None is the embedded model."""


def models_of(config: Config, stage: Stage, shapes: Shapes | None = None) -> dict[RoleName, Model]:
    """The models of a stage, each of the shape of what it is loaded from.

    Args:
        shapes: those that are known already.

    Raises:
        ConfigError: the shape of a model is not known.
    """
    found = {}
    held = model_placements(config, stage)
    shared = predict_sharing(config, held).donors if stage == "ppo" else ()
    for role in (placement.role for placement in held.values()):
        path = resolve_base_model(config, role.base).path
        shape = (shapes or {}).get(path)
        if shape is None:
            shape = shape_of(path) if path else shape_from(EMBEDDED, "the embedded model")
        found[role.name] = Model(role.name, shape, role.scalar_head, shared=role.name in shared)
    return found
