"""What a run will do: in one line the models that it starts from, and what `--dry-run` shows.

That is for each stage its models, its rows, their lengths, and one row as the model sees it.
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


def models(config: Config, pending: Sequence[Stage]) -> str:
    """What the `pending` stages of a run start from, in one line; not what they hand on to each other."""
    found = []
    for ref in (ref for stage in pending for ref in base_models(config, stage)):
        if named := ref.named_in(config):
            found.append(named if ref.key == "model.path" else f"{named} ({ref.key})")
        elif ref.trained_by is None:
            found.append(_EMBEDDED)
        elif ref.trained_by not in pending:
            found.append(f"this run's {ref.trained_by} model")
    return ", ".join(dict.fromkeys(found))


def print_plan(plan: StagePlan, config: Config, memory: Sequence[str], console: Console) -> None:
    """Print what a stage will do; `plan.data` holds all of its rows, `memory` says what it will take."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for base in plan.bases:
        table.add_row(base.ref.key, Text(_origin(base)))
    if plan.parameters is not None:
        table.add_row("parameters", f"{plan.parameters:,} in {plan.bases[0].ref.key}")
    for line in format_reports(plan.data.reports):
        table.add_row("rows", Text(line.removeprefix(f"{plan.stage}: ")))
    table.add_row("steps", _steps(plan, config))
    for line in memory:
        table.add_row("memory", Text(line.removeprefix(f"{plan.stage}: plan: ")))
    completion = max(max_completion_tokens(row.row, row.prompt_ids, config.data) for row in plan.data.train)
    limits = {"prompt": config.data.max_prompt_length}
    for part, (median, high, longest) in summarize_lengths(plan.data).items():
        allowed = limits.get(part, completion)
        table.add_row(f"{part} tokens", f"median {median}, 95 % up to {high}, longest {longest} (at most {allowed})")
    learns = list_loss_parts(plan.data, loss_on=config.sft.loss_on)
    for part, text in decode_median_row(plan.data, plan.tokenizer):
        table.add_row(f"example {part}", Text.assemble(text, ("  (in the loss)" if part in learns else "", "dim")))
    console.print()
    console.print(Text(STAGE_NAMES[plan.stage], style="bold"))
    console.print(table)


def _origin(base: ResolvedBaseModel) -> str:
    path = base.path or _EMBEDDED
    return f"{path}, after {' and '.join(base.through)} of this run" if base.through else path


def _steps(plan: StagePlan, config: Config) -> str:
    if plan.stage == "ppo":
        rows, each = config.ppo.batch_size, config.ppo.method.group_size
        said = f"{plan.steps(config):,} rollouts of {rows // each} prompts"
        return said if each == 1 else f"{said}, {each} completions of each"
    section = config.supervised(plan.stage)
    return f"{plan.steps(config):,} of {section.batch_size} {'rows' if plan.stage == 'sft' else 'pairs'}"
