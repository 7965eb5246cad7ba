"""Model cards: their YAML, their numbers, and code that loads the model from the folder of the card."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf.diagnosis.records import read_run
from rlhf.report.card import write_cards
from rlhf.reporting.recorder import Recorder
from rlhf.utils.manifest import find_damage
from tests.diagnosis.records import write_run


def parts(card: Path) -> tuple[dict[str, Any], str]:
    _, front, text = card.read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(front), text


@pytest.mark.parametrize(("stage", "tag"), [("sft", "text-generation"), ("reward", None), ("ppo", "text-generation")])
def test_card_has_metadata_and_numbers_of_its_stage(finished_run: Path, stage: str, tag: str | None) -> None:
    metadata, text = parts(finished_run / stage / "model/README.md")
    assert metadata["library_name"] == "transformers" and metadata["tags"] == ["rlhf", stage]
    assert metadata.get("pipeline_tag") == tag
    summary = json.loads((finished_run / stage / "stage.json").read_text())
    rows = dict(re.findall(r"^\| ([a-z_0-9 ]+?) \| [^|]* \| ([^|]*) \|$", text, re.MULTILINE))
    assert set(rows) - {"number"} == {name.replace("_", " ") for name in summary["after"]}
    name, value = next(iter(summary["after"].items()))
    shown = rows[name.replace("_", " ")]
    assert float(shown.strip("%").replace(",", "")) == pytest.approx(100 * value if "%" in shown else value, rel=5e-3)


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_code_of_the_card_loads_the_model_next_to_it(
    finished_run: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, text = parts(finished_run / stage / "model/README.md")
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code
    monkeypatch.chdir(finished_run / stage / "model")
    names: dict[str, Any] = {}
    exec(code[1], names)
    assert sum(parameter.numel() for parameter in names["model"].parameters()) > 1000 and len(names["tokenizer"]) > 10


def test_card_names_the_stage_that_the_model_started_from(finished_run: Path) -> None:
    assert "from this run's `sft` model" in parts(finished_run / "ppo/model/README.md")[1]
    text = parts(finished_run / "ppo/critic/README.md")[1]
    assert "start its critic from this folder" in text and "from this run's `reward` model" in text


def test_card_names_no_folder_of_this_machine(finished_run: Path) -> None:
    """Cards are published with their models."""
    for card in finished_run.rglob("README.md"):
        metadata, text = parts(card)
        assert "base_model" not in metadata and str(finished_run.parent) not in text
        assert not re.search(r"(?<![\w.])/(?:tmp|home|root|work)\b", text), card


def test_card_keeps_the_instructions_for_a_model_without_a_class(finished_run: Path, tmp_path: Path) -> None:
    """`rlhf.models.scalar_head.write_readme` has written how to compute its scores."""
    run = read_run(Path(shutil.copytree(finished_run, tmp_path / "run")))
    stage = next(one for one in run.stages if one.name == "reward")
    card = stage.directory.model / "README.md"
    card.write_text("# A reward model that plain transformers has no class for\n\ncompute it so\n", encoding="utf-8")
    write_cards(run.path, "reward")
    metadata, text = parts(card)
    assert metadata["tags"] == ["rlhf", "reward"] and text.endswith("## Use\n\ncompute it so\n")


def test_card_is_no_damage_to_the_model(finished_run: Path) -> None:
    assert not find_damage(finished_run / "ppo/model", lambda name: True)


def test_card_names_sources_and_rows_without_folders(tmp_path: Path) -> None:
    config = {"output": str(tmp_path / "run")}
    state = (
        f"step 2 is left out: the first are in the loss; their rows are in {tmp_path}/run/sft/not-finite/step-2.json"
    )
    run = write_run(tmp_path / "run", {"sft": {"loss": [2.0, 1.0]}}, settings=config)
    with Recorder(run.stages[0].directory, resume_step=2) as recorder:
        recorder.text("warning", 2, state, {"rule": "left-out step", "state": state})
    description = json.loads((tmp_path / "run/run.json").read_text())
    hub = "org/name (split train, revision refs/convert/parquet)"
    names = {
        f"{tmp_path}/rows.jsonl (limit 5, template Human: {{prompt}}\n`a/b`)": (
            "rows.jsonl (limit 5, template Human: {prompt} 'a/b')"
        ),
        hub: hub,
        "world": "world",
    }
    description["data"] = {name: {"rows": 3, "digest": "0"} for name in names}
    (tmp_path / "run/run.json").write_text(json.dumps(description))
    run.stages[0].directory.finish({"stage": "sft", "steps": 2})
    (tmp_path / "run/sft/model").mkdir()
    write_cards(tmp_path / "run", "sft")
    _, text = parts(tmp_path / "run/sft/model/README.md")
    assert re.findall(r"^- data: `(.*)`, 3 rows$", text, re.MULTILINE) == list(names.values())
    assert "their rows are in sft/not-finite/step-2.json" in text and str(tmp_path) not in text
