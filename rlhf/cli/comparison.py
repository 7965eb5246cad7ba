"""Print the results of `rlhf compare`: samples side by side, and tables of their statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rlhf.cli.tables import flatten, print_table

_SHARES = ("win_rate", "truncated_share", "repeated_share")
_LABELS = {
    "reward": "reward",
    "win_rate": "win rate",
    "reward_difference": "reward difference",
    "kl": "KL, nats",
    "kl.per_token": "KL per token",
    "log_ratio": "log-ratio, nats",
    "log_ratio.per_token": "log-ratio per token",
    "distinct_1": "distinct 1",
    "distinct_2": "distinct 2",
    "distinct_3": "distinct 3",
    "length": "length, tokens",
    "truncated_share": "truncated",
    "repeated_share": "repeated",
}


def print_lines(told: dict[str, Any]) -> None:
    """Print a line for each model, its numbers under their names in JSON."""
    lines = []
    for model in told["models"]:
        best = {f"best_of_{row['best_of']}": row["reward"][model["model"]] for row in told.get("best_of", ())}
        lines.append(flatten(model | best))
    columns = list(dict.fromkeys(name for line in reversed(lines) for name in line))  # the first has fewer
    print_table("", columns, [[_plain(line.get(name)) for name in columns] for line in lines])


def print_tables(told: dict[str, Any]) -> None:
    """All numbers of each model, and what the best of several samples would be worth, for people."""
    from rich.text import Text

    from rlhf.reporting.console import console
    from rlhf.utils.units import format_number

    first, *others = (model["model"] for model in told["models"])
    lines = [flatten(model) for model in told["models"]]
    rows = []
    for name, label in _LABELS.items():
        values = [_value(name, line) for line in lines]
        if any(values):
            rows.append([label, *values])
    how = "greedy" if told["temperature"] == 0 else f"temperature {told['temperature']:g}"
    how += f", top-p {told['top_p']:g}" if told["top_p"] < 1 else ""
    how += f", {told['samples']} samples of each" if told["samples"] > 1 else ""
    how += f", at most {told['max_tokens']:,} tokens"
    said = f"{told['prompts']:,} prompts, {how}. ± is the standard error; in brackets are 95 % intervals."
    console.print(Text(said, "dim"), soft_wrap=True)
    print_table("", ["" if not others else f"against {first}", first, *others], rows)
    if "best_of" not in told:
        return
    names = [model["model"] for model in told["models"] if "reward" in model]
    rows = [
        [str(row["best_of"]), format_number(row["kl_at_most"])]
        + [_value("reward", flatten({"reward": row["reward"][name]})) for name in names]
        for row in told["best_of"]
    ]
    print_table("reward of the best of n samples", ["n", "KL at most", *names], rows)
    for one in told["best_of_at_kl"]:
        own = next(flatten(model) for model in told["models"] if model["model"] == one["model"])
        number = f"{one['best_of']:,}" if one["best_of"] < 10**6 else f"e^{math.log(one['best_of']):.1f}"
        best = f"the best of {number} of {first}, {format_number(one['kl_at_most'])} nats away at most"
        worth = f"scores {_value('reward', flatten(one))}" if one["reward"] else "takes more samples than were drawn"
        line = f"{one['model']} scores {_value('reward', own)}, {format_number(one['kl'])} nats away; {best}, {worth}"
        console.print(Text(line), soft_wrap=True)


def print_samples(records: Sequence[dict[str, Any]]) -> None:
    """Prompts with a completion of each model: of several, the first."""
    from rich.table import Table
    from rich.text import Text

    from rlhf.reporting.console import console
    from rlhf.utils.units import format_number

    for record in records:
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(no_wrap=True, style="dim", overflow="ellipsis", max_width=console.width // 3)
        grid.add_column(no_wrap=True, justify="right", style="cyan")
        grid.add_column(overflow="fold")
        grid.add_row("prompt", "", Text(record["prompt"].strip(), style="italic"))
        for name, texts in record["completions"].items():
            scores = record["scores"].get(name)
            score = format_number(scores[0]) if scores else ""
            grid.add_row(Text(name), score, Text(texts[0].strip() or "(empty)"))
        console.print(grid)
        console.print()


def _plain(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _value(name: str, line: dict[str, Any]) -> str:
    """Format a number for a person, with its error or its interval."""
    from rlhf.utils.units import format_number

    def shown(value: float, digits: int = 4) -> str:
        return f"{100 * value:.1f}%" if name in _SHARES else format_number(float(f"{value:.{digits}g}"))

    mean = line.get(f"{name}.mean", line.get(name))
    if mean is None:
        return ""
    if name in ("win_rate", "reward_difference") and line.get(f"{name}.low") is not None:
        return f"{shown(mean)} [{shown(line[f'{name}.low'], 3)}, {shown(line[f'{name}.high'], 3)}]"
    error = line.get(f"{name}.error")
    return shown(mean) if error is None else f"{shown(mean)} ± {shown(error, 2)}"
