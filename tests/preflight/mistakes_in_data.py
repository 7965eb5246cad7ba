"""Mistakes in the data of a run, and what the error says of each; see `tests.preflight.mistakes`."""

from __future__ import annotations

from pathlib import Path

from tests.preflight.bench import Bench, mistake, settings


def for_ppo(path: Path) -> list[str]:
    """Arguments by which SFT and the reward model are trained on good rows, and PPO on those of `path`."""
    return settings(data__datasets__0__stages="[sft,reward]", data__datasets__1=f"{{path: {path}, stages: [ppo]}}")


def for_reward(path: Path) -> list[str]:
    return settings(data__datasets__0__stages="[sft,ppo]", data__datasets__1=f"{{path: {path}, stages: [reward]}}")


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
