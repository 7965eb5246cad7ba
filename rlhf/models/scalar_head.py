"""The class of a reward model or critic: transformers' sequence classifier of a family, or one built here.

A class is built if transformers has none, or one that scores whole sequences, and works with `from_pretrained` and
`save_pretrained`. It consists of the family's backbone, under its name in the language model, and a linear layer
`score`, as the classifiers of most families in transformers do. The norm before the head is reset here too.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, MODEL_MAPPING
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_utils import PreTrainedModel

from rlhf.errors import ConfigError
from rlhf.models.hub import summarize_error

CLASS_SUFFIX = "ScalarHead"
"""The end of the names of classes built here, and so of `architectures` in a saved configuration."""

_README = """# A reward model that plain transformers has no class for

transformers has no sequence classifier of {family} that scores tokens: `AutoModelForSequenceClassification` refuses
this folder, or draws another head. rlhf loads it: name the folder in `ppo.reward_model` or `reward.model`. With
plain transformers, the score of a text is the head's output for its last token:

```python
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoModel, AutoTokenizer

folder = Path(".")
tokenizer = AutoTokenizer.from_pretrained(folder)
backbone = AutoModel.from_pretrained(folder).eval()
files = [safe_open(path, "pt") for path in folder.glob("*.safetensors")]
head = next(file.get_tensor("score.weight") for file in files if "score.weight" in file.keys())  # [1, hidden size]

with torch.no_grad():
    hidden = backbone(**tokenizer("a text", return_tensors="pt")).last_hidden_state
score = (hidden @ head.to(hidden.dtype).T)[0, -1, 0]
```
"""


class BuiltScalarHead(GenericForSequenceClassification):
    """The base of the classes that are built here."""

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> Any:
        """Build a model as transformers' auto classes do."""
        return cls._from_config(config, **options)


def build_scalar_head_class(config: Any) -> Any:
    """Build the class for a family without a token-wise classifier in transformers; return None if it has one.

    Raises:
        ValueError: no class can be built; the message is the reason.
    """
    classifier = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if classifier is not None and hasattr(_build_on_meta(classifier, config), "score"):
        return None
    language_model, backbone = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], MODEL_MAPPING.get(type(config), None)
    children = _build_on_meta(language_model, config).named_children()
    prefix = next((name for name, child in children if type(child) is backbone), None)
    if prefix is None:
        raise ValueError(f"transformers has no class of the backbone alone that {language_model.__name__} builds on")
    family = next(
        cls for cls in reversed(backbone.__mro__) if issubclass(cls, PreTrainedModel) and cls is not PreTrainedModel
    )
    new_class = type(
        backbone.__name__.removesuffix("Model") + CLASS_SUFFIX,
        (BuiltScalarHead, family),
        # transformers inspects the module of a class for its attention implementations.
        {"base_model_prefix": prefix, "config_class": type(config), "__module__": family.__module__},
    )
    _build_on_meta(new_class, config)
    return new_class


def write_readme(model: Any, folder: Path) -> None:
    """Write a README.md next to the weights of a model that plain transformers has no class for."""
    if isinstance(model, BuiltScalarHead):
        (folder / "README.md").write_text(_README.format(family=model.config.model_type), encoding="utf-8")


def describe_loading(model: Any, path: Path) -> str | None:
    """Return how to load the reward model saved at `path`; None if plain transformers has a class for it."""
    if not isinstance(model, BuiltScalarHead):
        return None
    return (
        f"{path}: transformers has no class for {model.config.model_type} with a scalar head, so plain transformers "
        "does not load it; rlhf does, and its README.md shows how to compute scores"
    )


def _build_on_meta(cls: Any, config: Any) -> Any:
    """Build a model of the class without weights."""
    try:
        with torch.device("meta"):
            # With the attention that every class has, instead of the configured one.
            return cls._from_config(copy.deepcopy(config), attn_implementation="eager")
    except Exception as error:  # the architecture's code may raise anything
        raise ValueError(f"{cls.__name__} cannot be built ({summarize_error(error)})") from error


