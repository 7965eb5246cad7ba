"""Toys in the place of what recipes name: models of the same architecture, one layer of sixteen numbers, and data
sets in the same format, of a few short rows. Nothing else of a recipe is changed.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf.config.data import DatasetConfig
from rlhf.config.loader import parse_yaml
from rlhf.config.schema import Config, load_config
from rlhf.data.formats import find_known_dataset
from rlhf.roles.lineage import ALL
from tests.data.test_known_datasets import SETS
from tests.helpers import WORDS, build_tokenizer

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "example_scripts"
ROWS = {1: 8, 2: 16, 3: 30}
"""Of a source, by the number of stages that share them."""

WITHOUT_NAME = {"smollm2": "smollm2-135m"}
"""Of recipes whose model is a folder that a script makes: its shape in rlhf/models/known.yaml."""
SMALL = {
    **dict.fromkeys(("hidden_size", "n_embd", "head_dim", "word_embed_proj_dim"), 16),
    **dict.fromkeys(("ffn_dim", "intermediate_size"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 1),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 512),
}
"""In place of what a shape of known.yaml has of these; two heads, so that two ranks can split a layer."""


def recipes() -> list[Path]:
    """Every YAML file of example_scripts that is a recipe of a run; grids of settings are not."""
    return sorted(path for path in EXAMPLES.glob("*/**/*.yaml") if path.parent.name != "sweeps")


def name_of(recipe: Path) -> str:
    """As run.sh takes it: opt/13b."""
    return str(recipe.relative_to(EXAMPLES).with_suffix(""))


def models(config: Config) -> dict[str, str]:
    """The models that the settings name, by key."""
    named = {start.key: getattr(getattr(config, start.key.split(".")[0]), start.key.split(".")[1]) for start in ALL}
    return {key: name for key, name in named.items() if name}


def overrides(recipe: Path, folder: Path) -> list[str]:
    """The options that put toys, made in `folder`, in the place of a recipe's models and data."""
    config = load_config(recipe)
    settings = {key: toy_model(shape(recipe, name), folder) for key, name in models(config).items()}
    if config.model.tokenizer:
        settings["model.tokenizer"] = settings["model.path"]
    for number, source in enumerate(config.data.datasets):
        settings[f"data.datasets.{number}.path"] = toy_data(source.path, source, folder)
        if source.heldout:
            settings[f"data.datasets.{number}.heldout"] = toy_data(source.heldout, source, folder)
    return [part for key, path in settings.items() for part in ("--set", f"{key}={path}")]


def toy_model(shape: str, folder: Path) -> Path:
    """A model with random weights that has the architecture of a shape of known.yaml, and a tokenizer."""
    path = folder / "models" / shape
    if not path.exists():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        values: dict[str, Any] = parse_yaml((ROOT / "rlhf/models/known.yaml").read_text())[shape]
        small = values | {key: value for key, value in SMALL.items() if key in values}
        if small.get("word_embed_proj_dim") and not small["do_layer_norm_before"]:
            small["word_embed_proj_dim"] = 8  # narrower than the rest, as in OPT-350M alone
        tokenizer = build_tokenizer()
        tokenizer.chat_template = None
        ids = {"vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**small | ids))
        assert model.num_parameters() < 50_000, f"{shape}: a size is missing in SMALL"
        _end_soon(model)
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    return path


def _end_soon(model: Any, share: float = 0.25, steps: int = 60) -> None:
    """Train until about every fourth token drawn ends a completion: rollouts of 256 tokens would take minutes."""
    import torch

    wanted = torch.full((model.config.vocab_size,), (1 - share) / (model.config.vocab_size - 1))
    wanted[model.config.eos_token_id] = share
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        tokens = torch.randint(model.config.vocab_size, (4, 16), generator=generator)
        logits = model(tokens).logits.flatten(0, 1)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, wanted.expand_as(logits)).backward()
        optimizer.step()


def toy_data(name: str, source: DatasetConfig, folder: Path) -> Path:
    """A data set with the columns of the one called `name`, in a folder that ends so."""
    path = folder / "data" / Path(*Path(name).parts[-2:])
    if not path.exists():
        import datasets

        path.parent.mkdir(parents=True, exist_ok=True)
        rows = list(_rows(name, source))
        if path.suffix:
            datasets.Dataset.from_list(rows).to_json(path)
        else:
            saved: Any = datasets.Dataset.from_list(rows)
            if source.heldout_split and not source.heldout:
                heldout = saved.select(range(5))
                saved = datasets.DatasetDict(
                    {source.split: saved.select(range(5, len(saved))), source.heldout_split: heldout}
                )
            saved.save_to_disk(path)
    return path


def _rows(name: str, source: DatasetConfig) -> Iterator[dict[str, Any]]:
    rng = random.Random(name)
    entry = find_known_dataset(name)
    form = copy.deepcopy(SETS[entry.name][0][0]) if entry else _plain(source)
    columns = (entry or source).columns.named() or {field: field for field in form}
    for number in range(ROWS[len(source.stages)]):
        row = copy.deepcopy(form)
        for field, column in columns.items():
            words = " ".join(rng.choices(WORDS, k=rng.randint(1, 4)))
            _change(row, column.split("."), f"{words} {number}" if field == "prompt" else words)
        yield row


def _plain(source: DatasetConfig) -> dict[str, str]:
    """A row of a recipe's own files, which have the standard columns that their stage reads."""
    columns = {"sft": ("prompt", "response"), "reward": ("prompt", "chosen", "rejected"), "ppo": ("prompt",)}
    return {column: "" for stage in source.stages for column in columns[stage]}


def _change(values: Any, path: list[str], words: str) -> None:
    """Put `words` before the text at `path`, behind the one who says it."""
    for key in path[:-1]:
        values = values[int(key) if isinstance(values, list) else key]
    last: Any = int(path[-1]) if isinstance(values, list) else path[-1]
    speaker = re.match(r"(?s).*Human: |Assistant: |", values[last])
    assert speaker
    values[last] = f"{speaker[0]}{words} {values[last][speaker.end() :]}"


def shape(recipe: Path, name: str) -> str:
    """The name in rlhf/models/known.yaml of what a recipe calls `name`."""
    folder = recipe.parent.name
    return WITHOUT_NAME.get(folder) or Path(name).name.lower().removesuffix("-hf")
