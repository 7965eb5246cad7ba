"""The class of a reward model or critic: transformers' sequence classifier of a family, or one made here.

A configuration flows in; out comes a class that `from_pretrained` and `save_pretrained` serve like any other. One is
made where transformers has none, or one that scores whole sequences. It is built as transformers builds the classifiers
of most families: the family's backbone, under the name that it has in the language model, and a linear layer `score`.
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
from rlhf.models.hf_errors import summarize_error

CLASS_SUFFIX = "ScalarHead"
"""How the names of classes made here end, and with them the `architectures` of a saved configuration."""

_README = """# A reward model that plain transformers has no class for

transformers has no sequence classifier of {family} that scores tokens: `AutoModelForSequenceClassification` refuses
this folder, or draws a head of its own. rlhf loads it: name the folder in `ppo.reward_model` or `reward.model`. With
plain transformers, the score of a text is what the head makes of its last token:

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
    """What the classes that are made here have in common."""

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> Any:
        """Like that of transformers' auto classes."""
        return cls._from_config(config, **options)


def build_scalar_head_class(config: Any) -> Any:
    """The class for a `config` of a family that transformers has no token-wise classifier of; None: it has one.

    Raises:
        ValueError: neither that nor a class made here can be built; the reason.
    """
    theirs = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if theirs is not None and hasattr(_outline(theirs, config), "score"):
        return None
    language_model, backbone = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], MODEL_MAPPING.get(type(config), None)
    children = _outline(language_model, config).named_children()
    prefix = next((name for name, child in children if type(child) is backbone), None)
    if prefix is None:
        raise ValueError(f"transformers has no class of the backbone alone that {language_model.__name__} builds on")
    family = next(cls for cls in reversed(backbone.__mro__) if _is_of_a_family(cls))
    made = type(
        backbone.__name__.removesuffix("Model") + CLASS_SUFFIX,
        (BuiltScalarHead, family),
        # transformers looks into the module of a class to see what its attention can do.
        {"base_model_prefix": prefix, "config_class": type(config), "__module__": family.__module__},
    )
    _outline(made, config)
    return made


def write_readme(model: Any, folder: Path) -> None:
    """Put a README.md beside the weights of a model that plain transformers has no class for."""
    if isinstance(model, BuiltScalarHead):
        (folder / "README.md").write_text(_README.format(family=model.config.model_type), encoding="utf-8")


def describe_loading(model: Any, path: Path) -> str | None:
    """What to say of the reward model saved at `path`; None where plain transformers has a class for it."""
    if not isinstance(model, BuiltScalarHead):
        return None
    return (
        f"{path}: transformers has no class for {model.config.model_type} with a scalar head, so plain transformers "
        "does not load it by itself; rlhf does, and its README.md shows how to compute scores"
    )


def _is_of_a_family(cls: type) -> bool:
    return issubclass(cls, PreTrainedModel) and cls is not PreTrainedModel


def _outline(cls: Any, config: Any) -> Any:
    """A model of the class without weights."""
    try:
        with torch.device("meta"):
            # On the attention that every class has, whatever the configuration asks for.
            return cls._from_config(copy.deepcopy(config), attn_implementation="eager")
    except Exception as error:  # whatever the architecture's code says
        raise ValueError(f"{cls.__name__} cannot be built ({summarize_error(error)})") from error


# The norm before the head

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
