"""The fixed state of the level `learning`: tiny models, rows and settings, the same on every machine and device.

Weights come from a generator of integers on the host, and are exact in bf16 and fp16, so that no precision rounds them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.config.schema import Stage, build_config

if TYPE_CHECKING:
    from rlhf.lockstep.side import Side

STAGES: tuple[Stage, ...] = ("sft", "reward", "dpo", "ppo")
"""The stages that have golden numbers; distillation draws and updates by the same operators."""

STEPS = 100
"""Steps of each stage."""

PRECISIONS = ("fp32", "bf16", "fp16")

WORDS = 64
"""Tokens of the vocabulary."""

_SHAPE = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_SPECIAL = ("<pad>", "<bos>", "<eos>")
_ROWS = 48
_WEIGHT_BITS = 7  # with them, 1 + w is exact in bf16, too
LARGEST_WEIGHT = 1.5
"""Of norms; matrices reach 0.5."""

# Adam divides by the root of the second moment plus eps. Backends add eps before or after the correction of bias: it is
# so small here that both are the same.
_OPTIMIZER = {"learning_rate": 3e-3, "warmup": 0, "schedule": "constant", "eps": 1e-12, "weight_decay": 0.01}
_TRAINING = {"batch_size": 4, "micro_batch_size": 2, "eval_rows": 2, "checkpoint_every": 0, "optimizer": _OPTIMIZER}


def build_settings(folder: Path, precision: str) -> dict[str, Any]:
    """Return the recipe of all stages, from the models and rows that `write_state` wrote into `folder`."""
    policy, reward = str(folder / "policy"), str(folder / "reward")
    rows = _TRAINING | {"epochs": STEPS, "max_steps": STEPS}
    ppo = _TRAINING | {"steps": STEPS, "micro_batch_size": 4, "ppo_epochs": 2, "samples_every": 0}
    return {
        "precision": precision,
        "seed": 0,
        "engine": {"shapes": "static"},  # the same padding on every backend
        "model": {"path": policy},
        "data": {
            "datasets": [{"path": str(folder / "rows.jsonl")}],
            "max_prompt_length": 8,
            "max_completion_length": 6,
            "heldout_fraction": 0.1,
        },
        "sft": rows,
        "reward": rows | {"model": reward},
        # In DeepSpeed's form: a reference that is computed before the first step would not be part of one.
        "dpo": rows | {"model": policy, "reference": "beside"},
        "ppo": ppo | {"actor": policy, "reward_model": reward, "critic_optimizer": _OPTIMIZER},
    }


@contextmanager
def open_stage(
    name: str, folder: Path, stage: Stage, precision: str, settings: Mapping[str, Any] = {}
) -> Iterator[Side]:
    """Open a stage on a backend before its first step.

    Args:
        name: the backend.
        folder: the one of `write_state`; it gets the run, too.
        stage: the stage.
        precision: that of the run.
        settings: sections of the recipe to add.
    """
    from rlhf.trainers import run as launch

    output = str(folder / f"{stage}-{precision}")
    config = build_config(build_settings(folder, precision) | dict(settings) | {"accelerator": name, "output": output})
    with launch.open_run(config, (stage,), accelerator=name, overwrite=True) as (resolved, accelerator):
        from rlhf.lockstep.side import Side  # imports DeepSpeed, which `open_run` has configured for the device

        side = Side(resolved, accelerator)
        side.open(stage)
        yield side
        side.close(keep=False)


def write_state(folder: Path) -> None:
    """Write the policy, the reward model and the rows."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in _build_rows()), encoding="utf-8")
    _write_models(folder)


def _build_rows() -> list[Mapping[str, str]]:
    """Return rows of different lengths, so that batches have padding; replies follow from their prompts."""

    def words(first: int, step: int, count: int) -> str:
        names = WORDS - len(_SPECIAL)
        return " ".join(f"w{(first + step * number) % names}" for number in range(count))

    return [
        {
            "prompt": words(7 * row, 3, 2 + row % 5),
            "response": words(7 * row + 1, 3, 2 + row % 4),
            "chosen": words(7 * row + 1, 3, 2 + row % 3),
            "rejected": words(7 * row + 2, 5, 2 + row % 4),
        }
        for row in range(_ROWS)
    ]


def _write_models(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        LlamaConfig,
        PreTrainedTokenizerFast,
    )

    names = [*_SPECIAL, *(f"w{number}" for number in range(WORDS - len(_SPECIAL)))]
    words = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    special = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2}
    for kind, auto in (("policy", AutoModelForCausalLM), ("reward", AutoModelForSequenceClassification)):
        model = auto.from_config(LlamaConfig(**_SHAPE, **special, num_labels=1), dtype=torch.float32)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.copy_(torch.tensor(_draw_weights(f"{kind}/{name}", weight.numel())).view_as(weight))
                if weight.dim() == 1:  # of a norm
                    weight.add_(1)
        model.save_pretrained(folder / kind)
        tokenizer.save_pretrained(folder / kind)


def _draw_weights(name: str, count: int) -> list[float]:
    """Return `count` weights of a parameter, from integers that depend on its name."""
    draw = random.Random(name)
    return [draw.getrandbits(_WEIGHT_BITS) / 2**_WEIGHT_BITS - 0.5 for _ in range(count)]
