"""`rlhf data`: how the rows of a recipe are read, before anything is trained on them.

The sources and the tokenizer are loaded, no model and no accelerator; nothing is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from rlhf.cli.options import Options, shared
from rlhf.cli.tables import print_json
from rlhf.config.schema import EVERY_STAGE, STAGES, Stage
from rlhf.data.report import find_remedy
from rlhf.errors import ConfigError

_AT_A_BORDER = 4  # tokens that are shown on either side, and at the end
_WAYS = {
    "template": "the tokenizer's chat template",
    "transcript": "Human: ... Assistant: transcripts",
    "plain": "the prompt as it is",
}


@shared("config", "overrides", "seed", "debug")
def data(
    context: typer.Context,
    options: Options,
    stage: Annotated[
        list[str] | None,
        typer.Option("--stage", metavar="STAGE", help="Show this stage alone: sft, reward, dpo or ppo. Repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print JSON.")] = False,
) -> None:
    """Show how the rows of a recipe are read, before an hour is spent on them.

    For each stage and source: which columns are read as what, how many rows are used and why others are left out, how
    long prompts and completions are in tokens, and one row as the model sees it: where the prompt ends and the
    completion begins, the token that ends it, and what is learned. A swapped or misread column shows here.

    [bold]rlhf data --config recipe.yaml[/]  ·  [bold]rlhf data --set data.datasets=rows.jsonl --stage reward[/]

    The tokenizer is loaded, no model; nothing is written. Exit code 2: a stage would have no rows to train on.
    """
    from rlhf.data.preview import describe_stage
    from rlhf.trainers import preflight

    wanted = _stages(stage or STAGES)
    config = options.load()
    found = (
        describe_stage(plan.stage, plan.data, plan.tokenizer, config)
        for plan in preflight.look_at_data(config, wanted, show=not as_json)
    )
    if as_json:
        print_json(list(found))
        return
    for one in found:  # those before one that fails are shown
        _print(one)


def _stages(names: Sequence[str]) -> list[Stage]:
    for name in names:
        if name not in EVERY_STAGE:
            raise ConfigError(f"--stage {name}: no such stage; use one of {', '.join(EVERY_STAGE)}")
    return [stage for stage in EVERY_STAGE if stage in names]


def _print(stage: dict[str, Any]) -> None:
    from rich.text import Text

    from rlhf.reporting.console import console
    from rlhf.reporting.summary import STAGE_NAMES

    total = (
        f"{stage['train']:,} rows for training, {stage['heldout']:,} held out; prompts are {_WAYS[stage['prompts']]}"
    )
    console.print()
    console.print(Text.assemble((STAGE_NAMES[stage["stage"]], "bold"), (f"  {total}", "dim")), soft_wrap=True)
    for source in stage["sources"]:
        console.print(Text(f"\n  {source['source']}", "cyan"), soft_wrap=True)
        for name, text in _facts(stage, source):
            console.print(Text.assemble("    ", (f"{name:14}", "dim"), text), soft_wrap=True)


def _facts(stage: dict[str, Any], source: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the names and values to print for a source, one a line."""
    shares = ":".join(f"{share:g}" for share in stage["split"].values())
    facts = [
        ("read as", source["read_as"]),
        ("rows", f"{source['train']:,} for training, {source['heldout']:,} held out"),
    ]
    if source["train"]:  # a source that is held out is not shared
        facts.append(("share", f"{source['share']:,} of its {source['rows']:,} rows (data.stage_split {shares})"))
    if source["truncated"]:
        facts.append(("truncated", f"{source['truncated']:,} rows"))
    for dropped in sorted(source["dropped"], key=lambda dropped: -dropped["rows"]):
        what = f"{dropped['rows']:,} {dropped['reason']} (first: {dropped['first']}); {find_remedy(dropped['reason'])}"
        facts.append(("left out", what))
    for part, counts in source["tokens"].items():
        lengths = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        facts.append((part, f"{lengths} tokens (at most {source['limits'][part]:,})"))
    if source["example"]:
        first, *others = source["example"]["parts"]
        facts.append(("example", source["example"]["row"]))
        facts += [(f"  {part['part']}", _shown(part)) for part in (first, *others)]
        facts += [("  tokens", _border(first["tokens"], part["tokens"])) for part in others]
    return facts


def _shown(part: dict[str, Any]) -> str:
    text = part["text"].replace("\n", "\n" + " " * 18)
    return f"{text}  [learned]" if part["in_loss"] else text or "(none)"


def _border(prompt: Sequence[str], completion: Sequence[str]) -> str:
    """Format the last tokens before the border and the first after it: `...'<user>' 'Hi' | ' Hello' '!' '<eos>'`."""
    before = list(map(repr, prompt[-_AT_A_BORDER:]))
    after = list(map(repr, completion))
    if len(after) > 2 * _AT_A_BORDER:
        after = [*after[:_AT_A_BORDER], "...", *after[-_AT_A_BORDER:]]
    more = ["..."] if len(prompt) > _AT_A_BORDER else []
    return " ".join([*more, *before, "|", *after])
