"""Tokenized rows are cached in an Arrow file once, and read from it: the same examples, and no others."""

from __future__ import annotations

import copy
import datetime
import os
import signal
import tracemalloc
import weakref
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf.config.schema import EVERY_STAGE, Config, DataConfig, Stage, share_of
from rlhf.data import cache
from rlhf.data import examples as examples_module
from rlhf.data.cache import ExampleWriter, StageCache, StoredExamples
from rlhf.data.examples import Demonstration, NumberedPairs, count_tokens
from rlhf.data.load_sources import read_sources
from rlhf.data.records import Message, Row
from rlhf.data.stage_dataset import StageData, load_stage
from rlhf.errors import DataError
from rlhf.models.tokenizers import load_tokenizer
from rlhf.reporting.console import console
from tests.data.rows import write_jsonl
from tests.forks import ForkedProcess, Forks
from tests.helpers import wait_for

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


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rlhf"


@pytest.fixture
def rows(tmp_path: Path) -> str:
    return write_jsonl(tmp_path / "rows.jsonl", [*ROWS[:60], {"prompt": "what?"}, *ROWS[:9]])


@pytest.fixture
def many(tmp_path: Path) -> str:
    """More than are written at once."""
    return write_jsonl(tmp_path / "rows.jsonl", [*ROWS, {"prompt": "what?"}, *ROWS[:50]])


def make_cache(tokenizer: Any, path: str, stage: Stage = "sft", **changes: Any) -> StageCache:
    options = {"seed": 3, "end_ids": [1], "records": False}
    seed, ends, records = (changes.pop(name, default) for name, default in options.items())
    dataset = {"path": path, "columns": {"margin": "m"}, "stages": [share_of(stage)]}
    config = DataConfig(**{"datasets": [dataset], **LIMITS, **changes})
    return StageCache(config, stage, tokenizer, seed, ends, records)


def load_uncached(stage_cache: StageCache) -> StageData:
    config, stage, seed = stage_cache.config, stage_cache.stage, stage_cache.seed
    sources = read_sources(config, [stage], seed=seed, records=stage_cache.records)
    return load_stage(config, stage, stage_cache.tokenizer, seed=seed, end_ids=stage_cache.end_ids, sources=sources)


