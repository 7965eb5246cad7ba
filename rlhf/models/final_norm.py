"""The norm before a scalar head: where it is, how unequal its gains are, and setting it back under a new head.

BLOOM-560m's gains are so unequal that a reward model of it learns badly in bf16 (microsoft/DeepSpeedExamples#772).
Rounding is relative: the error of a score is in proportion to the root mean square of the gains, which a few large ones
decide, while most of what a new head can learn from has the median gain. Each doubling of their ratio costs most
dimensions one of bf16's eight bits. A head that was trained with its norm needs it; a new one does not.
"""

from __future__ import annotations

import copy
import re
from typing import Any, Literal

import torch
from torch import nn

from rlhf.errors import ConfigError

LARGEST_SPREAD = 2.0
"""Above it `auto` resets: one bit. Gains that are alike have 1 (SmolLM2-135M's 1.03), normal ones around 0 have 1.5."""

_RESET = "_reset_under_a_new_head"


def find_final_norm(model: Any) -> tuple[str, nn.Module] | None:
    """The norm whose output the scalar head of `model` reads, and its name; None where there is none with weights.

    It stands beside the stack of layers, as a rule after it (OPT's before it, where BLOOM has one of its embeddings),
    and is as wide as the head.
    """
    found = []
    for name, module in model.base_model.named_modules():
        if re.search(r"(^|\.)\d", name):  # inside of a layer
            continue
        children = list(module.named_children())
        stacks = [index for index, (_, child) in enumerate(children) if isinstance(child, nn.ModuleList)]
        if not stacks:
            continue
        found += [
            (name.count("."), index < stacks[-1], f"{name}.{own}".lstrip("."), child)
            for index, (own, child) in enumerate(children)
            if _is_norm(child, model)
        ]
    if not found:
        return None
    _, _, name, norm = min(found, key=lambda each: each[:2])
    return name, norm


def check_final_norm(model: Any, wanted: Literal["auto", True, False]) -> None:
    """Raise `ConfigError` where `reward.reset_final_norm` wants a norm reset that `model` has not."""
    if wanted is True and find_final_norm(model) is None:
        raise ConfigError(
            f"reward.reset_final_norm: true, but {type(model).__name__} has no norm with weights before its head; "
            "leave it at auto"
        )


def reset_final_norm(model: Any, wanted: Literal["auto", True, False]) -> str | None:
    """Set the norm before the new head of `model` back to what it was before any training, where that is `wanted`.

    Returns:
        A line that says what was done and why; None: nothing.

    Raises:
        ConfigError: as `check_final_norm`.
    """
    check_final_norm(model, wanted)
    found = find_final_norm(model)
    if found is None or wanted is False:
        return None
    name, norm = found
    fresh = copy.deepcopy(norm)
    model._init_weights(fresh)
    largest, median, spread = _gains(norm, fresh)
    if wanted == "auto" and spread <= LARGEST_SPREAD:
        return None
    norm.load_state_dict(fresh.state_dict())
    setattr(norm, _RESET, True)
    why = f"above {LARGEST_SPREAD:g} a new head loses accuracy in bf16; reward.reset_final_norm=false keeps it"
    return (
        f"the final norm {name} is reset under the new head: its gains have a median of {median:.3g} and reach "
        f"{largest:.3g}, their root mean square is {spread:.1f} times the median; "
        f"{why if wanted == 'auto' else 'reward.reset_final_norm=true asks for it'}"
    )


def was_reset(module: nn.Module) -> bool:
    """Whether `module` is a norm that `reset_final_norm` set back: it is trained as the new head is."""
    return getattr(module, _RESET, False)


def _is_norm(module: nn.Module, model: Any) -> bool:
    weight = getattr(module, "weight", None)
    return "Norm" in type(module).__name__ and weight is not None and weight.shape == (model.score.in_features,)


def _gains(norm: Any, fresh: Any) -> tuple[float, float, float]:
    """(largest, median, root mean square / median) of what a norm multiplies by.

    An untrained norm multiplies by 1, be its weights 1 or, as Gemma's, 0.
    """
    with torch.no_grad():
        gains = (norm.weight.float() - fresh.weight.float() + 1).abs()
    median = gains.median().clamp_min(torch.finfo(torch.float32).tiny)
    return float(gains.max()), float(median), float(gains.square().mean().sqrt() / median)
