"""CSV: one row for each step with every number of it, and one for each held-out row of each evaluation."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from rlhf.diagnosis.records import read_run
from rlhf.errors import RunError
from rlhf.export.formats import export_run
from rlhf.export.tables import format_tables
from tests.export.conftest import PPO, PROMPTS, ROWS, SFT, write_lines


def parse(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


def test_each_stage_has_its_tables(run: Path) -> None:
    assert list(format_tables(read_run(run))) == ["sft.csv", "ppo.csv", "ppo-heldout.csv"]


def test_row_of_a_step_has_every_number_of_it(run: Path) -> None:
    tables = format_tables(read_run(run))
    for name, records in (("sft.csv", SFT), ("ppo.csv", PPO)):
        truth: dict[int, dict[str, float]] = {}
        for record in records:
            if "tag" not in record:
                values = {key: value for key, value in record.items() if key not in ("stage", "time", "step")}
                truth.setdefault(record["step"], {}).update(
                    {key: value for key, value in values.items() if value is not None}
                )
        rows = {
            int(row["step"]): {key: float(cell) for key, cell in row.items() if key != "step" and cell}
            for row in parse(tables[name])
        }
        assert rows == truth and list(rows) == sorted(truth)


def test_columns_are_in_the_order_of_the_records(run: Path) -> None:
    header, *lines = format_tables(read_run(run))["sft.csv"].splitlines()
    assert header == "step,heldout_perplexity,loss,tokens,grad_norm,seconds"
    assert lines == ["0,700.5,,,,", "1,,6.25,512,,", "2,111.1,5.125,480,1.5,0.1"]


def test_heldout_table_has_each_row_of_each_evaluation_with_its_prompt(run: Path) -> None:
    rows = parse(format_tables(read_run(run))["ppo-heldout.csv"])
    assert [(row["step"], row["row"]) for row in rows] == [("0", "0"), ("0", "1"), ("3", "0"), ("3", "1")]
    assert [row["prompt"] for row in rows] == PROMPTS * 2
    truth = [row for step in ROWS for row in ROWS[step]]
    assert [row["completion"] for row in rows] == [row["completion"] for row in truth]
    assert [row["reward"] for row in rows] == [str(row["reward"]) for row in truth]
    assert [row["kl"] for row in rows] == ["0.0", "0.0", "0.75", ""]
    assert [row["approved"] for row in rows] == ["true", "false", "true", "true"]


def test_numbers_have_every_digit(run: Path) -> None:
    write_lines(run / "sft/metrics.jsonl", [{"stage": "sft", "step": 1, "time": 0.0, "loss": 0.1 + 0.2, "kl": 5e-324}])
    [row] = parse(format_tables(read_run(run))["sft.csv"])
    assert (float(row["loss"]), float(row["kl"])) == (0.1 + 0.2, 5e-324)


@pytest.mark.parametrize("name", ["export", "export/inspect"])
def test_export_does_not_follow_a_link_in_the_folder(run: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match=f"{name}: is a link to .*, and runs do not write through links"):
        export_run(read_run(run), "inspect" if "inspect" in name else "csv")
    assert not list((tmp_path / "elsewhere").iterdir())
