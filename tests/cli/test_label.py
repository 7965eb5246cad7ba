"""`rlhf label` in a terminal, with keys that a script presses; its labels train a reward model."""

from __future__ import annotations

import json
import os
import pty
import sys
import termios
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

from rlhf.cli import label as labelling
from rlhf.cli.app import app
from rlhf.errors import RLHFError
from rlhf.evaluation.labels import Question
from rlhf.utils.printable import make_printable
from tests.helpers import WORDS, build_tokenizer, llama

LEGEND = b"q: quit"


def save_writer(folder: Path, seed: int) -> Path:
    """Save a model whose completions differ from those of other seeds."""
    tokenizer = build_tokenizer()
    model = llama(len(tokenizer), seed=seed, tie_word_embeddings=False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("writers")
    return save_writer(root / "a", 1), save_writer(root / "b", 2)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("".join(f"{first} {second}\n" for first in WORDS[:6] for second in WORDS[:6]))
    return path


class Rater:
    """A terminal, and someone at it who presses keys at each question, and `q` when these are used up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ours, theirs = pty.openpty()
        self._monkeypatch = monkeypatch
        self.stdin, self.stdout = os.fdopen(theirs, "r", closefd=False), os.fdopen(theirs, "w")
        self.seen = b""

    def run(self, keys: list[bytes], *arguments: object) -> str:
        """Run `rlhf label` and return what the terminal showed."""
        self.seen = b""
        before = termios.tcgetattr(self.stdin)
        thread = threading.Thread(target=self._press, args=(keys,), daemon=True)
        with self._monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", self.stdin)
            patch.setattr(sys, "stdout", self.stdout)
            thread.start()
            try:
                line = ["label", *map(str, arguments), "--precision", "fp32", "--accelerator", "cpu"]
                get_command(app).main(line, prog_name="rlhf", standalone_mode=False)
            finally:
                self.stdout.write("\0")
                self.stdout.flush()
                thread.join(20)
        assert termios.tcgetattr(self.stdin) == before, "the terminal is left in another mode"
        return self.seen.decode(errors="replace")

    def _press(self, keys: list[bytes]) -> None:
        waiting, questions = iter(keys), 0
        while not self.seen.endswith(b"\0"):
            self.seen += os.read(self._ours, 4096)
            while self.seen.count(LEGEND) > questions:
                questions += 1
                os.write(self._ours, next(waiting, b"q"))


@pytest.fixture
def rater(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Rater:
    monkeypatch.chdir(tmp_path)
    return Rater(monkeypatch)


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> list[Question]:
    """The questions that are shown."""
    shown: list[Question] = []
    show: Callable[[Question, str], None] = labelling._show

    def note(question: Question, place: str) -> None:
        shown.append(question)
        show(question, place)

    monkeypatch.setattr(labelling, "_show", note)
    return shown


def read_labels(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_keys_choose_tie_skip_and_quit(
    rater: Rater, questions: list[Question], writers: tuple[Path, Path], prompts: Path, tmp_path: Path
) -> None:
    options = ["--prompts", prompts, "--max-tokens", 4, "--limit", 8]
    screen = rater.run([b"1", b"2", b"=", b"s", b"1", b"q"], *writers, *options)
    labels = read_labels(tmp_path / "labels.jsonl")
    assert len(questions) == 6 and len(labels) == 4
    expected = []
    for place, chosen in ((0, 0), (1, 1), (2, None), (4, 0)):
        question = questions[place]
        expected.append({"prompt": question.row.text, "source": question.row.source})
        if chosen is None:
            expected[-1] |= {"tie": list(question.completions), "models": list(question.models)}
        else:
            order = (chosen, 1 - chosen)
            expected[-1] |= dict(zip(("chosen", "rejected"), (question.completions[index] for index in order)))
            expected[-1]["models"] = [question.models[index] for index in order]
    assert labels == expected
    for question in questions:
        assert (
            make_printable(question.completions[0].split()[0]) in screen
            and "writers" not in screen.split(LEGEND.decode(), 1)[1].split("labels.jsonl:")[0]
        )
    assert "4 labels, 3 pairs and 1 tie" in " ".join(screen.split())
    asked = [question.row.text for question in questions]
    questions.clear()
    again = rater.run([b"2"] * 8, *writers, *options)  # the skipped one, the one of the key q, and two more
    assert {question.row.text for question in questions} >= {asked[3], asked[5]}
    assert len(questions) == 4 and len(read_labels(tmp_path / "labels.jsonl")) == 8
    assert len({label["prompt"] for label in read_labels(tmp_path / "labels.jsonl")}) == 8
    assert "8 labels" in again
    assert "all prompts are labelled in labels.jsonl; raise --limit" in " ".join(
        rater.run([], *writers, *options).split()
    )


def test_keys_without_a_meaning_are_ignored(
    rater: Rater, writers: tuple[Path, Path], prompts: Path, tmp_path: Path
) -> None:
    """Ctrl and an arrow key send a 1 among other bytes; Ctrl-D quits."""
    options = ["--prompts", prompts, "--max-tokens", 4, "--limit", 3]
    screen = rater.run(
        [b"\x1b[1;5Cx\x1b2", b"\x1b[1;5C\x1bO1\x041"], writers[0], *options, "--output", "deep/mine.jsonl"
    )
    assert screen.count(LEGEND.decode()) == 2
    (label,) = read_labels(tmp_path / "deep" / "mine.jsonl")
    assert "chosen" in label


def test_quitting_without_a_label_leaves_no_file(
    rater: Rater, writers: tuple[Path, Path], prompts: Path, tmp_path: Path
) -> None:
    screen = rater.run([b"s", b"q"], writers[0], "--prompts", prompts, "--max-tokens", 4, "--limit", 3)
    assert "0 labels" in screen and not (tmp_path / "labels.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["A", "--temperature", "0"], "--temperature 0: both completions of one model are equal; raise it, or name"),
        (["A", "B", "A"], ": expected one or two models, got 3; name at most two"),
        (["A", "A", "--prompts", "PROMPTS"], r"is the same model as .*; name each model once"),
        (["A", "--output", "."], r"\.: is a folder; name a file with --output"),
        (["A"], "--prompts: missing, and none of the models is of a run"),
    ],
)
def test_mistake_is_one_line(
    rater: Rater, writers: tuple[Path, Path], prompts: Path, arguments: list[str], message: str
) -> None:
    names = {"A": writers[0], "B": writers[1], "PROMPTS": prompts}
    with pytest.raises(RLHFError, match=message):
        rater.run([], *(names.get(word, word) for word in arguments))


def test_pipe_is_refused_in_one_line(writers: tuple[Path, Path]) -> None:
    done = CliRunner().invoke(app, ["label", str(writers[0])], input="1\n")
    assert str(done.exception) == (
        "rlhf label: asks in a terminal, and its input or output is not one; start it in a terminal"
    )


def test_labels_train_a_reward_model_that_agrees_with_them(
    rater: Rater,
    writers: tuple[Path, Path],
    prompts: Path,
    model_folder: Path,
    tmp_path: Path,
    rlhf: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Label, train, evaluate; the rater always prefers the second model, which is shown in either place."""
    preferred: list[str] = []

    def press(question: Question, place: str) -> None:
        preferred.append("12"[question.models.index(str(writers[1]))])

    monkeypatch.setattr(labelling, "_show", press)
    monkeypatch.setattr(labelling, "_read_key", lambda: preferred[-1])
    screen = rater.run([], *writers, "--prompts", prompts, "--max-tokens", 6, "--temperature", 0)
    labels = read_labels(tmp_path / "labels.jsonl")
    assert {label["models"][0] for label in labels} == {str(writers[1])} and len(labels) > 25
    assert min(Counter(preferred).values()) > 5, "the order is not shuffled"
    assert f"is preferred to {writers[0]} for 100.0%" in " ".join(screen.replace("\r\n", "").split())
    with (tmp_path / "labels.jsonl").open("a") as file:  # a tie is not trained on
        file.write(json.dumps({"prompt": "tie", "tie": ["x", "y"], "models": ["a", "b"]}) + "\n")
    run = tmp_path / "run"
    keys = ["data.datasets=labels.jsonl", "data.stage_split=0:1:0", "reward.max_steps=20"]
    keys += [f"reward.model={model_folder}", "reward.optimizer.learning_rate=3e-3"]
    done = rlhf("reward", "--output", run, *(word for key in keys for word in ("--set", key)))
    assert "1 no preference" in done.stdout + done.stderr
    summary = json.loads((run / "reward" / "stage.json").read_text())
    assert summary["after"]["loss"] < 0.6, "held-out labels are hardly better predicted than by chance (0.693)"