# The norm before the head. BLOOM-560m's gains are so unequal that a reward model of it learns badly in bf16
# (microsoft/DeepSpeedExamples#772). Rounding is relative: the error of a score is proportional to the root mean square
# of the gains, which a few large ones determine, while most dimensions that a new head can learn from have the median
# gain. Each doubling of their ratio costs most dimensions one of bf16's eight bits. A head that was trained with its
# norm needs it; a new one does not.

LARGEST_SPREAD = 2.0
"""Largest ratio that `auto` keeps: one bit. Equal gains have 1 (SmolLM2-135M's 1.03), normal ones around 0 have 1.5."""

_RESET = "_reset_under_a_new_head"


def find_final_norm(model: Any) -> tuple[str, nn.Module] | None:
    """Return the name and the norm whose output the scalar head of `model` reads; None if no norm has weights.

    It is a sibling of the stack of layers, usually after it (OPT's is before it, where BLOOM has one of its
    embeddings), and as wide as the head.
    """
    candidates, width = [], (model.score.in_features,)
    for name, module in model.base_model.named_modules():
        if re.search(r"(^|\.)\d", name):  # inside a layer
            continue
        children = list(module.named_children())
        stacks = [index for index, (_, child) in enumerate(children) if isinstance(child, nn.ModuleList)]
        if not stacks:
            continue
        candidates += [
            (name.count("."), index < stacks[-1], f"{name}.{child_name}".lstrip("."), child)
            for index, (child_name, child) in enumerate(children)
            if "Norm" in type(child).__name__ and getattr(getattr(child, "weight", None), "shape", None) == width
        ]
    return min(candidates, key=lambda candidate: candidate[:2])[2:] if candidates else None


def check_final_norm(model: Any, setting: Literal["auto", True, False]) -> None:
    """Raise `ConfigError` if `reward.reset_final_norm` is true and `model` has no norm to reset."""
    if setting is True and find_final_norm(model) is None:
        raise ConfigError(
            f"reward.reset_final_norm: true, but {type(model).__name__} has no norm with weights before its head; "
            "leave it at auto"
        )


def reset_final_norm(model: Any, setting: Literal["auto", True, False]) -> str | None:
    """Reset the norm before the new head of `model` to its untrained state, as `reward.reset_final_norm` is set.

    Returns:
        A line that tells what was reset and why; None if nothing was.

    Raises:
        ConfigError: as `check_final_norm`.
    """
    check_final_norm(model, setting)
    if setting is False or not (name_and_norm := find_final_norm(model)):
        return None
    name, norm = name_and_norm
    untrained = copy.deepcopy(norm)
    model._init_weights(untrained)
    largest, median, spread = _measure_gains(norm, untrained)
    if setting == "auto" and spread <= LARGEST_SPREAD:
        return None
    norm.load_state_dict(untrained.state_dict())
    setattr(norm, _RESET, True)
    reason = f"above {LARGEST_SPREAD:g} a new head loses accuracy in bf16; reward.reset_final_norm=false keeps it"
    return (
        f"the final norm {name} is reset under the new head: its gains have a median of {median:.3g} and reach "
        f"{largest:.3g}, their root mean square is {spread:.1f} times the median; "
        f"{reason if setting == 'auto' else 'reward.reset_final_norm=true asks for it'}"
    )


def was_reset(module: nn.Module) -> bool:
    """Return True if `reset_final_norm` reset `module`, a norm, which is then trained as the new head is."""
    return getattr(module, _RESET, False)


def _measure_gains(norm: Any, untrained: Any) -> tuple[float, float, float]:
    """Return (largest, median, root mean square / median) of the factors that a norm multiplies by.

    An untrained norm multiplies by 1, whether its weights are 1 or, as Gemma's, 0.
    """
    with torch.no_grad():
        gains = (norm.weight.float() - untrained.weight.float() + 1).abs()
    median = gains.median().clamp_min(torch.finfo(torch.float32).tiny)
    return float(gains.max()), float(median), float(gains.square().mean().sqrt() / median)
