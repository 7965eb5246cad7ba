"""Mistakes in the raw text that PPO models beside, and what the error says of each; see `tests.preflight.mistakes`."""

from __future__ import annotations

from pathlib import Path

from tests.preflight.bench import Bench, mistake, settings


def _texts(bench: Bench, column: str = "text", text: str = "red cow please") -> Path:
    return bench.jsonl(*({column: text} for _ in range(9)))


@mistake
def a_weight_of_no_text(bench: Bench) -> tuple[list[str], list[str]]:
    return settings(ppo__ptx_coef=1), ["ppo.ptx_coef: there is no text to train on; name some in data.pretraining"]


@mistake
def text_of_no_weight(bench: Bench) -> tuple[list[str], list[str]]:
    return settings(data__pretraining=_texts(bench)), ["data.pretraining: no loss uses it; set ppo.ptx_coef"]


@mistake
def missing_raw_text(bench: Bench) -> tuple[list[str], list[str]]:
    found = settings(ppo__ptx_coef=1, data__pretraining="./nope.jsonl")
    return found, ["nope.jsonl: no such file or folder; check data.pretraining"]


@mistake
def raw_text_in_another_column(bench: Bench) -> tuple[list[str], list[str]]:
    found = settings(ppo__ptx_coef=1, data__pretraining=_texts(bench, "body"))
    return found, ["rows.jsonl: no column 'text' (data.pretraining.*.text); found: body"]


@mistake
def a_column_of_no_text(bench: Bench) -> tuple[list[str], list[str]]:
    found = settings(ppo__ptx_coef=1, data__pretraining=_texts(bench, text=" "))
    return found, ["rows.jsonl: column 'text' has no text; name another"]


@mistake
def too_little_text(bench: Bench) -> tuple[list[str], list[str]]:
    found = settings(ppo__ptx_coef=1, data__pretraining=_texts(bench), ppo__ptx_length=100)
    return found, ["data.pretraining: ", "rows of 100 (ppo.ptx_length)", "needs 2 (ppo.ptx_batch_size)"]


@mistake
def raw_text_that_does_not_divide(bench: Bench) -> tuple[list[str], list[str]]:
    found = settings(ppo__ptx_coef=1, data__pretraining=_texts(bench), ppo__ptx_batch_size=3)
    return found, ["ppo.ptx_batch_size: 3 is not a multiple of ppo.micro_batch_size 2 x 1 ranks"]
