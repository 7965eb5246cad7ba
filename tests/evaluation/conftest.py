"""Tiny models of several families with their tokenizer, and the CPU as a place to evaluate them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from rlhf.evaluation.models import EvaluationDevice
from tests.trainers.test_keys import table


@pytest.fixture
def device(accelerator: Any) -> EvaluationDevice:
    """In fp32 and with the backend's own padding."""
    return EvaluationDevice(accelerator, accelerator.precision("fp32"), accelerator.shape_policy())


def by_transformers(model: Any, tokenizer: Any, prompt: str, reply: str) -> float:
    """The score of one conversation, written by the tokenizer's own template, without padding."""
    import torch

    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]
    ids = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=True)["input_ids"]
    with torch.no_grad():
        return float(model(ids).logits[0, 0])


def reward_model(folder: Path, tokenizer: Any, family: str = "llama", outputs: int = 1) -> Any:
    """A sequence classifier of plain transformers whose scores differ, saved; `folder` holds the tokenizer too."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForSequenceClassification

    from tests.models.test_deepspeed_chat import FAMILIES

    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    config = CONFIG_MAPPING[family](vocab_size=len(tokenizer), **FAMILIES[family], **ids, num_labels=outputs)
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


@pytest.fixture(scope="session")
def judge_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> tuple[Path, Any]:
    """A reward model's folder, and the model as plain transformers has it."""
    folder = tmp_path_factory.mktemp("judge") / "tiny-judge"
    return folder, reward_model(folder, tokenizer)


Evaluate = Callable[..., Result]


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch) -> Evaluate:
    """`rlhf evaluate`, in this process, on the CPU in float32."""
    from rlhf.cli.app import app

    monkeypatch.setenv("RLHF_ACCELERATOR", "cpu")

    def run(*arguments: object, given: str | None = None) -> Result:
        line = ["evaluate", *map(str, arguments), "--precision", "fp32"]
        return CliRunner().invoke(app, line, input=given)

    return run


def printed_json(done: Result) -> Any:
    """The JSON that a command has printed."""
    assert done.exit_code == 0, done.exception or done.output
    return json.loads(done.stdout)


def lines(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def documented_keys(kind: str) -> set[str]:
    """The keys of a model's numbers, by docs/metrics.md."""
    return {key for named, key, _ in table("`rlhf evaluate`") if named == kind}
