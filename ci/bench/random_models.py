"""Write models of a known shape with random weights, tensor by tensor, so that no model is in memory as a whole."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[2]
WORDS = ("red", "blue", "green", "cow", "dog", "owl", "moo", "woof", "hoot", "please", "thanks", "no", "go", "away")


def add_shape(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the option for a known shape; another name is an error that lists them."""
    parser.add_argument(
        "--shape",
        choices=tuple(_known_shapes()),
        default=default,
        metavar="NAME",
        help="a name in rlhf/models/known.yaml (default: %(default)s)",
    )


def _known_shapes() -> dict[str, Any]:
    shapes: dict[str, Any] = YAML(typ="safe").load(ROOT / "rlhf" / "models" / "known.yaml")
    return shapes


def make(
    folder: Path,
    name: str,
    *,
    scalar_head: bool = False,
    layers: int | None = None,
    seed: int = 0,
    file_size: int = 2**30,
) -> Path:
    """Write a bf16 model of a known shape (rlhf/models/known.yaml), with a small tokenizer, and return its folder.

    A complete model that is already in `folder` stays unchanged.

    Args:
        folder: where to write the model.
        name: name of the shape.
        scalar_head: write a reward model. Below the head it has the weights of the language model of the same seed.
        layers: number of layers; None for that of the shape.
        seed: seed of the weights.
        file_size: maximum bytes of weights per file.
    """
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSequenceClassification

    from rlhf.checkpoint.safetensors_writer import SafetensorsWriter

    if (folder / "config.json").is_file():
        return folder
    values = _known_shapes()[name]
    kind = values.pop("model_type")
    if layers:
        values["n_layer" if "n_layer" in values else "num_hidden_layers"] = layers
    config = CONFIG_MAPPING[kind](**values, pad_token_id=0, bos_token_id=None, eos_token_id=1, dtype="bfloat16")
    if scalar_head:
        config.num_labels = 1
    auto = AutoModelForSequenceClassification if scalar_head else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    folder.mkdir(parents=True, exist_ok=True)
    outlines = dict(model.named_parameters())  # tied weights appear once
    with SafetensorsWriter(folder, outlines, file_size=file_size) as writer:
        for key, outline in outlines.items():
            writer.write(key, _draw_tensor(key, outline, seed))
    _tokenizer().save_pretrained(folder)
    config.save_pretrained(folder)  # last, because it marks the folder as complete
    return folder


def rows(file: Path, count: int = 64) -> Path:
    """Write `count` preference pairs of a few words each, and return the file."""
    generator = random.Random(1)

    def words() -> str:
        return " ".join(generator.choices(WORDS, k=6))

    lines = (
        {"prompt": f"{words()} {number}", "chosen": f"please {words()}", "rejected": f"no {words()}"}
        for number in range(count)
    )
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file


def _draw_tensor(key: str, like: Any, seed: int) -> Any:
    """Return a bf16 tensor that depends only on key, shape and seed: ones for norms, zeros for biases, else small."""
    import torch

    generator = torch.Generator().manual_seed(seed + sum(key.encode()) * 1009 + len(key))
    if like.dim() == 1:
        value = 1.0 if "norm" in key and key.endswith("weight") else 0.0
        return torch.full(like.shape, value, dtype=torch.bfloat16)
    return torch.empty(like.shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)


def _tokenizer() -> Any:
    from rlhf.data.toy_world import build_tokenizer

    generator = random.Random(0)
    return build_tokenizer((" ".join(generator.choices(WORDS, k=6)) for _ in range(200)), vocab_size=300)
