"""What is wrong with a model's folder is one sentence, whatever the library that read it says."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.config.schema import ModelConfig
from rlhf.errors import ModelError
from rlhf.models.compatibility import check_model_folder, load_model_config
from rlhf.models.hub import summarize_error
from rlhf.models.loading import load_causal_lm, load_scalar_head
from rlhf.models.tokenizers import load_tokenizer


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def said_of(folder: Path, tokenizer: Any, scalar: bool = False) -> str:
    """What loading the model in `folder` says, without the folder's name."""
    load = load_scalar_head if scalar else load_causal_lm
    with pytest.raises(ModelError) as caught:
        load(ModelConfig(), tokenizer, attention="sdpa", path=str(folder))
    return str(caught.value).removeprefix(f"{folder}: ")


def test_a_weights_file_that_is_cut(folder: Path, tokenizer: Any) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    said = said_of(folder, tokenizer)
    assert said.startswith("cannot be loaded as AutoModelForCausalLM (a .safetensors file is incomplete or damaged: ")
    assert said.endswith("; check its files, or name another")


def test_a_weights_file_that_is_missing(folder: Path, tokenizer: Any) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert "(there is no model.safetensors, or pytorch_model.bin)" in said_of(folder, tokenizer)


def test_a_shard_that_is_missing(folder: Path, tokenizer: Any) -> None:
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00001.safetensors" in said_of(folder, tokenizer)


def test_weights_of_another_shape(folder: Path, tokenizer: Any) -> None:
    change(folder / "config.json", intermediate_size=64)
    assert said_of(folder, tokenizer) == (
        "its weights do not fit: model.layers.0.mlp.down_proj.weight is 32 x 48, expected 32 x 64; check config.json"
    )


def test_a_classifier_of_two_labels(folder: Path, tokenizer: Any) -> None:
    from transformers import LlamaForSequenceClassification

    from tests.helpers import llama

    config = llama(len(tokenizer)).config
    config.num_labels = 2
    LlamaForSequenceClassification(config).save_pretrained(folder)
    assert "its head has 2 outputs, a reward model has one" in said_of(folder, tokenizer, scalar=True)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"model_type": "llama", ', "its configuration cannot be read (config.json is not valid JSON)"),
        ('{"model_type": "lama"}', "(transformers does not know the model type 'lama')"),
        ("{}", "(config.json names no model_type)"),
    ],
    ids=["cut", "unknown type", "no type"],
)
def test_a_configuration_that_cannot_be_read(folder: Path, text: str, said: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError) as caught:
        load_model_config(str(folder), ModelConfig())
    assert said in str(caught.value) and str(caught.value).endswith("; check config.json")


def test_a_tokenizer_that_is_cut(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"a": ')
    with pytest.raises(ModelError, match=r"cannot be loaded \(one of its files is not valid JSON: "):
        load_tokenizer(str(folder))


def test_an_adapter_without_its_model(tmp_path: Path, tokenizer: Any) -> None:
    from peft import LoraConfig, get_peft_model

    from tests.helpers import llama

    get_peft_model(llama(len(tokenizer)), LoraConfig(task_type="CAUSAL_LM")).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"holds a LoRA adapter .* merge it into its model with peft's merge_and_unl"):
        check_model_folder(str(tmp_path))


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            ValueError("FooForCausalLM does not support an attention yet. Please request the support at https://x.y."),
            "FooForCausalLM does not support an attention yet",
        ),
        (OSError("Can't load tokenizer for 'x'. If you were trying to load it"), "Can't load tokenizer for 'x'"),
        (ValueError("It is 3.5. Then something else.\nMore of it."), "It is 3.5. Then something else"),
        (KeyError("score"), "KeyError: 'score'"),
        (RuntimeError(), "RuntimeError"),
        (torch.OutOfMemoryError("no room"), "no room"),
        (
            ValueError("Couldn't instantiate the backend tokenizer from one of: \n(1) a file\nYou need sentencepiece"),
            "it needs the package sentencepiece",
        ),
    ],
)
def test_advice_that_cannot_be_followed_is_left_out(error: Exception, sentence: str) -> None:
    assert summarize_error(error) == sentence
