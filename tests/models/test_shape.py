"""Shapes are those of transformers' own models: every number is counted, by name and by config.json."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf.errors import ConfigError
from rlhf.models.architectures import FAMILIES
from rlhf.models.shape import Shape, shape_of
from tests.families.table import FAMILIES as TABLE
from tests.families.table import Family

KNOWN: dict[str, dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parents[2] / "rlhf" / "models" / "known.yaml").read_text()
)


def counts(config: Any, rank: int = 0) -> tuple[int, int, int]:
    """Numbers of the language model, of the one with a scalar head, and of its adapters, on no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    from rlhf.config.schema import LoraConfig
    from rlhf.models.lora import add_adapters
    from rlhf.models.scalar_head import made_class

    config.num_labels = 1
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        whole = sum(parameter.numel() for parameter in model.parameters())
        scalar = made_class(config)
        if scalar is None:
            from transformers import AutoModelForSequenceClassification as scalar
        with_head = sum(parameter.numel() for parameter in scalar.from_config(config).parameters())
        if rank:
            add_adapters(model, LoraConfig(rank=rank), seed=0)
    return whole, with_head, sum(p.numel() for p in model.parameters() if p.requires_grad)


def assert_counted(shape: Shape, config: Any, rank: int = 0) -> None:
    whole, with_head, adapters = counts(config, rank)
    assert shape.parameters() == whole
    assert shape.parameters(scalar_head=True) == with_head
    assert not rank or shape.adapters(rank) == adapters


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_name_has_the_numbers_of_the_model(name: str) -> None:
    from transformers import CONFIG_MAPPING

    values = dict(KNOWN[name])
    assert_counted(shape_of(name), CONFIG_MAPPING[values.pop("model_type")](**values))


@pytest.mark.parametrize("family", [row for row in TABLE if row.architecture in FAMILIES], ids=lambda row: row.name)
def test_a_folder_has_the_numbers_of_its_model(family: Family, tmp_path: Path) -> None:
    config = family.configuration()
    config.save_pretrained(tmp_path)
    assert_counted(shape_of(str(tmp_path)), config, rank=4)


def test_the_first_part_of_a_hubs_name_and_endings_do_not_matter() -> None:
    assert shape_of("meta-llama/Llama-2-7b-hf").parameters() == 6_738_415_616
    assert shape_of("facebook/opt-13b").parameters() == shape_of("opt-13b").parameters()


@pytest.mark.parametrize(
    ("name", "said"),
    [("opt-13", "did you mean opt-13b"), ("nobody/knows", "or one of opt-125m, .* bloom-7b1, ")],
)
def test_a_name_that_is_not_known_is_one_line_with_one_like_it_or_all(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        shape_of(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model_type": "t5"}, "does not know the shapes of model type 't5'; it knows opt, "),
        ({"model_type": "llama", "hidden_size": 8}, "says nothing of "),
        (None, "its config.json cannot be read"),
    ],
)
def test_a_config_that_says_too_little_is_one_line(tmp_path: Path, values: Any, said: str) -> None:
    (tmp_path / "config.json").write_text("" if values is None else json.dumps(values))
    with pytest.raises(ConfigError, match=said):
        shape_of(str(tmp_path))
