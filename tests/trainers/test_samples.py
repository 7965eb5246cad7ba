"""Samples of a rollout that PPO prints: whole words, no commands to the terminal."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from rlhf.trainers.ppo.metrics import RolloutSample, escape_text, render_sample, token_texts
from tests.helpers import models_of, sets, user_environment


def printed(sample: RolloutSample, **options: Any) -> str:
    file = io.StringIO()
    Console(file=file, width=60, **options).print(render_sample(sample, "ppo: step 20"))
    return file.getvalue()


def test_sample_shows_prompt_completion_and_score() -> None:
    lines = printed(RolloutSample("What is red?", "The plum is.", 1.25, 0.5, 4)).splitlines()
    assert [re.sub(r" {2,}", " | ", line.strip()) for line in lines] == [
        "prompt | What is red?",
        "completion | The plum is.",
        "ppo: step 20 | score 1.25, KL 0.5, 4 tokens",
    ]


def test_texts_are_no_markup_and_no_terminal_commands() -> None:
    text = "[bold]no[/] \x1b[2J\x07\r\x9b31m \u202e \ud800 :smile: [link=http://x]"
    output = printed(RolloutSample(text, "", 0, 0, 0), force_terminal=True, color_system=None)
    for part in ("[bold]no[/]", r"\x1b[2J\x07\r\x9b31m", r"\u202e", r"\ud800", ":smile:"):
        assert part in output
    assert not set(output) & set("\x1b\x07\r\x9b\u202e") and "(empty)" in output


def test_a_log_file_gets_no_colours() -> None:
    assert "\x1b" not in printed(RolloutSample("a", "b", 1, 2, 3))
    assert "\x1b" in printed(RolloutSample("a", "b", 1, 2, 3), force_terminal=True, color_system="standard")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Grüße, 牛 👩‍🚀\n\tx", "Grüße, 牛 👩‍🚀\n\tx"),
        ("a\n\n\n\n\nb", "a\n\nb"),
        ("0123456789" * 3, "01234 [... 20 characters ...] 56789"),
        ("0123456789", "0123456789"),
    ],
)
def test_a_text_stays_readable(text: str, expected: str) -> None:
    assert escape_text(text, 10 if "0" in text else 100) == expected


def test_samples_stand_in_a_log_and_among_the_records(rlhf: Any, finished_run: Path, tmp_path: Path) -> None:
    keys = ("ppo.steps=4", "ppo.samples_every=2", "ppo.samples=2", f"output={tmp_path}")
    output = rlhf("ppo", *sets(*models_of(finished_run), *keys)).stdout
    shown_numbers = re.findall(r"^ppo: step (\d) +score (\S+), KL (\S+), (\d+) tokens", output, re.M)
    records = [json.loads(line) for line in (tmp_path / "ppo" / "metrics.jsonl").read_text().splitlines()]
    texts = [record for record in records if record.get("tag", "").startswith("sample_")]
    assert [(record["step"], record["tag"]) for record in texts] == [
        (step, f"sample_{number}") for step in (2, 4) for number in (0, 1)
    ]
    assert [step for step, *_ in shown_numbers] == ["2", "2", "4", "4"]
    for (_, score, kl, tokens), record in zip(shown_numbers, texts, strict=True):
        assert record["text"].endswith(f"\nscore {score}, KL {kl}, {tokens} tokens")


@pytest.mark.slow
def test_samples_and_evaluations_are_above_the_progress_bar(rlhf: Any, finished_run: Path, tmp_path: Path) -> None:
    import pty

    settings = sets(*models_of(finished_run), "ppo.eval_every=2", f"output={tmp_path}")
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(user_environment())
        os.execv(sys.executable, [sys.executable, "-m", "rlhf", "ppo", "--config", str(rlhf.recipe), *settings])
    seen = SimpleNamespace(output=b"")
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:
            break
        if not part:
            break
        seen.output += part
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.output.decode(errors="replace"))
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", text)]
    for step in (1, 2, 3):  # steps / 10 is less than one
        assert any(re.match(rf"ppo: step {step} +score \S+, KL \S+, \d+ tokens$", line) for line in lines)
    assert any(re.match(r"ppo: after step 2: reward \S+ \(before \S+\), kl ", line) for line in lines)


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8 and 256, which has no text; it omits a space at the start."""

    def decode(self, ids: list[int], **options: Any) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace").removeprefix(" ")


@pytest.mark.parametrize("text", ["a b", "é, 牛", "x\ufffdy and more", "😀"])
def test_texts_of_tokens_are_the_text_together(text: str) -> None:
    assert "".join(token_texts(Bytes(), list(text.encode()))) == text


def test_token_without_text_loses_no_space_of_the_next() -> None:
    assert token_texts(Bytes(), [*b"a", 256, *b" b"]) == ["a", "", " ", "b"]


def test_text_that_ends_within_a_character_is_complete() -> None:
    ids = list("a牛".encode())[:-1]
    texts = token_texts(Bytes(), ids)
    assert len(texts) == len(ids) and "".join(texts) == "a\ufffd"
