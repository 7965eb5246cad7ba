"""What is wrong with a model's folder, configuration, weights or tokenizer is one line that names it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.config.schema import ModelConfig
from rlhf.errors import ModelError
from rlhf.models.hub import summarize_error
from rlhf.models.loading import check_same_vocabulary, load_causal_lm, load_model_tokenizer, load_scalar_head
from tests.helpers import build_tokenizer, llama


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


def remove(pattern: str) -> Callable[[Path], None]:
    return lambda folder: [path.unlink() for path in folder.glob(pattern)] and None


def write(name: str, text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(text)


def change_config(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 64}))


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def link_to_unreadable(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.unlink()
    path.symlink_to("/proc/self/mem")  # it exists and opens, and cannot be read


def rename_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")


def name_missing_shard(folder: Path) -> None:
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def save_adapter(folder: Path) -> None:
    from peft import LoraConfig, get_peft_model

    get_peft_model(llama(60), LoraConfig(task_type="CAUSAL_LM")).save_pretrained(folder)


def save_two_labels(folder: Path) -> None:
    from transformers import LlamaForSequenceClassification

    config = llama(len(build_tokenizer())).config
    config.num_labels = 2
    LlamaForSequenceClassification(config).save_pretrained(folder)


def save_bert(folder: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertForSequenceClassification(BertConfig(vocab_size=300, num_labels=1, **sizes)).save_pretrained(folder)


def save_without_end(folder: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)


def keep(folder: Path) -> None:
    pass


def load_policy(folder: str) -> Any:
    return load_causal_lm(ModelConfig(path=folder), build_tokenizer(), attention="sdpa")


def load_reward(folder: str) -> Any:
    return load_scalar_head(ModelConfig(), build_tokenizer(), attention="sdpa", path=folder)


def load_tokenizer(folder: str) -> Any:
    return load_model_tokenizer(ModelConfig(path=folder))


@pytest.mark.parametrize(
    ("damage", "load", "words"),
    [
        (remove("config.json"), load_policy, "holds no config.json"),
        (remove("model.safetensors"), load_policy, "holds no weights"),
        (remove("tokenizer*"), load_tokenizer, "holds no tokenizer"),
        (cut_weights, load_policy, "AutoModelForCausalLM (a .safetensors file is incomplete or damaged: "),
        (link_to_unreadable, load_policy, "Input/output error"),
        (rename_weights, load_policy, "(there is no model.safetensors, or pytorch_model.bin)"),
        (name_missing_shard, load_policy, "model-00001-of-00001.safetensors"),
        (change_config, load_policy, "model.layers.0.mlp.down_proj.weight is 32 x 48, expected 32 x 64; check config"),
        (
            write("config.json", '{"model_type": "llama", '),
            load_policy,
            "(config.json is not valid JSON); check",
        ),
        (write("config.json", '{"model_type": "lama"}'), load_policy, "does not know the model type 'lama'); check"),
        (write("config.json", "{}"), load_policy, "(config.json names no model_type); check config.json"),
        (write("tokenizer.json", '{"a": '), load_tokenizer, "be loaded (one of its files is not valid JSON: "),
        (save_without_end, load_tokenizer, "no end-of-sequence token"),
        (save_adapter, load_policy, "merge it into its model with peft's merge_and_unload"),
        (save_two_labels, load_reward, "its head has 2 outputs, a reward model has one"),
        (save_bert, load_reward, "decoder-only"),
        (keep, load_reward, "its weights lack score.weight"),
    ],
)
def test_damaged_folder_is_refused_by_name(folder: Path, damage: Any, load: Any, words: str) -> None:
    damage(folder)
    with pytest.raises(ModelError) as caught:
        load(str(folder))
    message = str(caught.value)
    assert message.startswith(f"{folder}: ") and words in message and "\n" not in message


@pytest.mark.parametrize(
    ("name", "words"),
    [("./absent/model", "no such model folder"), ("nobody/nothing", "no folder here, and there is no copy of it")],
)
def test_absent_model_is_refused_by_name(name: str, words: str) -> None:
    with pytest.raises(ModelError) as caught:
        load_policy(name)
    assert str(caught.value).startswith(f"{name}: ") and words in str(caught.value) and "\n" not in str(caught.value)


def test_differing_vocabularies_are_refused_with_a_token() -> None:
    mine, theirs = build_tokenizer(), build_tokenizer()
    check_same_vocabulary(mine, theirs, "reward")
    theirs.add_tokens(["<extra>"])
    with pytest.raises(ModelError, match=r"reward: .* differ in '<extra>'"):
        check_same_vocabulary(mine, theirs, "reward")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ValueError("Foo has no attention yet. Please request it at https://x.y."), "Foo has no attention yet"),
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
def test_summarize_error_omits_advice(error: Exception, sentence: str) -> None:
    assert summarize_error(error) == sentence


def test_folder_of_a_stage_is_refused_with_the_model_in_it(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=f"{re.escape(str(tmp_path))}: holds no config.json; name .*/model$"):
        load_policy(str(tmp_path))
