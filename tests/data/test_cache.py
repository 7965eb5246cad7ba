"""What a stage trains on is tokenized once, kept in Arrow, and read from there: the same examples, and no others."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf.config.schema import EVERY_STAGE, Config, DataConfig, Stage, share_of
from rlhf.data import arrow_store, cache, tokenize_rows
from rlhf.data.cache import StageCache
from rlhf.data.examples import Demonstration, NumberedPairs, count_tokens
from rlhf.data.load_sources import read_sources
from rlhf.data.records import Message, Row
from rlhf.data.stage_dataset import StageData, load_stage
from rlhf.errors import DataError
from rlhf.reporting.console import console

ROWS: list[dict[str, Any]] = [
    {
        "prompt": f"Is {n} red? ⌘",
        "response": "no " * (n % 7) + "cow",
        "chosen": f"yes {n}",
        "rejected": "no",
        "m": n % 3,
        "nested": {"a": [1, None, {"b": "é"}], "score": n / 7},
    }
    for n in range(1100)
]
LIMITS: dict[str, Any] = {"max_prompt_length": 30, "max_completion_length": 12}


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept" / "rlhf"


@pytest.fixture
def rows(tmp_path: Path) -> str:
    return write(tmp_path / "rows.jsonl", [*ROWS[:60], {"prompt": "what?"}, *ROWS[:9]])


@pytest.fixture
def many(tmp_path: Path) -> str:
    """More than are written at once."""
    return write(tmp_path / "rows.jsonl", [*ROWS, {"prompt": "what?"}, *ROWS[:50]])


def cache_of(tokenizer: Any, path: str, stage: Stage = "sft", **changes: Any) -> StageCache:
    given = {"seed": 3, "end_ids": [1], "records": False}
    seed, ends, records = (changes.pop(name, default) for name, default in given.items())
    dataset = {"path": path, "columns": {"margin": "m"}, "stages": [share_of(stage)]}
    config = DataConfig(**{"datasets": [dataset], **LIMITS, **changes})
    return StageCache(config, stage, tokenizer, seed, ends, records)


def loaded(of: StageCache) -> StageData:
    """As without a cache."""
    read = read_sources(of.config, [of.stage], seed=of.seed, records=of.records)
    return load_stage(of.config, of.stage, of.tokenizer, seed=of.seed, end_ids=of.end_ids, sources=read)


def same(found: StageData, expected: StageData) -> None:
    assert list(found.train) == expected.train and list(found.heldout) == expected.heldout
    assert replace(found, train=[], heldout=[], fingerprints={}) == replace(expected, train=[], heldout=[])
    assert [str(report) for report in found.reports] == [str(report) for report in expected.reports]
    for one, other in zip(found.train, expected.train, strict=True):
        assert one.row.as_dict() == other.row.as_dict()


def unusable(*arguments: Any, **options: Any) -> Any:
    pytest.fail("nothing is to be tokenized or parsed")


@pytest.mark.parametrize("stage", EVERY_STAGE)
def test_kept_examples_are_those_that_are_loaded_and_are_made_once(
    tokenizer: Any, many: str, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = many
    kept = cache_of(tokenizer, rows, stage, records=stage == "ppo")
    expected = loaded(kept)
    assert kept.find() is None
    assert kept.build() is None
    same(kept.load(), expected)
    monkeypatch.setattr(tokenize_rows, "encode_prompts", unusable)
    monkeypatch.setattr("rlhf.data.load_sources.read_records", unusable)
    again = cache_of(tokenizer, rows, stage, records=stage == "ppo")
    assert again.build() is None
    found = again.find()
    assert found is not None
    same(found, expected)
    if stage == "ppo":
        assert found.train[0].row.record == next(r for r in ROWS if r["prompt"] == found.train[0].row.text)
    (print,) = found.fingerprints.values()
    assert found.fingerprints == {f"{rows} (margin m)": print}


def test_kept_examples_are_the_tokenizer_s_own_of_the_text(tokenizer: Any, many: str) -> None:
    kept = cache_of(tokenizer, many, chat_template=False)
    assert kept.build() is None
    data = kept.load()
    assert len(data.train) > 700
    for example in data.train:
        text = f"{example.row.text} {example.row.response}"
        assert example.prompt_ids == tokenizer(example.row.text)["input_ids"]
        assert example.prompt_ids + example.completion_ids == [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]


def test_lengths_are_known_and_slices_are_of_the_order(tokenizer: Any, rows: str) -> None:
    kept = cache_of(tokenizer, rows, "dpo")
    kept.build()
    train = kept.load().train
    examples = list(train)
    assert count_tokens(train) == count_tokens(examples)
    assert list(train[5:9]) == examples[5:9] and train[-1] == examples[-1]
    with pytest.raises(IndexError):
        train[len(train)]
    numbered = NumberedPairs(train, 7)
    assert [pair.number for pair in numbered] == [*range(7, 7 + len(train))]
    assert numbered[2].chosen_ids == examples[2].chosen_ids and numbered[2].row == examples[2].row


def test_whatever_the_examples_are_made_of_is_in_the_key(
    tokenizer: Any, tmp_path: Path, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import copy

    def key(path: str = rows, of: Any = tokenizer, stage: Stage = "sft", **changes: Any) -> str:
        return cache_of(of, path, stage, **changes).key

    templated, added = copy.deepcopy(tokenizer), copy.deepcopy(tokenizer)
    templated.chat_template += " "
    added.add_tokens(["zebra"])
    text = Path(rows).read_text()
    keys = [
        key(),
        key(stage="reward"),
        key(stage="dpo"),
        key(seed=4),
        key(end_ids=[1, 2]),
        key(records=True),
        key(of=templated),
        key(of=added),
        key(max_prompt_length=31),
        key(max_completion_length=13),
        key(too_long="truncate"),
        key(heldout_fraction=0.1),
        key(stage_split=(1, 1, 1)),
        key(chat_template=False),
    ]
    before = os.stat(rows)
    Path(rows).write_text(text.replace("Is 7 red", "Is 8 red"))
    os.utime(rows, ns=(before.st_atime_ns, before.st_mtime_ns))
    keys.append(key())
    assert os.stat(rows).st_size == before.st_size
    assert len(set(keys)) == len(keys)
    Path(rows).write_text(text)
    assert key() == keys[0] and key(of=copy.deepcopy(tokenizer)) == keys[0]
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    monkeypatch.setattr(cache, "_code_version", lambda: ["other code"])
    assert key() != keys[0]


def test_a_tokenizer_that_is_loaded_elsewhere_has_the_same_key(tokenizer: Any, tmp_path: Path, rows: str) -> None:
    from transformers import AutoTokenizer

    keys = []
    for name in ("a", "b"):
        tokenizer.save_pretrained(tmp_path / name)
        keys.append(cache_of(AutoTokenizer.from_pretrained(tmp_path / name), rows).key)
    assert keys[0] == keys[1]


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_folder_is_built_anew(tokenizer: Any, rows: str, damage: str) -> None:
    kept = cache_of(tokenizer, rows)
    kept.build()
    expected = loaded(kept)
    for file in sorted(kept.folder.iterdir()):
        mended(kept, file, damage)
        same(kept.load(), expected)


def mended(kept: StageCache, file: Path, damage: str) -> None:
    whole = file.read_bytes()
    if damage == "remove":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(whole[:-9])
    else:
        middle = len(whole) // 2
        file.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    assert kept.find() is None
    assert kept.build() is None
    assert file.read_bytes() == whole


def test_rows_that_are_too_few_leave_nothing(tokenizer: Any, tmp_path: Path, home: Path) -> None:
    kept = cache_of(tokenizer, write(tmp_path / "one.jsonl", ROWS[:1]), datasets=[str(tmp_path / "one.jsonl")])
    with pytest.raises(DataError):
        kept.build()
    assert [path.suffix for path in home.iterdir()] == [".lock"]


def test_what_cannot_be_kept_is_said(
    tokenizer: Any, tmp_path: Path, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept").write_text("a file")
    assert "rlhf cannot be written" in str(cache_of(tokenizer, rows).build())
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "room"))
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(cache.ExampleWriter, "close", lambda self: (_ for _ in ()).throw(full))
    kept = cache_of(tokenizer, rows)
    assert "cannot be written (No space left on device); set HF_DATASETS_CACHE to" in str(kept.build())
    assert not kept.folder.exists() and not list((tmp_path / "room" / "rlhf").glob("*.partial"))


def test_what_others_keep_is_read_where_nothing_can_be_written(
    tokenizer: Any, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = cache_of(tokenizer, rows)
    assert kept.build() is None
    read_only = OSError(30, "Read-only file system")
    monkeypatch.setattr(cache, "_lock_build", lambda *arguments: (_ for _ in ()).throw(read_only))
    assert cache_of(tokenizer, rows).build() is None
    assert "(Read-only file system)" in str(cache_of(tokenizer, rows, seed=4).build())


def test_records_that_json_would_change_are_not_kept(tokenizer: Any, tmp_path: Path) -> None:
    import datetime

    import pyarrow as pa
    from pyarrow.parquet import write_table

    path = str(tmp_path / "rows.parquet")
    day = datetime.date(2024, 1, 2)
    table = [{"prompt": f"p {n}?", "day": day} for n in range(9)]
    write_table(pa.Table.from_pylist(table), path)
    options: dict[str, Any] = {"datasets": [{"path": path, "stages": ["ppo"]}], "heldout_fraction": 0.3}
    kept = cache_of(tokenizer, path, "ppo", records=True, **options)
    assert kept.build() == "a row has a column with a date"
    assert cache_of(tokenizer, path, "ppo", **options).build() is None
    mapped = pa.array([[("a", n)] for n in range(9)], pa.map_(pa.string(), pa.int64()))
    write_table(pa.Table.from_pylist(table).set_column(1, "day", mapped), path)
    kept = cache_of(tokenizer, path, "ppo", records=True, **options)
    assert kept.build() == "a row has columns that JSON would change"


def test_a_source_that_changes_while_it_is_read_is_not_kept(
    tokenizer: Any, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = cache_of(tokenizer, rows)
    assert kept.key
    write(Path(rows), ROWS[:50])
    with pytest.raises(DataError, match="changed while it was read"):
        kept.build()
    assert cache_of(tokenizer, rows).find() is None and not kept.folder.exists()


def test_the_settings_of_a_run_say_what_is_kept(tokenizer: Any) -> None:
    config = Config()
    config = config.model_copy(update={"ppo": config.ppo.model_copy(update={"reward_functions": ("x",)}), "seed": 5})
    assert [StageCache.of(config, stage, tokenizer, [1]).records for stage in EVERY_STAGE] == [False] * 3 + [True]
    assert StageCache.of(config, "sft", tokenizer, [1]).seed == 5


_BUILD = """
import sys, time
from rlhf.config.schema import DataConfig
from rlhf.data import tokenize_rows
from rlhf.data.cache import StageCache
from tests.helpers import build_tokenizer
path, marks, pause = sys.argv[1:]
encode = tokenize_rows.encode_prompts
def counted(tokenizer, rows, **options):
    with open(marks, "a") as file:
        file.write(f"{len(rows)}\\n")
    time.sleep(float(pause))
    return encode(tokenizer, rows, **options)
