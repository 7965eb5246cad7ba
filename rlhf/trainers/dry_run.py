"""The preview of a run: one line about the models that it starts from, and the tables of `--dry-run`.

A table shows a stage's models, its rows, their lengths, and one row as the model sees it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlhf.config.schema import Config, Stage
from rlhf.data.preview import decode_median_row, list_loss_parts, summarize_lengths
from rlhf.data.report import format_reports
from rlhf.data.tokenize_rows import max_completion_tokens
from rlhf.reporting.summary import STAGE_NAMES
from rlhf.roles.lineage import base_models

if TYPE_CHECKING:
    from rlhf.roles.lineage import ResolvedBaseModel
    from rlhf.trainers.preflight import StagePlan

_EMBEDDED = "embedded tiny Llama, from scratch"


def format_base_models(config: Config, pending: Sequence[Stage]) -> str:
    """Return one line about the models that `pending` stages start from, except models that they train."""
    models = []
    for ref in (ref for stage in pending for ref in base_models(config, stage)):
        if named := ref.named_in(config):
            models.append(named if ref.key == "model.path" else f"{named} ({ref.key})")
        elif ref.trained_by is None:
            models.append(_EMBEDDED)
        elif ref.trained_by not in pending:
            models.append(f"this run's {ref.trained_by} model")
    return ", ".join(dict.fromkeys(models))


def print_stage(plan: StagePlan, config: Config, memory: Sequence[str], console: Console) -> None:
    """Print what a stage will do.

    Args:
        plan: the stage's findings of preflight, with all of its rows.
        memory: lines about the memory that the stage will take.
    """
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for base in plan.bases:
        table.add_row(base.ref.key, Text(_format_base(base)))
    if plan.parameters is not None:
        table.add_row("parameters", f"{plan.parameters:,} in {plan.bases[0].ref.key}")
    for line in format_reports(plan.data.reports):
        table.add_row("rows", Text(line.removeprefix(f"{plan.stage}: ")))
    table.add_row("steps", _format_steps(plan, config))
    for line in memory:
        table.add_row("memory", Text(line.removeprefix(f"{plan.stage}: plan: ")))
    completion = max(max_completion_tokens(row.row, row.prompt_ids, config.data) for row in plan.data.train)
    limits = {"prompt": config.data.max_prompt_length}
    for part, (median, high, longest) in summarize_lengths(plan.data).items():
        allowed = limits.get(part, completion)
        table.add_row(f"{part} tokens", f"median {median}, 95 % up to {high}, longest {longest} (at most {allowed})")
    in_loss = list_loss_parts(plan.data, loss_on=config.sft.loss_on)
    for part, text in decode_median_row(plan.data, plan.tokenizer):
        table.add_row(f"example {part}", Text.assemble(text, ("  (in the loss)" if part in in_loss else "", "dim")))
    console.print()
    console.print(Text(STAGE_NAMES[plan.stage], style="bold"))
    console.print(table)


def _format_base(base: ResolvedBaseModel) -> str:
    path = base.path or _EMBEDDED
    return f"{path}, after {' and '.join(base.through)} of this run" if base.through else path


def _format_steps(plan: StagePlan, config: Config) -> str:
    if plan.stage == "ppo":
        rows, group = config.ppo.batch_size, config.ppo.method.group_size
        rollouts = f"{plan.steps(config):,} rollouts of {rows // group} prompts"
        return rollouts if group == 1 else f"{rollouts}, {group} completions of each"
    section = config.supervised(plan.stage)
    return f"{plan.steps(config):,} of {section.batch_size} {'rows' if plan.stage == 'sft' else 'pairs'}"
