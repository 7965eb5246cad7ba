"""Mistakes in the models and tokenizers of a run, and what the error says of each; see `tests.preflight.mistakes`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.helpers import build_tokenizer, llama
from tests.preflight.bench import Bench, mistake, settings


@mistake
def missing_model(bench: Bench) -> tuple[list[str], list[str]]:
    return settings(ppo__reward_model="./nope"), ["nope: no such model folder"]


@mistake
def a_file_for_a_model(bench: Bench) -> tuple[list[str], list[str]]:
    return settings(ppo__actor=bench.rows), ["rows.jsonl: is a file; name the folder that holds the model"]


@mistake
def no_configuration(bench: Bench) -> tuple[list[str], list[str]]:
    folder = bench.copy(bench.run / "reward" / "model")
    (folder / "config.json").unlink()
    return settings(ppo__reward_model=folder), ["holds no config.json"]


@mistake
def no_weights(bench: Bench) -> tuple[list[str], list[str]]:
    folder = bench.copy(bench.run / "reward" / "model")
    (folder / "model.safetensors").unlink()
    return settings(ppo__reward_model=folder), ["holds no weights"]


@mistake
def an_adapter(bench: Bench) -> tuple[list[str], list[str]]:
    folder = bench.folder / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    return settings(ppo__actor=folder), ["holds a LoRA adapter", "merge_and_unload"]


def _changed(folder: Path, **values: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


@mistake
def broken_configuration(bench: Bench) -> tuple[list[str], list[str]]:
    folder = bench.copy(bench.run / "reward" / "model")
    (folder / "config.json").write_text("{")
    return settings(ppo__reward_model=folder), ["its configuration cannot be read", "check config.json"]


@mistake
def unsupported_architecture(bench: Bench) -> tuple[list[str], list[str]]:
    from transformers import CONFIG_MAPPING

    folder = bench.copy(bench.model)
    CONFIG_MAPPING["t5"]().save_pretrained(folder)
    return settings(reward__model=folder), ["the architecture t5 is not supported yet: it is no decoder-only"]


@mistake
def too_few_positions(bench: Bench) -> tuple[list[str], list[str]]:
    folder = _changed(bench.copy(bench.run / "reward" / "model"), max_position_embeddings=39)
    return settings(ppo__reward_model=folder), ["has 39 positions, fewer than data.max_prompt_length", "= 40"]


@mistake
def too_few_positions_for_raw_text(bench: Bench) -> tuple[list[str], list[str]]:
    texts = bench.jsonl(*({"text": "cow " * 50} for _ in range(20)))
    keys = {"ppo__actor": bench.model, "ppo__ptx_coef": 1, "data__pretraining": texts, "ppo__ptx_length": 129}
    return settings(**keys), ["has 128 positions, fewer than ppo.ptx_length = 129"]


@mistake
def damaged_weights(bench: Bench) -> tuple[list[str], list[str]]:
    folder = bench.copy(bench.run / "reward" / "model")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return settings(ppo__reward_model=folder), ["cannot be loaded as AutoModelForSequenceClassification"]


@mistake
def weights_of_another_size(bench: Bench) -> tuple[list[str], list[str]]:
    folder = _changed(bench.copy(bench.run / "reward" / "model"), intermediate_size=40)
    return settings(ppo__reward_model=folder), ["its weights do not fit", "x 48", "x 40"]


@mistake
def a_language_model_as_reward_model(bench: Bench) -> tuple[list[str], list[str]]:
    return settings(ppo__reward_model=bench.model), ["its weights lack score.weight"]


@mistake
def a_reward_model_as_language_model(bench: Bench) -> tuple[list[str], list[str]]:
    return settings(ppo__actor=bench.run / "reward" / "model"), ["is a reward model", "name a language model"]


@mistake
def half_a_reward_model_of_deepspeed_chat(bench: Bench) -> tuple[list[str], list[str]]:
    import torch

    folder = bench.copy(bench.model)
    (folder / "model.safetensors").unlink()
    torch.save({"rwtransformer.norm.weight": torch.ones(32)}, folder / "pytorch_model.bin")
    found = ["is a reward model of DeepSpeed-Chat whose weights lack", "rwtransformer.embed_tokens.weight"]
    return settings(ppo__reward_model=folder), found


@mistake
def a_value_head_of_trl(bench: Bench) -> tuple[list[str], list[str]]:
    import torch
    from safetensors.torch import load_file, save_file

    folder = bench.copy(bench.model)
    head = {"v_head.summary.weight": torch.ones(1, 32), "v_head.summary.bias": torch.ones(1)}
    save_file(load_file(folder / "model.safetensors") | head, folder / "model.safetensors", {"format": "pt"})
    words = ["lack score.weight and hold v_head.summary.bias, v_head.summary.weight", "ppo.reward_functions"]
    return settings(ppo__reward_model=folder), words


@mistake
def an_encoder_as_reward_model(bench: Bench) -> tuple[list[str], list[str]]:
    from transformers import BertConfig, BertForSequenceClassification

    folder = bench.copy(bench.model)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(build_tokenizer()), num_labels=1, **sizes)
    BertForSequenceClassification(config).save_pretrained(folder)
    words = ["the architecture bert is not supported yet: it is no decoder-only", "a function of ppo.reward_functions"]
    return settings(ppo__reward_model=folder), words


@mistake
def a_classifier_of_two_labels(bench: Bench) -> tuple[list[str], list[str]]:
    from transformers import LlamaForSequenceClassification

    folder = bench.copy(bench.model)
    config = llama(len(build_tokenizer())).config
    config.num_labels = 2
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return settings(ppo__reward_model=folder), [
        "its head has 2 outputs, a reward model has one",
        "ppo.reward_functions",
    ]


@mistake
def dropout_where_there_is_none(bench: Bench) -> tuple[list[str], list[str]]:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    folder = bench.copy(bench.model)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    layers = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    Lfm2ForCausalLM(Lfm2Config(vocab_size=len(build_tokenizer()), **sizes, **layers)).save_pretrained(folder)
    return settings(ppo__actor=folder, ppo__dropout=0.1), ["ppo.dropout: 0.1, but Lfm2ForCausalLM has no dropout"]


@mistake
def no_norm_to_reset(bench: Bench) -> tuple[list[str], list[str]]:
    from transformers import OlmoConfig, OlmoForCausalLM

    folder = bench.copy(bench.model)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 1}
    OlmoForCausalLM(OlmoConfig(vocab_size=len(build_tokenizer()), **sizes)).save_pretrained(folder)
    keys = settings(reward__model=folder, reward__reset_final_norm="true")
    return keys, ["reward.reset_final_norm: true, but OlmoForSequenceClassification has no norm with weights"]


@mistake
def another_vocabulary(bench: Bench) -> tuple[list[str], list[str]]:
    folder = bench.copy(bench.run / "reward" / "model")
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(folder)
    return settings(ppo__reward_model=folder), ["this model's vocabulary", "differ in '<extra>'"]


@mistake
def the_tokenizer_of_a_larger_model(bench: Bench) -> tuple[list[str], list[str]]:
    folder = bench.copy(bench.model)
    llama(100).save_pretrained(folder)
    return settings(reward__model=folder), ["this tokenizer has 300 tokens", "knows 100", "model.tokenizer"]


@mistake
def no_tokenizer(bench: Bench) -> tuple[list[str], list[str]]:
    folder = bench.copy(bench.run / "reward" / "model")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    return settings(ppo__reward_model=folder), ["holds no tokenizer", "model.tokenizer"]


@mistake
def missing_tokenizer(bench: Bench) -> tuple[list[str], list[str]]:
    return settings(model__tokenizer="./nope"), ["nope: no such tokenizer folder; check model.tokenizer"]


@mistake
def broken_tokenizer(bench: Bench) -> tuple[list[str], list[str]]:
    folder = bench.copy(bench.run / "reward" / "model")
    (folder / "tokenizer.json").write_text("{")
    return settings(ppo__reward_model=folder), ["its tokenizer cannot be loaded"]


@mistake
def no_end_token(bench: Bench) -> tuple[list[str], list[str]]:
    folder = bench.copy(bench.model)
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    return settings(reward__model=folder), ["the tokenizer has no end-of-sequence token"]


@mistake
def an_end_token_for_the_embedded_model(bench: Bench) -> tuple[list[str], list[str]]:
    return settings(model__path="", model__eos_token="</s>"), ["model.eos_token: the embedded model has its own"]


@mistake
def a_reward_model_that_does_not_know_the_end_token(bench: Bench) -> tuple[list[str], list[str]]:
    keys = settings(ppo__reward_model=bench.copy(bench.run / "reward" / "model"), model__eos_token="<|end|>")
    return keys, ["this model's vocabulary", "differ in '<|end|>'"]


@mistake
def a_model_that_no_hub_gives(bench: Bench) -> tuple[list[str], list[str]]:
    return settings(ppo__reward_model="nobody/nothing"), ["nobody/nothing: no folder here", "HF_HUB_OFFLINE"]


@mistake
def unknown_layers(bench: Bench) -> tuple[list[str], list[str]]:
    return settings(lora__rank=2, lora__target_modules="[query]"), ["no linear layer is named 'query'", "q_proj"]


@mistake
def unknown_layers_of_the_one_model_that_has_adapters(bench: Bench) -> tuple[list[str], list[str]]:
    keys = {"roles__critic__lora_rank": 2, "lora__target_modules": "[query]"}
    return settings(**keys), ["no linear layer is named 'query'", "q_proj"]


@mistake
def layers_by_a_pattern_that_fits_none(bench: Bench) -> tuple[list[str], list[str]]:
    wanted = settings(lora__rank=2, lora__target_modules="re:.*query")
    return wanted, ["'re:.*query' matches no full path of a linear layer", "model.layers.0.self_attn.q_proj"]


@mistake
def a_base_that_cannot_be_shared(bench: Bench) -> tuple[list[str], list[str]]:
    wanted = settings(lora__rank=2, lora__share_base="true", reward__model=bench.model)
    return wanted, [f"reward model is trained on {bench.model}, and the actor starts from the model of the sft stage"]


@mistake
def adapters_merged_into_quantized_weights(bench: Bench) -> tuple[list[str], list[str]]:
    return settings(lora__rank=2, lora__merge="true", engine__frozen="int8"), [
        "lora.merge: adapters cannot be merged into int8 weights"
    ]
