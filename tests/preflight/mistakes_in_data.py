"""Mistakes in the data of a run, and what the error says of each; see `tests.preflight.mistakes`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
def two_columns_of_one_name(bench: Bench) -> tuple[list[str], list[str]]:
    path = bench.file("rows.csv", "prompt,prompt\n" + "a,b\n" * 50)
    return for_ppo(path), ["rows.csv: several columns are named 'prompt'; rename all but one"]


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
    return settings(data__datasets__0__subset="english"), ["only hub data sets have subsets", "'english'"]


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
def a_text_alone(bench: Bench) -> tuple[list[str], list[str]]:
    path = bench.jsonl(*({"text": f"p {n}"} for n in range(40)))
    return for_ppo(path), ["a text alone does not say where its prompt ends", "columns.text"]


@mistake
def a_margin_between_nothing(bench: Bench) -> tuple[list[str], list[str]]:
    path = bench.jsonl(*({"prompt": f"cow {n}", "response": "moo", "by": 1} for n in range(40)))
    found = [*for_ppo(path), "--set", "data.datasets.1.columns={margin: by}"]
    return found, ["columns.margin needs pairs of replies"]


def _pairs(bench: Bench, **columns: Any) -> Path:
    """Forty pairs, with columns of their own; a list gives one value after the other."""
    given = {name: value if isinstance(value, list) else [value] for name, value in columns.items()}
    rows = ({name: values[n % len(values)] for name, values in given.items()} for n in range(40))
    return bench.jsonl(*({"prompt": f"p {n}", "a": "yes", "b": "no"} | row for n, row in enumerate(rows)))


def for_reward_with(path: Path, **keys: str) -> list[str]:
    extra = [part for key, value in keys.items() for part in ("--set", f"data.datasets.1.{key}={value}")]
    return [*for_reward(path), *extra]


PAIR = "{first: a, second: b}"


@mistake
def nothing_inside_a_column(bench: Bench) -> tuple[list[str], list[str]]:
    path = bench.jsonl(*({"question": {"full_text": f"p {n}", "id": n}, "response": "r"} for n in range(40)))
    columns = "{prompt: question.text}"
    found = [*for_ppo(path), "--set", f"data.datasets.1.columns={columns}"]
    return found, ["no column 'question.text' (columns.prompt); question has the keys full_text, id"]


@mistake
def what_decides_between_nothing(bench: Bench) -> tuple[list[str], list[str]]:
    path = _pairs(bench, chosen="x", rejected="y", labels=[0, 1])
    found = for_reward_with(path, prefer="{label: labels, first: 1}")
    return found, ["`prefer` decides between columns.first and columns.second; set all three"]


@mistake
def a_label_that_is_ignored(bench: Bench) -> tuple[list[str], list[str]]:
    path = _pairs(bench, labels=[0, 1])
    found = for_reward_with(path, columns="{chosen: a, rejected: b}")
    return found, ['column "labels" looks like a preference label', "`prefer`", "prefer: none"]


@mistake
def a_label_of_single_replies(bench: Bench) -> tuple[list[str], list[str]]:
    path = _pairs(bench, label=[True, False])
    return for_reward_with(path, columns="{response: a}"), ['column "label" looks as if it separates good replies']


@mistake
def a_label_of_three_values(bench: Bench) -> tuple[list[str], list[str]]:
    path = _pairs(bench, winner=["a", "b", "tie"])
    found = for_reward_with(path, columns=PAIR, prefer="{label: winner, first: a}")
    return found, ['"winner" has several values other than a; found: a, b, tie; set prefer.second']


@mistake
def a_label_without_the_value(bench: Bench) -> tuple[list[str], list[str]]:
    path = _pairs(bench, labels=[0, 1])
    found = for_reward_with(path, columns=PAIR, prefer="{label: labels, first: A}")
    return found, ['"labels" never equals A (prefer.first); found: 0, 1']


@mistake
def a_known_name_with_other_columns(bench: Bench) -> tuple[list[str], list[str]]:
    from datasets import Dataset

    path = bench.folder / "stanfordnlp" / "SHP"
    Dataset.from_list([{"prompt": f"p {n}"} for n in range(40)]).save_to_disk(path)
    return for_ppo(path), [
        "no column 'history' (columns.prompt); found: prompt",
        "known.yaml gives the columns of stanfordnlp/SHP",
    ]


@mistake
def a_revision_of_a_file(bench: Bench) -> tuple[list[str], list[str]]:
    return settings(data__datasets__0__revision="main"), ["only hub data sets have revisions", "'main'"]


@mistake
def no_preferences(bench: Bench) -> tuple[list[str], list[str]]:
    path = bench.jsonl(*({"prompt": f"p {n}", "response": "r"} for n in range(40)))
    return for_reward(path), ["reward:", "no usable row", "no preference (first: rows.jsonl:", "remove reward"]


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
    return settings(data__datasets__0__heldout=bench.rows), [
        "no usable row",
        "also in the training data",
        "data.datasets.*.heldout",
    ]
