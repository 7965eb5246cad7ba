"""The line about a run's base models; tests/preflight covers the tables of a dry run."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlhf.config.schema import STAGES, Stage, load_config
from rlhf.data.stage_dataset import load_stage
from rlhf.errors import OutOfMemory
from rlhf.memory.report import StartPlan
from rlhf.trainers.preflight import Findings, StagePlan
from rlhf.trainers.run import _print_plans, format_base_models, print_stage

WORLD = "embedded tiny Llama, from scratch"
AT = "model.path=gpt2"
NAMED = ("ppo.actor=org/a", "ppo.reward_model=./b")


@pytest.mark.parametrize(
    ("pending", "settings", "line"),
    [
        (STAGES, (), WORLD),
        (("sft",), (), WORLD),
        (STAGES, (AT,), "gpt2"),
        (("sft",), (AT, *NAMED), "gpt2"),
        (STAGES, (AT, "reward.model=org/r"), "gpt2, org/r (reward.model)"),
        (STAGES, NAMED, f"{WORLD}, org/a (ppo.actor), ./b (ppo.reward_model)"),
        (("reward",), (AT,), "this run's sft model"),
        (("reward", "ppo"), (AT,), "this run's sft model"),
        (("ppo",), (), "this run's sft model, this run's reward model"),
        (("ppo",), (AT, NAMED[1]), "this run's sft model, ./b (ppo.reward_model)"),
        (("ppo",), NAMED, "org/a (ppo.actor), ./b (ppo.reward_model)"),
        (("reward", "ppo"), (*NAMED, "reward.model=r"), "r (reward.model), org/a (ppo.actor), ./b (ppo.reward_model)"),
    ],
)
def test_base_models_of_a_run_are_those_of_its_stages(
    pending: tuple[Stage, ...], settings: tuple[str, ...], line: str
) -> None:
    assert format_base_models(load_config(None, settings), pending) == line


def test_text_without_a_prompt_may_fill_both_limits(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "rows.csv").write_text("text\n" + "".join(f"word {n}\n" for n in range(40)))
    source = f"data.datasets=[{{path: {tmp_path / 'rows.csv'}, columns: {{text: text}}, stages: [sft]}}]"
    config = load_config(None, [source, "data.max_prompt_length=30", "data.max_completion_length=17"])
    data = load_stage(config.data, "sft", tokenizer, seed=0)
    shown = StringIO()
    print_stage(StagePlan("sft", (), None, tokenizer, data), config, [], Console(width=120, file=shown))
    assert "(at most 47)" in shown.getvalue() and "(at most 17)" not in shown.getvalue()


def test_dry_run_fails_if_the_run_would_be_refused(
    monkeypatch: pytest.MonkeyPatch, accelerator: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(None, ())
    plan = StagePlan("sft", (), None, tokenizer, load_stage(config.data, "sft", tokenizer, seed=0))
    start = StartPlan(lines=["sft: plan: will hardly fit"], refusal="sft: too little memory")
    monkeypatch.setattr("rlhf.memory.report.plan_next_stage", lambda *args, **options: start)
    with pytest.raises(OutOfMemory, match="too little memory"):
        _print_plans(config, Findings((plan,), {}, {}, {}), accelerator, 1)
    shown = capsys.readouterr().out
    assert "will hardly fit" in shown and "nothing found" not in shown
