"""What users can get wrong: a table of mistakes, each with rlhf's arguments and words of the one-line error.

Nearly all of them would stop only the second or third stage. Tests of each check cover everything else that it refuses.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.helpers import build_tokenizer, llama

Arguments = dict[str, object] | Sequence[str]
REWARDS = "def two(prompt, completion):\n    return 1.0\n"


@dataclass(frozen=True)
class Bench:
    """An empty folder to make mistakes in, and the model, the rows and the folder of a finished run."""

    folder: Path
    model: Path
    rows: Path
    run: Path

    @property
    def output(self) -> Path:
        return self.folder / "run"

    @property
    def reward_model(self) -> Path:
        return self.run / "reward" / "model"

    def copy(self, source: Path, **config: Any) -> Path:
        """Copy a model's folder, and change keys of its config.json."""
        folder = Path(shutil.copytree(source, self.folder / f"copy-{source.parent.name}-{source.name}"))
        (folder / "manifest.json").unlink(missing_ok=True)  # the mistake is the user's, and no damage
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        return folder

    def file(self, name: str, text: str | bytes) -> Path:
        path = self.folder / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    def jsonl(self, *rows: Any) -> Path:
        return self.file("rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def settings(**keys: object) -> list[str]:
    return [part for key, value in keys.items() for part in ("--set", f"{key.replace('__', '.')}={value}")]


def for_stage(stage: str, path: Path, **keys: object) -> dict[str, object]:
    """Settings by which one stage reads rows from `path`, and the others good ones."""
    others = ",".join(other for other in ("sft", "reward", "ppo") if other != stage)
    source = {f"data.datasets.1.{key}": value for key, value in keys.items()}
    return {
        "data.datasets.0.stages": f"[{others}]",
        "data.datasets.1": f"{{path: {path}, stages: [{stage}]}}",
        **source,
    }


def link_to_unreadable(bench: Bench) -> Arguments:
    (bench.folder / "rows.jsonl").symlink_to("/proc/self/mem")  # exists, and nobody can read it
    return for_stage("ppo", bench.folder / "rows.jsonl")


def damaged_data_folder(bench: Bench) -> Arguments:
    from datasets import Dataset, DatasetDict

    folder = bench.folder / "saved"
    DatasetDict({"validation": Dataset.from_list([{"prompt": "p"}] * 40)}).save_to_disk(folder)
    for path in folder.rglob("*.arrow"):
        path.write_bytes(b"x")
    return for_stage("ppo", folder, split="validation")


def rows_for(stage: str, row: Callable[[int], dict[str, Any]], **keys: object) -> Callable[[Bench], Arguments]:
    """Return a mistake in forty rows of one stage."""
    return lambda bench: for_stage(stage, bench.jsonl(*map(row, range(40))), **keys)


def texts(row: dict[str, str], **keys: object) -> Callable[[Bench], Arguments]:
    """Return a mistake in the raw text of PPO's language-modelling loss."""
    return lambda bench: {"ppo.ptx_coef": 1, "data.pretraining": bench.jsonl(*[row] * 9)} | keys


def reward_model(change: Callable[[Path], object]) -> Callable[[Bench], Arguments]:
    """Return a mistake in the folder of PPO's reward model, a copy that `change` may change."""

    def make(bench: Bench) -> Arguments:
        folder = bench.copy(bench.reward_model)
        change(folder)
        return {"ppo.reward_model": folder}

    return make


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def add_token(folder: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(folder)


def add_value_head(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["score.weight"]
    head = {"v_head.summary.weight": torch.ones(1, 32), "v_head.summary.bias": torch.ones(1)}
    save_file(weights | head, folder / "model.safetensors", {"format": "pt"})


def another_model(key: str, family: str, sizes: dict[str, Any], **keys: object) -> Callable[[Bench], Arguments]:
    """Return a mistake with a tiny model of another family as `key`."""

    def make(bench: Bench) -> Arguments:
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM

        folder = bench.copy(bench.model)
        config = CONFIG_MAPPING[family](vocab_size=len(build_tokenizer()), **sizes)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return {key: folder} | keys

    return make


def smaller_model(bench: Bench) -> Arguments:
    folder = bench.copy(bench.model)
    llama(100).save_pretrained(folder)
    return {"reward.model": folder}


def one_key_head(bench: Bench) -> Arguments:
    folder = bench.copy(bench.model)
    llama(len(build_tokenizer()), num_key_value_heads=1).save_pretrained(folder)
    keys = settings(model__path=folder, engine__zero_stage=3, ppo__generation_weights="tensor_parallel")
    return [*keys, "--ranks", "2"]


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
PAIR = {"a": "yes", "b": "no"}

MISTAKES: dict[str, tuple[Arguments | Callable[[Bench], Arguments], list[str]]] = {
    # Folders, batches and devices
    "resuming_nothing": (["--resume"], ["run: holds no run to resume"]),
    "no_earlier_stage": (["ppo"], ["holds no finished sft stage to start from", "rlhf sft", "ppo.actor"]),
    "no_reward_model": (
        lambda bench: ["ppo", "--set", f"ppo.actor={bench.model}"],
        ["holds no finished reward stage", "set ppo.reward_model, or ppo.reward_weight=0 to use ppo.reward_functions"],
    ),
    "a_folder_that_cannot_be_made": (
        lambda bench: ["--output", str(bench.file("file", "x") / "run")],
        ["cannot be written", "choose another --output"],
    ),
    "a_batch_that_cannot_be_divided": (
        {"reward.batch_size": 6, "reward.micro_batch_size": 4},
        ["reward.batch_size: 6 is not a multiple"],
    ),
    "prompts_that_ranks_cannot_share": (
        [
            *settings(ppo__estimator="rloo", ppo__batch_size=6, ppo__completions_per_prompt=2, ppo__micro_batch_size=1),
            *("--ranks", "2"),
        ],
        ["ppo.batch_size: 6 completions cannot be divided into 2", "make it a multiple of 4"],
    ),
    "the_best_by_a_rule_that_is_not_there": (
        {"ppo.eval_every": 1, "ppo.keep": "best(approved_share)"},
        ["ppo.keep: best(approved_share) needs a rule that approves", "best(judge_reward) with ppo.judge"],
    ),
    "a_kernel_that_is_not_there": (
        {"engine.kernels": "{adamw: torch-foreach, clip_grad_norm: quick}"},
        ["engine.kernels.clip_grad_norm: cpu has no implementation quick; use one of: torch"],
    ),
    # Placement and rollouts
    "an_optimizer_on_the_host_without_zero": (
        {"engine.zero_stage": 1, "roles.critic.zero_stage": 0, "engine.offload": "optimizer"},
        ["engine.offload: optimizer", "the critic model uses ZeRO 0; set roles.critic.zero_s"],
    ),
    "a_setting_of_deepspeed_that_is_rlhf_s": (
        {"engine.deepspeed": "{fp16: {enabled: true}}"},
        ["engine.deepspeed.fp16: is managed by rlhf", "set precision"],
    ),
    "quantized_weights_of_a_model_that_is_trained_whole": (
        {"roles.critic.frozen": "int4"},
        ["roles.critic.frozen: int4: the critic model is trained in full", "set roles.critic.lora_rank, or remove"],
    ),
    "quantized_weights_that_deepspeed_quantizes_again": (
        {
            "engine.frozen": "int8",
            "engine.zero_stage": 3,
            "lora.rank": 4,
            "engine.deepspeed": "{zero_optimization: {zero_quantized_weights: true}}",
        },
        ["engine.deepspeed.zero_optimization.zero_quantized_weights: would compute", "set engine.frozen=auto"],
    ),
    "layer_by_layer_without_shards": (
        {"ppo.generation_weights": "layerwise"},
        ["ppo.generation_weights: layerwise needs sharded weights", "roles.actor.zero_stage=3"],
    ),
    "a_team_that_is_not_wanted": (
        {"engine.zero_stage": 3, "ppo.generation_weights": "whole", "ppo.tensor_parallel": 2},
        ["ppo.tensor_parallel: 2 needs ppo.generation_weights=tensor_parallel, got whole"],
    ),
    "heads_that_ranks_cannot_share": (
        one_key_head,
        ["1 key heads cannot be divided among 2 ranks", "use layerwise"],
    ),
    # Data
    "missing_file": (
        lambda bench: for_stage("ppo", bench.folder / "nothere.jsonl"),
        ["nothere.jsonl: no such file", "data.datasets"],
    ),
    "deep_json": (
        lambda bench: for_stage("ppo", bench.file("rows.json", "[" * 100_000)),
        ["rows.json: not readable as JSON (nested too deeply)"],
    ),
    "a_file_that_cannot_be_read": (link_to_unreadable, ["rows.jsonl: cannot be read", "Input/output error"]),
    "two_columns_of_one_name": (
        lambda bench: for_stage("ppo", bench.file("rows.csv", "prompt,prompt\n" + "a,b\n" * 50)),
        ["rows.csv: several columns are named 'prompt'; rename all but one"],
    ),
    "damaged_saved_folder": (damaged_data_folder, ["saved: cannot be read as a saved data set"]),
    "nothing_inside_a_column": (
        rows_for(
            "ppo",
            lambda n: {"question": {"full_text": "p", "id": n}, "response": "r"},
            columns="{prompt: question.text}",
        ),
        ["no column 'question.text' (columns.prompt); question has the keys full_text, id"],
    ),
    "a_margin_between_nothing": (
        rows_for("ppo", lambda n: {"prompt": f"cow {n}", "response": "moo", "by": 1}, columns="{margin: by}"),
        ["columns.margin needs pairs of replies"],
    ),
    "what_decides_between_nothing": (
        rows_for(
            "reward",
            lambda n: {"prompt": f"p {n}", "chosen": "x", "rejected": "y", "labels": n % 2, **PAIR},
            prefer="{label: labels, first: 1}",
        ),
        ["`prefer` decides between columns.first and columns.second; set all three"],
    ),
    "no_preferences": (
        rows_for("reward", lambda n: {"prompt": f"p {n}", "response": "r"}),
        ["reward:", "no usable row", "no preference (first: rows.jsonl:", "remove reward"],
    ),
    "no_source_for_a_stage": (
        {"data.datasets.0.stages": "[sft,ppo]"},
        ["reward: no data set is for this stage", "add reward to"],
    ),
    # Raw text
    "a_weight_of_no_text": (
        {"ppo.ptx_coef": 1},
        ["ppo.ptx_coef: there is no text to train on; name some in data.pretraining"],
    ),
    "text_of_no_weight": (
        texts({"text": "red cow"}, **{"ppo.ptx_coef": 0}),
        ["data.pretraining: no loss uses it; set ppo.ptx_coef"],
    ),
    "missing_raw_text": (
        {"ppo.ptx_coef": 1, "data.pretraining": "./nope.jsonl"},
        ["nope.jsonl: no such file or folder; check data.pretraining"],
    ),
    "raw_text_in_another_column": (
        texts({"body": "red cow"}),
        ["rows.jsonl: no column 'text' (data.pretraining.*.text); found: body"],
    ),
    "a_column_of_no_text": (texts({"text": " "}), ["rows.jsonl: column 'text' has no text; name another"]),
    "too_little_raw_text": (
        texts({"text": "red cow"}, **{"ppo.ptx_length": 100}),
        ["data.pretraining: ", "rows of 100 (ppo.ptx_length)", "needs 2 (ppo.ptx_batch_size)"],
    ),
    "raw_text_that_does_not_divide": (
        texts({"text": "red cow"}, **{"ppo.ptx_batch_size": 3}),
        ["ppo.ptx_batch_size: 3 is not a multiple of ppo.micro_batch_size 2 x 1 ranks"],
    ),
    # Rewards
    "a_file_of_rewards_that_is_not_there": (
        {"ppo.reward_functions": "./nope.py:f"},
        ["ppo.reward_functions: ./nope.py: no such file"],
    ),
    "a_reward_function_of_other_arguments": (
        lambda bench: {"ppo.reward_functions": f"{bench.file('rewards.py', REWARDS)}:two"},
        ["takes (prompt, completion), but is called with (prompt, completion, row)"],
    ),
    "rewards_that_may_take_longer_than_ranks_wait": (
        [
            *settings(ppo__reward_functions="math:hypot", ppo__reward_timeout=50, engine__timeout=50),
            *("--ranks", "2"),
        ],
        ["ppo.reward_timeout: must be less than engine.timeout, 50 s, got 50 s"],
    ),
    # Models and tokenizers
    "missing_model": ({"ppo.reward_model": "./nope"}, ["nope: no such model folder"]),
    "a_file_for_a_model": (
        lambda bench: {"ppo.actor": bench.rows},
        ["rows.jsonl: is a file; name the folder that holds the model"],
    ),
    "damaged_weights": (reward_model(cut_weights), ["cannot be loaded as AutoModelForSequenceClassification"]),
    "weights_of_another_size": (
        lambda bench: {"ppo.reward_model": bench.copy(bench.reward_model, intermediate_size=40)},
        ["its weights do not fit", "x 48", "x 40"],
    ),
    "too_few_positions": (
        lambda bench: {"ppo.reward_model": bench.copy(bench.reward_model, max_position_embeddings=39)},
        ["has 39 positions, fewer than data.max_prompt_length", "= 40"],
    ),
    "too_few_positions_for_raw_text": (
        lambda bench: {"ppo.actor": bench.model} | texts({"text": "cow " * 50}, **{"ppo.ptx_length": 129})(bench),
        ["has 128 positions, fewer than ppo.ptx_length = 129"],
    ),
    "a_language_model_as_judge": (
        lambda bench: {"ppo.judge": bench.model},
        ["its weights lack score.weight"],
    ),
    "a_language_model_as_reward_model": (
        lambda bench: {"ppo.reward_model": bench.model},
        ["its weights lack score.weight"],
    ),
    "a_value_head_of_trl": (
        reward_model(add_value_head),
        ["lack score.weight and hold v_head.summary.bias, v_head.summary.weight", "ppo.reward_functions"],
    ),
    "an_encoder_decoder": (
        lambda bench: {"reward.model": bench.copy(bench.model, model_type="t5")},
        ["the architecture t5 is not supported yet: it is no decoder-only"],
    ),
    "dropout_where_there_is_none": (
        another_model(
            "ppo.actor",
            "lfm2",
            {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "num_key_value_heads": 2, **SMALL},
            **{"ppo.dropout": 0.1},
        ),
        ["ppo.dropout: 0.1, but Lfm2ForCausalLM has no dropout"],
    ),
    "no_norm_to_reset": (
        another_model("reward.model", "olmo", {"num_hidden_layers": 1, **SMALL}, **{"reward.reset_final_norm": "true"}),
        ["reward.reset_final_norm: true, but OlmoForSequenceClassification has no norm with weights"],
    ),
    "another_vocabulary": (reward_model(add_token), ["this model's vocabulary", "differ in '<extra>'"]),
    "the_tokenizer_of_a_larger_model": (
        smaller_model,
        ["this tokenizer has 300 tokens", "knows 100", "model.tokenizer"],
    ),
    "missing_tokenizer": (
        {"model.tokenizer": "./nope"},
        ["nope: no such tokenizer folder; check model.tokenizer"],
    ),
    "broken_tokenizer": (
        reward_model(lambda folder: (folder / "tokenizer.json").write_text("{")),
        ["its tokenizer cannot be loaded"],
    ),
    "an_end_token_for_the_embedded_model": (
        {"model.path": "", "model.eos_token": "</s>"},
        ["model.eos_token: the embedded model has its own"],
    ),
    "a_reward_model_that_does_not_know_the_end_token": (
        lambda bench: {"ppo.reward_model": bench.reward_model, "model.eos_token": "<|end|>"},
        ["this model's vocabulary", "differ in '<|end|>'"],
    ),
    "unknown_layers_of_the_one_model_that_has_adapters": (
        {"roles.critic.lora_rank": 2, "lora.target_modules": "[query]"},
        ["no linear layer is named 'query'", "q_proj"],
    ),
    "a_base_that_cannot_be_shared": (
        lambda bench: {"lora.rank": 2, "lora.share_base": "true", "reward.model": bench.model},
        ["reward model is trained on ", ", and the actor starts from the model of the sft stage"],
    ),
    "adapters_merged_into_quantized_weights": (
        {"lora.rank": 2, "lora.merge": "true", "engine.frozen": "int8"},
        ["lora.merge: adapters cannot be merged into int8 weights"],
    ),
}


def make_mistake(name: str, bench: Bench) -> tuple[list[str], list[str]]:
    """Return the arguments of rlhf, and words of the error."""
    arguments, words = MISTAKES[name]
    arguments = arguments(bench) if callable(arguments) else arguments
    if isinstance(arguments, dict):
        arguments = [part for key, value in arguments.items() for part in ("--set", f"{key}={value}")]
    return list(arguments), words
