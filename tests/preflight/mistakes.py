"""What a user can get wrong, each mistake made in a run of its own: arguments flow out, and words of the line to come.

Nearly all of them would stop the second or the third stage only.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.helpers import build_tokenizer, llama

MISTAKES: dict[str, Callable[[Bench], tuple[list[str], list[str]]]] = {}
"""Name of the mistake -> (arguments of rlhf, words of the error)."""


@dataclass(frozen=True)
class Bench:
    """Where mistakes are made: a folder of one's own, and what a finished run, its model and its data are."""

    folder: Path
    model: Path
    rows: Path
    run: Path

    @property
    def output(self) -> Path:
        return self.folder / "run"

    def copy(self, source: Path) -> Path:
        """A folder that may be changed."""
        return Path(shutil.copytree(source, self.folder / f"copy-{source.parent.name}-{source.name}"))

    def file(self, name: str, text: str | bytes) -> Path:
        path = self.folder / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    def jsonl(self, *rows: Any) -> Path:
        return self.file("rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def settings(**keys: object) -> list[str]:
    return [part for key, value in keys.items() for part in ("--set", f"{key.replace('__', '.')}={value}")]


def mistake(function: Callable[[Bench], tuple[list[str], list[str]]]) -> Callable[..., Any]:
    MISTAKES[function.__name__] = function
    return function


def for_ppo(path: Path) -> list[str]:
    """Arguments by which SFT and the reward model are trained on good rows, and PPO on those of `path`."""
    return settings(data__datasets__0__stages="[sft,reward]", data__datasets__1=f"{{path: {path}, stages: [ppo]}}")


def for_reward(path: Path) -> list[str]:
    return settings(data__datasets__0__stages="[sft,ppo]", data__datasets__1=f"{{path: {path}, stages: [reward]}}")


# data


@mistake
def missing_file(bench: Bench) -> tuple[list[str], list[str]]:
    return for_ppo(bench.folder / "nothere.jsonl"), ["nothere.jsonl: no such file", "data.datasets"]


@mistake
def unknown_kind(bench: Bench) -> tuple[list[str], list[str]]:
    return for_ppo(bench.file("rows.doc", "x")), ["rows.doc: unknown kind of file", ".jsonl"]


@mistake
def broken_json(bench: Bench) -> tuple[list[str], list[str]]:
    path = bench.file("rows.json", '[\n{"prompt": "a"},\n{"prompt" "b"}]')
    return for_ppo(path), ["rows.json:3: not readable as JSON"]


@mistake
def json_of_something_else(bench: Bench) -> tuple[list[str], list[str]]:
    return for_ppo(bench.file("rows.json", '{"prompt": "a"}')), ["rows.json: expected a list of objects"]


@mistake
def deep_json(bench: Bench) -> tuple[list[str], list[str]]:
    return for_ppo(bench.file("rows.json", "[" * 100_000)), ["rows.json: not readable as JSON (nested too deeply)"]


@mistake
def other_bytes(bench: Bench) -> tuple[list[str], list[str]]:
    good = b'{"prompt": "a"}\n' * 1000
    return for_ppo(bench.file("rows.jsonl", good + b'{"prompt": "\xff\xfe"}\n')), ["rows.jsonl: not a UTF-8 text file"]


@mistake
def a_file_that_cannot_be_read(bench: Bench) -> tuple[list[str], list[str]]:
    (bench.folder / "rows.jsonl").symlink_to("/proc/self/mem")  # there, and for nobody to read
    return for_ppo(bench.folder / "rows.jsonl"), ["rows.jsonl: cannot be read", "Input/output error"]


@mistake
def semicolons(bench: Bench) -> tuple[list[str], list[str]]:
    path = bench.file("rows.csv", "prompt;response\n" + "a;b\n" * 50)
    return for_ppo(path), ["rows.csv: its fields are separated by semicolons", "save it with commas"]


@mistake
def broken_parquet(bench: Bench) -> tuple[list[str], list[str]]:
    return for_ppo(bench.file("rows.parquet", "no parquet")), ["rows.parquet: not readable as Parquet"]


@mistake
def folder_of_something_else(bench: Bench) -> tuple[list[str], list[str]]:
    return for_ppo(bench.model), ["not a folder that datasets.save_to_disk wrote"]


def _saved(bench: Bench) -> Path:
    from datasets import Dataset, DatasetDict

    DatasetDict({"validation": Dataset.from_list([{"prompt": f"p {n}"} for n in range(40)])}).save_to_disk(
        bench.folder / "saved"
    )
    return bench.folder / "saved"


@mistake
def missing_split(bench: Bench) -> tuple[list[str], list[str]]:
    return for_ppo(_saved(bench)), ["saved: no split 'train'; found: validation"]


@mistake
def damaged_saved_folder(bench: Bench) -> tuple[list[str], list[str]]:
    folder = _saved(bench)
    for path in folder.rglob("*.arrow"):
        path.write_bytes(b"x")
    found = for_ppo(folder), ["saved: cannot be read as a saved data set"]
    return [*found[0], "--set", "data.datasets.1.split=validation"], found[1]


@mistake
def a_subset_of_a_file(bench: Bench) -> tuple[list[str], list[str]]:
    return settings(data__datasets__0__subset="english"), ["has no subsets", "'english'"]


@mistake
def a_name_that_no_hub_gives(bench: Bench) -> tuple[list[str], list[str]]:
    found = for_ppo(Path("nobody/nothing"))
    return found, ["nobody/nothing: no file or folder here", "HF_HUB_OFFLINE"]


@mistake
def missing_column(bench: Bench) -> tuple[list[str], list[str]]:
    return settings(data__datasets__0__columns__chosen="better"), ["no column 'better' (columns.chosen)", "prompt"]


@mistake
def half_a_preference(bench: Bench) -> tuple[list[str], list[str]]:
    path = bench.jsonl(*({"prompt": f"p {n}", "chosen": "yes"} for n in range(40)))
    return for_reward(path), ["a preference needs a column 'rejected' too"]


@mistake
def unknown_columns(bench: Bench) -> tuple[list[str], list[str]]:
    return for_ppo(bench.jsonl({"words": "a", "label": 1})), ["no known format fits its columns; found: label, words"]


@mistake
def sharegpt(bench: Bench) -> tuple[list[str], list[str]]:
    path = bench.jsonl(*({"conversations": [{"from": "human", "value": f"p {n}"}]} for n in range(40)))
    return for_ppo(path), ["conversations (ShareGPT)", "rename them to messages with role/content"]


@mistake
def no_preferences(bench: Bench) -> tuple[list[str], list[str]]:
    path = bench.jsonl(*({"prompt": f"p {n}", "response": "r"} for n in range(40)))
    return for_reward(path), ["reward:", "no usable row", "no preference (first: rows.jsonl:", "leave reward out"]


@mistake
def prompts_of_a_pair_differ(bench: Bench) -> tuple[list[str], list[str]]:
    text = "\n\nHuman: {}\n\nAssistant: {}"
    path = bench.jsonl(
        *({"chosen": text.format(f"a {n}", "yes"), "rejected": text.format(f"b {n}", "no")} for n in range(40))
    )
    return for_reward(path), ["prompts of chosen and rejected differ (first: rows.jsonl:1)"]


@mistake
def too_long_prompts(bench: Bench) -> tuple[list[str], list[str]]:
    path = bench.jsonl(*({"prompt": f"please {n} " * 30} for n in range(40)))
    return for_ppo(path), ["prompt too long", "longest allowed 24", "raise data.max_prompt_length"]


@mistake
def no_source_for_a_stage(bench: Bench) -> tuple[list[str], list[str]]:
    return settings(data__datasets__0__stages="[sft,ppo]"), ["reward: no data set is for this stage", "add reward to"]


@mistake
def no_share_for_a_stage(bench: Bench) -> tuple[list[str], list[str]]:
    return settings(data__stage_split="1:1:0"), ["ppo: data.stage_split", "leaves it no rows; give it a share"]


@mistake
def too_few_prompts(bench: Bench) -> tuple[list[str], list[str]]:
    return for_ppo(bench.jsonl({"prompt": "a"})), ["too few prompts for a held-out part", "data.datasets.*.heldout"]


@mistake
def nothing_new_in_the_held_out_source(bench: Bench) -> tuple[list[str], list[str]]:
    return settings(data__datasets__0__heldout=bench.rows), ["no usable row", "trained on", "data.datasets.*.heldout"]


# models


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
def a_classifier_of_two_labels(bench: Bench) -> tuple[list[str], list[str]]:
    from transformers import LlamaForSequenceClassification

    folder = bench.copy(bench.model)
    config = llama(len(build_tokenizer())).config
    config.num_labels = 2
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return settings(ppo__reward_model=folder), ["its head has 2 outputs, a reward model has one"]


@mistake
def another_vocabulary(bench: Bench) -> tuple[list[str], list[str]]:
    folder = bench.copy(bench.run / "reward" / "model")
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(folder)
    return settings(ppo__reward_model=folder), ["the reward model's vocabulary", "differ in '<extra>'"]


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
def a_model_that_no_hub_gives(bench: Bench) -> tuple[list[str], list[str]]:
    return settings(ppo__reward_model="nobody/nothing"), ["nobody/nothing: no folder here", "HF_HUB_OFFLINE"]


@mistake
def unknown_layers(bench: Bench) -> tuple[list[str], list[str]]:
    return settings(lora__rank=2, lora__target_modules="[query]"), ["no linear layer is named 'query'", "q_proj"]


# batches, folders, disk


@mistake
def a_batch_that_cannot_be_divided(bench: Bench) -> tuple[list[str], list[str]]:
    return settings(reward__batch_size=6, reward__micro_batch_size=4), ["reward.batch_size: 6 is not a multiple"]


@mistake
def a_batch_that_ranks_cannot_share(bench: Bench) -> tuple[list[str], list[str]]:
    return [*settings(ppo__minibatch_size=1), "--ranks", "2"], ["ppo.minibatch_size: 1 rows cannot be shared among 2"]


@mistake
def minibatches_that_do_not_fit(bench: Bench) -> tuple[list[str], list[str]]:
    return settings(ppo__minibatch_size=3), ["ppo.batch_size: 4 is not a multiple of ppo.minibatch_size 3"]


@mistake
def resuming_nothing(bench: Bench) -> tuple[list[str], list[str]]:
    return ["--resume"], ["run: holds no run to resume"]


@mistake
def two_wishes(bench: Bench) -> tuple[list[str], list[str]]:
    return ["--resume", "--overwrite"], ["--resume and --overwrite"]


@mistake
def no_earlier_stage(bench: Bench) -> tuple[list[str], list[str]]:
    return ["ppo"], ["holds no finished sft stage to start from", "rlhf sft", "ppo.actor"]


@mistake
def a_folder_of_other_files(bench: Bench) -> tuple[list[str], list[str]]:
    (bench.folder / "other").mkdir()
    (bench.folder / "other" / "letter.txt").write_text("x")
    return ["--output", str(bench.folder / "other")], ["other: is not empty and holds no run"]


@mistake
def a_file_as_folder(bench: Bench) -> tuple[list[str], list[str]]:
    return ["--output", str(bench.file("file", "x"))], ["file: is a file; choose a folder with --output"]


@mistake
def a_folder_that_cannot_be_made(bench: Bench) -> tuple[list[str], list[str]]:
    return ["--output", str(bench.file("file", "x") / "run")], ["cannot be written", "choose another --output"]
