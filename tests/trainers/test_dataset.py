"""One rank of each machine tokenizes a stage's rows, and all ranks open the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.config.schema import EVERY_STAGE, build_config
from rlhf.data import examples, load_sources
from rlhf.data.preview import describe_stage
from rlhf.runs.directory import RunDirectory
from rlhf.trainers.preflight import BaseModels, examine, look_at_data
from tests.forks import Forks

SCRIPT = """
import os, sys
from pathlib import Path
from types import SimpleNamespace
import torch.distributed as dist
from rlhf.config.schema import load_config
from rlhf.data import examples
from rlhf.engine import distributed
from rlhf.trainers.pipeline import stage_rows
from tests.helpers import build_tokenizer

rank, machine = os.environ["RANK"], {machines!r}[int(os.environ["RANK"])]
os.environ["LOCAL_RANK"] = str({machines!r}[:int(rank)].count(machine))
os.environ["LOCAL_WORLD_SIZE"] = "2"
os.environ["HF_DATASETS_CACHE"] = f"{folder}/{{machine}}"
dist.init_process_group("gloo")
tokenized, encode = [], examples.encode_prompts
examples.encode_prompts = lambda t, rows, **o: (tokenized.append(len(rows)), encode(t, rows, **o))[1]
said = []
context = SimpleNamespace(
    config=load_config(None, ["data.datasets=" + {sources!r}[int(rank)], "model.path=x"]),
    directory=SimpleNamespace(name="sft"),
    world=distributed.world(),
    say=said.append,
    run=SimpleNamespace(check_rows=lambda config, found: said.append(len(found))),
)
try:
    data = stage_rows(context, build_tokenizer(), None)
    found = [sum(tokenized), len(data.train), data.train[0].prompt_ids, said]
except Exception as error:
    found = [type(error).__name__, str(error)]
import json
Path(f"{folder}/rank{{rank}}").write_text(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
"""


def on_two_ranks(forks: Forks, folder: Path, machines: str, *rows: int) -> list[Any]:
    """The report of each rank; `machines` names the one that it is on, and `rows` how many it finds."""
    sources = []
    for number in rows:
        sources.append(str(folder / f"{number}.jsonl"))
        lines = [json.dumps({"prompt": f"{n}?", "response": "cow"}) for n in range(number)]
        Path(sources[-1]).write_text("\n".join(lines))
    script = SCRIPT.format(folder=str(folder), machines=machines, sources=(sources * 2)[:2])
    forks.ranks(2, script)
    return [json.loads((folder / f"rank{rank}").read_text()) for rank in range(2)]


def test_one_rank_tokenizes_and_both_have_its_examples(forks: Forks, tmp_path: Path) -> None:
    first, other = on_two_ranks(forks, tmp_path, "aa", 100)
    assert (first[0], other[0]) == (20, 0)
    assert first[1:3] == other[1:3] and first[1] == 19
    assert first[3][0] == 1 and len(other[3]) == 1, "the rows are compared on rank 0"
    assert len(list((tmp_path / "a" / "rlhf").glob("sft-*/stage.json"))) == 1


@pytest.mark.slow
def test_each_machine_has_a_separate_cache(forks: Forks, tmp_path: Path) -> None:
    first, other = on_two_ranks(forks, tmp_path, "ab", 100)
    assert (first[0], other[0]) == (20, 20)
    assert first[1:3] == other[1:3]
    assert [len(list((tmp_path / name / "rlhf").glob("sft-*/stage.json"))) for name in "ab"] == [1, 1]


@pytest.mark.slow
def test_each_rank_tokenizes_if_the_cache_cannot_be_written(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a file")
    first, other = on_two_ranks(forks, tmp_path, "aa", 100)
    assert (first[0], other[0]) == (20, 20) and first[1:3] == other[1:3]
    assert "note: sft: tokenized rows are not cached, and every rank tokenizes them: " in first[3][0]
    assert f"{tmp_path}/a/rlhf cannot be written (" in first[3][0]


@pytest.mark.slow
def test_machines_with_different_rows_are_refused(forks: Forks, tmp_path: Path) -> None:
    errors = on_two_ranks(forks, tmp_path, "ab", 100, 101)
    assert errors == [["DataError", errors[0][1]]] * 2
    assert errors[0][1].startswith("sft: rows, tokenizers or versions of rlhf differ between ranks; ")


def test_cached_rows_give_the_same_findings_and_are_not_read(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accelerator: Any
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "kept"))
    config = build_config(recipe | {"output": str(tmp_path / "run")})

    def describe() -> list[Any]:
        return [
            describe_stage(plan.stage, plan.data, plan.tokenizer, config) for plan in look_at_data(config, EVERY_STAGE)
        ]

    def summarize(*, whole: bool) -> list[Any]:
        findings = examine(config, EVERY_STAGE, RunDirectory(config.output), accelerator, whole=whole)
        return [dict(findings.data), *(plan.steps(config) for plan in findings.plans)]

    before = describe(), summarize(whole=True)
    assert not (tmp_path / "kept").exists(), "a look keeps nothing"
    for plan in look_at_data(config, EVERY_STAGE):
        assert BaseModels(config).cache(plan.stage, plan.bases[0]).build() is None
    for module, name in ((examples, "encode_prompts"), (load_sources, "read_records")):
        monkeypatch.setattr(module, name, lambda *words, **options: pytest.fail("read or tokenized again"))
    assert (describe(), summarize(whole=True)) == before
    assert summarize(whole=False) == before[1], "a sample is not needed"
