"""Preferences of a person for one of two completions, and the file that they are added to.

`rlhf label` and the page of `rlhf serve --ui` write it. A line is `{"prompt", "chosen", "rejected", "models",
"source"}`, a pair that the reward stage reads, or `{"prompt", "tie", "models", "source"}` or `{"prompt", "skip",
"models", "source"}`, which have no reply to train on. `models` has the model of each completion.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.data.formats import ColumnMapping
from rlhf.data.records import RejectedRecordError, Row, parse_record
from rlhf.errors import DataError, RunError
from rlhf.utils.atomic_io import atomic_write, refuse_link
from rlhf.utils.statistics import Interval, wilson

FIRST, SECOND, TIE, SKIP = "1", "2", "=", "s"
_KEYS = ({"prompt", "chosen", "rejected"}, {"prompt", "tie"}, {"prompt", "skip"})


@dataclass(frozen=True)
class Question:
    """Two completions of a prompt in the order in which they are shown, and the model of each."""

    row: Row
    completions: tuple[str, str]
    models: tuple[str, str]

    def answer(self, key: str) -> dict[str, Any]:
        """Return the line of the file for an answer: `FIRST`, `SECOND`, `TIE` or `SKIP`."""
        (first, second), (model, other) = self.completions, self.models
        prompt = {"prompt": write_prompt(self.row)}
        if key in (TIE, SKIP):
            name = "tie" if key == TIE else "skip"
            return {**prompt, name: [first, second], "models": [model, other], "source": self.row.source}
        if key == SECOND:
            first, second, model, other = second, first, other, model
        return {**prompt, "chosen": first, "rejected": second, "models": [model, other], "source": self.row.source}


def make_question(row: Row, completions: tuple[str, str], models: tuple[str, str], seed: int) -> Question:
    """Return a question; the seed and the prompt decide which completion is shown first."""
    if random.Random(f"label {seed} {prompt_identity(write_prompt(row))}").random() < 0.5:
        completions, models = completions[::-1], models[::-1]
    return Question(row, completions, models)


def write_prompt(row: Row) -> Any:
    """Return a row's prompt as a source has it: a text if it is read back as this row's, else its messages."""
    messages = [{"role": message.role, "content": message.content} for message in row.prompt]
    text = row.prompt[0].content
    columns = ColumnMapping(prompt="prompt", template=row.template)
    try:
        parsed = parse_record({"prompt": text}, columns, "")
    except RejectedRecordError:
        return messages
    return text if (parsed.prompt, parsed.text) == (row.prompt, row.text) else messages


def prompt_identity(prompt: Any) -> str:
    """Return what two equal prompts of files have in common."""
    return json.dumps(prompt, sort_keys=True)


class LabelFile:
    """The file of labels: those in it, and those that are added, each safe on the disk before the next question.

    A last line that an earlier program or a crash cut short is removed when the file is opened.

    Attributes:
        labels: the pairs and ties.
        skips: the questions that were skipped.

    Raises:
        DataError: the file has a line that is not a label.
        RunError: the file cannot be read or written.
    """

    def __init__(self, path: Path, option: str = "--output") -> None:
        self.path, self._option = path, option
        self.labels: list[Mapping[str, Any]] = []
        self.skips: list[Mapping[str, Any]] = []
        refuse_link(path)
        text = self._read()
        *lines, last = text.split("\n")  # not at U+2028 and the like, which JSON allows within a line
        if last and _parse_json(last) is None:
            self._write(text.removesuffix(last))
        else:
            lines.append(last)
        for number, line in enumerate(lines, 1):
            if line.strip():
                self._note(self._parse(line, number))

    def append(self, label: Mapping[str, Any]) -> None:
        """Write a label, or a question that is skipped.

        Raises:
            RunError: it cannot be written.
        """
        text = self._read()  # again, because two people may label into one file
        end = "" if text.endswith("\n") or not text else "\n"
        self._write(f"{text}{end}{json.dumps(label, ensure_ascii=False)}\n")
        self._note(label)

    def _note(self, label: Mapping[str, Any]) -> None:
        (self.skips if "skip" in label else self.labels).append(label)

    @property
    def prompts(self) -> set[str]:
        """The identities of the labelled prompts."""
        return {prompt_identity(label["prompt"]) for label in self.labels}

    @property
    def ties(self) -> int:
        """The number of labels that prefer neither completion."""
        return sum("tie" in label for label in self.labels)

    def _parse(self, line: str, number: int) -> dict[str, Any]:
        label = _parse_json(line)
        if not isinstance(label, dict) or not any(keys <= label.keys() for keys in _KEYS):
            raise DataError(
                f"{self.path}:{number}: is not a label (prompt, chosen, rejected); name another file with "
                f"{self._option}"
            )
        return label

    def _read(self) -> str:
        try:
            return self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        except OSError as error:
            raise RunError(f"{self.path}: cannot be read ({error.strerror}); choose another {self._option}") from error
        except ValueError as error:
            raise DataError(f"{self.path}: is not UTF-8; name another file with {self._option}") from error

    def _write(self, text: str) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(self.path, text)
        except OSError as error:
            reason = f"cannot be written ({error.strerror})"
            raise RunError(f"{self.path}: {reason}; choose another {self._option}") from error


def _parse_json(line: str) -> Any:
    """Return the value of a line of JSON; None if it is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


class Preference(NamedTuple):
    """The share of labels that prefer one model to another, a tie counting half, with its 95 % interval."""

    share: float
    interval: Interval
    labels: int


def count_preferences(labels: Sequence[Mapping[str, Any]], model: str, other: str) -> Preference | None:
    """Return how often `model` is preferred to `other`; None without labels of these two."""
    wins = [
        0.5 if "tie" in label else float(label["models"][0] == model)
        for label in labels
        if sorted(label.get("models") or ()) == sorted((model, other))
    ]
    return Preference(sum(wins) / len(wins), wilson(sum(wins), len(wins)), len(wins)) if wins else None
