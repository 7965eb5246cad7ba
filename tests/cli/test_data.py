"""`rlhf data`: how rows are read, as a user sees it, and as JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlhf.cli.app import app
from tests.helpers import build_tokenizer

PAIR = {"a": "Yes.", "b": "No."}


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    """A folder with a tokenizer, and weights that nobody can load."""
    folder = tmp_path / "model"
    build_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama", "eos_token_id": 1}', encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"no weights")
    return folder


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: Path) -> Path:
    """Ten pairs for the reward model, two of which say nothing, and texts of which one is too long for SFT."""
    pairs = [PAIR | {"prompt": f"Is it {n} ?", "labels": [1, 0, 0, 1, 0, 1, 0, 1, 7, 7][n]} for n in range(10)]
    texts = [{"text": f"A cow says moo {n}."} for n in range(9)] + [{"text": "x" * 99}]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs), encoding="utf-8")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts), encoding="utf-8")
    settings = {
        "model": {"path": "./model"},
        "data": {
            "max_prompt_length": 24,
            "max_completion_length": 16,
            "heldout_fraction": 0.2,
            "datasets": [
                {
                    "path": "./pairs.jsonl",
                    "stages": ["reward", "ppo"],
                    "columns": {"first": "a", "second": "b"},
                    "prefer": {"label": "labels", "first": 1, "second": 0},
                },
                {"path": "./texts.jsonl", "stages": ["sft"], "columns": {"text": "text"}},
            ],
        },
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(settings), encoding="utf-8")
    return path


def run(*arguments: object) -> str:
    """Standard output of `rlhf data`."""
    done = CliRunner().invoke(app, ["data", *map(str, arguments)], env={"COLUMNS": "100"})
    assert done.exit_code == 0, done.output + str(done.exception)
    return done.stdout


def test_stage_shows_its_rows_lengths_and_an_example(recipe: Path) -> None:
    (reward,) = json.loads(run("--config", recipe, "--stage", "reward", "--json"))
    (source,) = reward.pop("sources")
    assert reward == {
        "stage": "reward",
        "prompts": "template",
        "split": {"sft": 2.0, "reward": 4.0, "ppo": 4.0},
        "train": source["train"],
        "heldout": source["heldout"],
    }
    assert source["read_as"] == ("prompt: prompt, first: a, second: b, preferred: labels (first if 1, second if 0)")
    assert source["rows"] == 10 and source["share"] == 5
    unsaid = sum(dropped["rows"] for dropped in source["dropped"])
    assert source["train"] + source["heldout"] + unsaid == 5
    assert {dropped["reason"] for dropped in source["dropped"]} <= {"no preference: the label matches neither reply"}
    assert set(source["tokens"]) == {"prompt", "chosen", "rejected"}
    assert set(source["tokens"]["prompt"]) == {"p50", "p90", "p99", "max"}
    prompt, chosen, rejected = source["example"]["parts"]
    assert re.fullmatch(r"<user>Is it \d \?<eos><assistant>", prompt["text"]) and not prompt["in_loss"]
    assert {chosen["text"], rejected["text"]} == {"Yes.<eos>", "No.<eos>"} and chosen["in_loss"]
    assert "".join(chosen["tokens"]) == chosen["text"] and chosen["tokens"][-1] == "<eos>"
    number = int(re.findall(r"\d", prompt["text"])[0])
    assert source["example"]["row"] == f"pairs.jsonl:{number + 1}"
    assert chosen["text"] == ("Yes.<eos>" if number in (0, 3, 5, 7) else "No.<eos>"), "what the label says"


def test_percentiles_cover_the_used_rows(tmp_path: Path, recipe: Path) -> None:
    """With a token a letter, lengths are counted by hand: texts of 1 to 100 letters and their end."""
    from rlhf.data.toy_world import build_tokenizer

    build_tokenizer([], vocab_size=261).save_pretrained(tmp_path / "model")
    rows = [{"text": "x" * n} for n in range(1, 101)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    limits = "--set", "data.max_completion_length=200"
    (sft,) = json.loads(run("--config", recipe, "--stage", "sft", "--json", *limits))
    assert sft["sources"][0]["tokens"] == {
        "prompt": {"p50": 0, "p90": 0, "p99": 0, "max": 0},
        "completion": {"p50": 51, "p90": 91, "p99": 100, "max": 101},
    }


def test_text_has_the_facts_of_the_json_and_nothing_is_written(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fixture's weights cannot be loaded."""
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    shown = " ".join(run("--config", recipe).split())
    assert sorted(tmp_path.rglob("*")) == before
    for words in (
        "supervised fine-tuning 7 rows for training, 2 held out",
        "read as text: text",
        "share all of its 10 rows left out",
        "left out 1 completion too long (first: texts.jsonl:10); raise data.max_completion_length",
        "(at most 40)",
        "<eos> [learned]",
        "reward model",
        "read as prompt: prompt, first: a, second: b, preferred: labels (first if 1, second if 0)",
        "tokens ... ",
        "'<assistant>' | '",
        "'<eos>'",
        "PPO",
    ):
        assert words in shown, f"{words!r} is not in {shown}"


@pytest.mark.parametrize("loss", ["completion", "all"])
def test_learned_parts_are_marked(tmp_path: Path, recipe: Path, loss: str) -> None:
    rows = "".join(json.dumps({"prompt": f"p {n}", "response": "r"}) + "\n" for n in range(9))
    (tmp_path / "texts.jsonl").write_text(rows, encoding="utf-8")
    settings = ["--set", f"sft.loss_on={loss}", "--set", "data.datasets.1.columns={}"]
    (sft,) = json.loads(run("--config", recipe, "--stage", "sft", "--json", *settings))
    learned = [part["in_loss"] for part in sft["sources"][0]["example"]["parts"]]
    assert learned == [loss == "all", True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stage", "kto"], "--stage: no stage 'kto'; use some of sft, reward, dpo, ppo"),
        (["--set", "data.datasets.0.prefer="], "prefer=: missing; set prefer.label or"),
        (["--set", "data.datasets.0.columns.first=c"], "no column 'c' (columns.first)"),
        (["--set", "model.path=./nothing"], "nothing"),
        (["--set", "data.max_prompt_length=1", "--stage", "ppo"], "ppo: .* no usable row"),
    ],
)
def test_mistake_is_one_line(tmp_path: Path, recipe: Path, arguments: list[str], message: str) -> None:
    from rlhf.errors import RLHFError

    done: Any = CliRunner().invoke(app, ["data", "--config", str(recipe), *arguments])
    assert isinstance(done.exception, RLHFError) and done.exception.exit_code == 2
    text = str(done.exception)
    assert "\n" not in text and re.search(message if ".*" in message else re.escape(message), text), text


def test_embedded_example_needs_no_recipe() -> None:
    (ppo,) = json.loads(run("--stage", "ppo", "--json", "--set", "data.datasets.0.limit=2000"))
    assert ppo["sources"][0]["source"] == "world" and ppo["train"] > 100