def assert_same(data: StageData | None, expected: StageData) -> None:
    assert data is not None
    assert list(data.train) == expected.train and list(data.heldout) == expected.heldout
    assert replace(data, train=[], heldout=[], fingerprints={}) == replace(expected, train=[], heldout=[])
    assert [str(report) for report in data.reports] == [str(report) for report in expected.reports]
    for example, expected_example in zip(data.train, expected.train, strict=True):
        assert example.row.as_dict() == expected_example.row.as_dict()


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize("stage", EVERY_STAGE)
def test_cached_examples_equal_loaded_ones_and_are_made_once(
    tokenizer: Any, many: str, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage_cache = make_cache(tokenizer, many, stage, records=stage == "ppo")
    expected = load_uncached(stage_cache)
    assert stage_cache.find() is None
    assert stage_cache.build() is None
    assert_same(stage_cache.load(), expected)
    for name in ("rlhf.data.examples.encode_prompts", "rlhf.data.load_sources.read_records"):
        monkeypatch.setattr(name, raising(AssertionError("nothing is to be tokenized or parsed")))
    again = make_cache(tokenizer, many, stage, records=stage == "ppo")
    assert again.build() is None
    data = again.find()
    assert_same(data, expected)
    assert data is not None
    if stage == "ppo":
        record = data.train[0].row.record
        assert record == next(row for row in ROWS if row["prompt"] == data.train[0].row.text)
    assert list(data.fingerprints) == [f"{many} (margin m)"]


def test_cached_examples_have_the_tokenizer_s_ids(tokenizer: Any, many: str) -> None:
    stage_cache = make_cache(tokenizer, many, chat_template=False)
    assert stage_cache.build() is None
    data = stage_cache.load()
    assert len(data.train) > 700
    for example in data.train:
        text = f"{example.row.text} {example.row.response}"
        assert example.prompt_ids == tokenizer(example.row.text)["input_ids"]
        assert example.prompt_ids + example.completion_ids == [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]


def test_stored_examples_have_lengths_slices_and_numbers(tokenizer: Any, rows: str) -> None:
    stage_cache = make_cache(tokenizer, rows, "dpo")
    stage_cache.build()
    train = stage_cache.load().train
    examples = list(train)
    assert count_tokens(train) == count_tokens(examples)
    assert list(train[5:9]) == examples[5:9] and train[-1] == examples[-1]
    with pytest.raises(IndexError):
        train[len(train)]
    numbered = NumberedPairs(train, 7)
    assert [pair.number for pair in numbered] == [*range(7, 7 + len(train))]
    assert numbered[2].chosen_ids == examples[2].chosen_ids and numbered[2].row == examples[2].row


def test_key_depends_on_every_input(tokenizer: Any, tmp_path: Path, rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    templated, added = copy.deepcopy(tokenizer), copy.deepcopy(tokenizer)
    templated.chat_template += " "
    added.add_tokens(["zebra"])
    changes: list[dict[str, Any]] = [
        {},
        {"stage": "reward"},
        {"stage": "dpo"},
        {"seed": 4},
        {"end_ids": [1, 2]},
        {"records": True},
        {"max_prompt_length": 31},
        {"max_completion_length": 13},
        {"too_long": "truncate"},
        {"heldout_fraction": 0.1},
        {"stage_split": (1, 1, 1)},
        {"chat_template": False},
        {"datasets": [{"path": rows, "template": "Q: {prompt}"}]},
    ]
    keys = [make_cache(tokenizer, rows, **change).key for change in changes]
    keys += [make_cache(changed, rows).key for changed in (templated, added)]
    text, before = Path(rows).read_text(), os.stat(rows)
    Path(rows).write_text(text.replace("Is 7 red", "Is 8 red"))
    os.utime(rows, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat(rows).st_size == before.st_size
    keys.append(make_cache(tokenizer, rows).key)
    assert len(set(keys)) == len(keys)
    (tmp_path / "folder").mkdir()
    for last in (9, 10):  # only the second file changes
        files = {"a": ROWS[:9], "b": ROWS[1:last]}
        for name, file_rows in files.items():
            write_jsonl(tmp_path / "folder" / f"{name}.jsonl", file_rows)
        keys.append(make_cache(tokenizer, str(tmp_path / "folder")).key)
    assert len(set(keys)) == len(keys)
    Path(rows).write_text(text)
    for name in ("a", "b"):
        tokenizer.save_pretrained(tmp_path / name)
    loaded = [make_cache(AutoTokenizer.from_pretrained(tmp_path / name), rows).key for name in ("a", "b")]
    assert loaded[0] == loaded[1]
    assert make_cache(copy.deepcopy(tokenizer), rows).key == keys[0]
    monkeypatch.setattr(cache, "_code_version", lambda: ["other code"])
    assert make_cache(tokenizer, rows).key != keys[0]


def test_tokenizer_saved_after_a_padded_call_builds_a_cache(tokenizer: Any, tmp_path: Path, rows: str) -> None:
    used = copy.deepcopy(tokenizer)
    used("what?", padding="max_length", truncation=True, max_length=5)
    used.save_pretrained(tmp_path)
    assert '"max_length": 5' in (tmp_path / "tokenizer.json").read_text()
    stage_cache = make_cache(load_tokenizer(str(tmp_path))[0], rows)
    assert stage_cache.build() is None
    assert_same(stage_cache.find(), load_uncached(stage_cache))


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_folder_is_built_again(tokenizer: Any, rows: str, damage: str) -> None:
    stage_cache = make_cache(tokenizer, rows)
    stage_cache.build()
    expected = load_uncached(stage_cache)
    for file in sorted(stage_cache.folder.iterdir()):
        content = file.read_bytes()
        middle = len(content) // 2
        if damage == "remove":
            file.unlink()
        elif damage == "cut":
            file.write_bytes(content[:-9])
        else:
            file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        assert stage_cache.find() is None
        assert stage_cache.build() is None
        assert file.read_bytes() == content
        assert_same(stage_cache.load(), expected)


def test_build_without_enough_rows_leaves_nothing(tokenizer: Any, tmp_path: Path, home: Path) -> None:
    path = write_jsonl(tmp_path / "one.jsonl", ROWS[:1])
    with pytest.raises(DataError):
        make_cache(tokenizer, path).build()
    assert [file.suffix for file in home.iterdir()] == [".lock"]


def test_build_returns_why_the_folder_cannot_be_written(
    tokenizer: Any, tmp_path: Path, home: Path, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.parent.write_text("a file")
    assert "rlhf cannot be written" in str(make_cache(tokenizer, rows).build())
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "other"))
    stage_cache = make_cache(tokenizer, rows)
    with monkeypatch.context() as patched:
        patched.setattr(ExampleWriter, "close", raising(OSError(28, "No space left on device")))
        obstacle = str(stage_cache.build())
    assert "cannot be written (No space left on device); set HF_DATASETS_CACHE to" in obstacle
    assert not stage_cache.folder.exists() and not list((tmp_path / "other" / "rlhf").glob("*.partial"))
    assert stage_cache.build() is None
    monkeypatch.setattr(cache, "_lock_build", raising(OSError(30, "Read-only file system")))
    assert make_cache(tokenizer, rows).build() is None, "a shared cache that this process may only read"
    assert "(Read-only file system)" in str(make_cache(tokenizer, rows, seed=4).build())


def test_records_that_json_would_change_are_not_cached(tokenizer: Any, tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow.parquet import write_table

    path = str(tmp_path / "rows.parquet")
    table = pa.Table.from_pylist([{"prompt": f"p {n}?", "day": datetime.date(2024, 1, 2)} for n in range(9)])
    write_table(table, path)
    options: dict[str, Any] = {"datasets": [{"path": path, "stages": ["ppo"]}], "heldout_fraction": 0.3}
    stage_cache = make_cache(tokenizer, path, "ppo", records=True, **options)
    assert stage_cache.build() == "a row has a column with a date"
    assert make_cache(tokenizer, path, "ppo", **options).build() is None
    mapped = pa.array([[("a", n)] for n in range(9)], pa.map_(pa.string(), pa.int64()))
    write_table(table.set_column(1, "day", mapped), path)
    stage_cache = make_cache(tokenizer, path, "ppo", records=True, **options)
    assert stage_cache.build() == "a row has columns that JSON would change"


def test_source_that_changes_during_the_build_is_not_cached(tokenizer: Any, rows: str) -> None:
    stage_cache = make_cache(tokenizer, rows)
    assert stage_cache.key
    write_jsonl(Path(rows), ROWS[:50])
    with pytest.raises(DataError, match="changed while it was read"):
        stage_cache.build()
    assert make_cache(tokenizer, rows).find() is None and not stage_cache.folder.exists()


def test_cache_of_a_run_has_its_seed_and_records(tokenizer: Any) -> None:
    config = Config()
    config = config.model_copy(update={"ppo": config.ppo.model_copy(update={"reward_functions": ("x",)}), "seed": 5})
    records = {stage: StageCache.of(config, stage, tokenizer, [1]).records for stage in EVERY_STAGE}
    assert [stage for stage, kept in records.items() if kept] == ["ppo"]
    assert StageCache.of(config, "sft", tokenizer, [1]).seed == 5


_BUILD = """
import sys, time
from rlhf.config.schema import DataConfig
from rlhf.data import examples
from rlhf.data.cache import StageCache
from tests.helpers import build_tokenizer
path, marks, pause = sys.argv[1:]
encode = examples.encode_prompts
def counted(tokenizer, rows, **options):
    with open(marks, "a") as file:
        file.write(f"{len(rows)}\\n")
    time.sleep(float(pause))
    return encode(tokenizer, rows, **options)
examples.encode_prompts = counted
config = DataConfig(datasets=[{"path": path, "stages": ["sft"]}], max_prompt_length=30, max_completion_length=12)
stage_cache = StageCache(config, "sft", build_tokenizer(), 3, [1])
assert stage_cache.build(show=True) is None
train = stage_cache.load().train
assert train[0].row.response
print(len(train), "pandas" in sys.modules)
"""


def start_build(forks: Forks, rows: str, marks: Path, pause: float) -> ForkedProcess:
    variables = {"HF_DATASETS_CACHE": os.environ["HF_DATASETS_CACHE"]}
    return forks.start("-c", _BUILD, rows, str(marks), str(pause), environment=variables)


def test_parallel_builds_tokenize_once_and_survive_a_kill(forks: Forks, many: str, tmp_path: Path, home: Path) -> None:
    marks = [tmp_path / f"marks-{n}" for n in range(3)]
    killed = start_build(forks, many, marks[0], 60)
    wait_for(marks[0], killed)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert len(list(home.glob("*.partial"))) == 1 and not list(home.glob("sft-*/stage.json"))
    builds = [start_build(forks, many, mark, 1) for mark in marks[1:]]
    outputs = [process.communicate() for process in builds]
    assert [process.returncode for process in builds] == [0, 0], outputs
    assert len({output.split()[-2] for output, _ in outputs}) == 1
    tokenized = [mark.read_text().split() for mark in marks[1:] if mark.exists()]
    assert tokenized == [["1000", "150"]], "by one of the two"
    assert not list(home.glob("*.partial"))
    assert any("waiting for another run that tokenizes the same rows" in output for output, _ in outputs)
    assert not any(output.endswith("True\n") for output, _ in outputs), "pandas takes a second to import"


def test_bar_is_shown_only_while_rows_are_tokenized(tokenizer: Any, rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examples_module, "PROGRESS_MIN_ROWS", 50)
    for is_cached in (False, True):
        with console.capture() as captured:
            make_cache(tokenizer, rows).build(show=True)
        assert ("sft: tokenizing" in captured.get()) != is_cached


def test_tokenizer_that_cannot_be_written_is_an_error(
    tokenizer: Any, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "save_pretrained", raising(OSError(28, "No space left on device")))
    with pytest.raises(DataError, match=r"temporary folder \(.*No space left on device\); set TMPDIR to"):
        make_cache(tokenizer, rows).build()


def test_build_and_load_hold_no_more_than_a_batch(tokenizer: Any, rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (examples_module, cache):
        monkeypatch.setattr(module, "_BATCH", 10)
    encode, created, alive = examples_module.encode_prompts, [], []

    class Tracked(Demonstration):
        def __init__(self, *arguments: Any, **fields: Any) -> None:
            super().__init__(*arguments, **fields)
            created.append(weakref.ref(self))

    def count_alive() -> int:
        return sum(reference() is not None for reference in created)

    def counted(*arguments: Any, **options: Any) -> Any:
        alive.append(count_alive())
        return encode(*arguments, **options)

    monkeypatch.setattr(examples_module, "encode_prompts", counted)
    monkeypatch.setitem(examples_module.EXAMPLE_TYPES, "sft", Tracked)
    stage_cache = make_cache(tokenizer, rows)
    stage_cache.build()
    assert len(alive) == 7 and max(alive) <= 10
    data = stage_cache.load()
    assert count_alive() == len(data.reports) == 1, "the one that is shown"


def test_stored_rows_take_no_lists_of_tokens(tmp_path: Path) -> None:
    """As lists, their 200 tokens each are 8.5 MB of references alone."""
    row = Row((Message("user", "a"),), "a", "b", None, None, "")

    def make_example(place: int) -> Demonstration:
        return Demonstration([place] * 100, [*range(place, place + 100)], row)

    tracemalloc.start()
    try:
        writer = ExampleWriter(tmp_path / "examples.arrow", Demonstration)
        for place in range(5_000):
            writer.add(make_example(place))
        writer.close()
        stored = StoredExamples.open(tmp_path / "examples.arrow", Demonstration).select(np.arange(5_000)[::-1])
        assert all(len(example.prompt_ids) == 100 for example in stored)
        assert tracemalloc.get_traced_memory()[1] < 7e6, "a thousand at a time"
        assert tracemalloc.get_traced_memory()[0] < 1e6
    finally:
        tracemalloc.stop()
    assert stored[7] == make_example(4_992)
    assert stored.token_counts() == {"prompt": array("i", [100] * 5_000), "completion": array("i", [100] * 5_000)}