tokenize_rows.encode_prompts = counted
config = DataConfig(datasets=[{"path": path, "stages": ["sft"]}], max_prompt_length=30, max_completion_length=12)
kept = StageCache(config, "sft", build_tokenizer(), 3, [1])
assert kept.build(show=True) is None
print(len(kept.load().train))
"""


def builder(rows: str, marks: Path, pause: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _BUILD, rows, str(marks), str(pause)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_processes_that_build_the_same_build_once_and_one_that_was_killed_leaves_nothing_whole(
    many: str, tmp_path: Path, home: Path
) -> None:
    marks = [tmp_path / f"marks-{n}" for n in range(3)]
    killed = builder(many, marks[0], 60)
    wait_for(marks[0])
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert len(list(home.glob("*.partial"))) == 1 and not list(home.glob("sft-*/stage.json"))
    both = [builder(many, mark, 0.5) for mark in marks[1:]]
    outputs = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert len({output.split()[-1] for output, _ in outputs}) == 1
    written = [mark.read_text().split() for mark in marks[1:] if mark.exists()]
    assert written == [["1000", "150"]], "one of the two has tokenized"
    assert not list(home.glob("*.partial"))
    assert any("waiting for another run that tokenizes the same rows" in output for output, _ in outputs)


def test_a_bar_is_shown_while_rows_are_tokenized_and_not_when_they_are_kept(
    tokenizer: Any, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize_rows, "PROGRESS_MIN_ROWS", 50)
    shown = []
    for show in (True, True):
        with console.capture() as captured:
            cache_of(tokenizer, rows).build(show=show)
        shown.append("sft: tokenizing" in captured.get())
    assert shown == [True, False]


def test_a_tokenizer_that_cannot_be_written_for_want_of_room_is_said(
    tokenizer: Any, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokenizer, "save_pretrained", full)
    with pytest.raises(DataError, match=r"temporary folder \(.*No space left on device\); set TMPDIR to"):
        cache_of(tokenizer, rows).build()


def test_examples_are_not_held_while_others_are_made_nor_when_they_are_opened(
    tokenizer: Any, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (tokenize_rows, arrow_store):
        monkeypatch.setattr(module, "_BATCH", 10)
    encode, alive = tokenize_rows.encode_prompts, []

    def examples() -> int:
        gc.collect()  # those of earlier tests may be garbage that waits
        return sum(isinstance(found, Demonstration) for found in gc.get_objects())

    def counted(*arguments: Any, **options: Any) -> Any:
        alive.append(examples())
        return encode(*arguments, **options)

    monkeypatch.setattr(tokenize_rows, "encode_prompts", counted)
    before = examples()
    kept = cache_of(tokenizer, rows)
    kept.build()
    assert len(alive) == 7 and max(alive) - before <= 10
    data = kept.load()
    assert examples() - before == len(data.reports) == 1, "the one that is shown"


def test_20_000_rows_take_no_lists_of_tokens(tmp_path: Path) -> None:
    """As lists, their 200 tokens each are 34 MB of references alone."""
    row = Row((Message("user", "a"),), "a", "b", None, None, "")

    def made(place: int) -> Demonstration:
        return Demonstration([place] * 100, [*range(place, place + 100)], row)

    tracemalloc.start()
    try:
        writer = arrow_store.ExampleWriter(tmp_path / "examples.arrow", Demonstration)
        for place in range(20_000):
            writer.add(made(place))
        writer.close()
        stored = arrow_store.StoredExamples(
            arrow_store.ExampleTable(tmp_path / "examples.arrow", Demonstration), np.arange(20_000)[::-1]
        )
        assert all(len(example.prompt_ids) == 100 for example in stored)
        assert tracemalloc.get_traced_memory()[1] < 15e6, "a thousand at a time"
        assert tracemalloc.get_traced_memory()[0] < 2e6
    finally:
        tracemalloc.stop()
    assert stored[7] == made(19_992)
    assert stored.token_counts() == {"prompt": array("i", [100] * 20_000), "completion": array("i", [100] * 20_000)}
