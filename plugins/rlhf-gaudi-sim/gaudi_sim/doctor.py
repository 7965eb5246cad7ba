"""`gaudi-sim shapes`: would this recipe keep compiling on a Gaudi, and which line of code is to blame?

A recipe flows in; a few steps of each stage run on the simulation, in both modes, with a toy copy of its model; out
come compilations by stage, step and part of a step, and for every late one the line that caused it. Made to be run
before the machine is rented.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gaudi_sim import accounting

if TYPE_CHECKING:
    from rlhf.config.schema import Config

# Steps in which compilations are expected. At ZeRO 3, DeepSpeed reads values in the first evaluation and in two steps,
# while it records the order of its parameters: the third step is the first whole graph, and so is the last evaluation.
WARM_UP, WARM_UP_ZERO_3 = 2, 3
ROWS, PARTS = 4, 2
"""The most rows of a micro-batch, and parts that a batch is cut into: more of them compile nothing else."""
MODES = {"eager": "0", "lazy": "1"}
"""Values of PT_HPU_LAZY_MODE."""
SECONDS_A_GRAPH = (0.5, 38)
"""Seconds of one compilation on a Gaudi2 in vLLM's warm-up logs: prompts of Llama 3.1 8B, 4 rows
(https://docs.vllm.ai/projects/gaudi/en/latest/features/warmup.html) to 64 rows (HabanaAI/vllm-fork #201)."""
_PARTS = {"eager": "pass and line", "lazy": "the boundary that ends them"}
_STARTS_FROM = {"sft": ("sft",), "reward": ("sft", "reward"), "dpo": ("sft", "dpo"), "ppo": ("sft", "reward", "ppo")}
"""Each stage after those that it starts from."""
_REFUSAL = re.compile(r"^rlhf: note: generation is not captured: (.*)", re.MULTILINE)
_UNCOMPILED = re.compile(r"layers run uncompiled, and slower: (.*)")

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class StageReport:
    """What one stage compiled in each step, and what happened after `warm_up` of them."""

    mode: str
    stage: str
    compilations: list[int]
    graphs: dict[str, int]  # by part of a step: the boundary that ended them, in eager mode the kind and the line
    warm_up: int
    late: list[dict[str, Any]]
    breaks: list[dict[str, Any]]
    unrecorded: str | None  # why steps of generation are not recorded or compiled; they are slower, but stable
    uncompiled: list[str]  # layers that run operator by operator in eager mode, each with the reason

    @property
    def stable(self) -> bool:
        """Whether nothing is compiled or read late."""
        return not self.late and not self.breaks


@app.callback()
def gaudi_sim() -> None:
    """Simulate a Gaudi2 on the CPU."""


@app.command()
def shapes(
    config: Annotated[
        Path | None, typer.Option(help="Recipe; without one, the embedded example.", metavar="FILE")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Set one key, above the file. Repeatable.", metavar="KEY=VALUE")
    ] = None,
    stages: Annotated[
        list[str] | None,
        typer.Option(
            "--stage", help="sft, reward, dpo or ppo, and what it starts from. Repeatable; else ppo.", metavar="STAGE"
        ),
    ] = None,
    mode: Annotated[str, typer.Option(help="eager, lazy or both.", metavar="MODE")] = "both",
    steps: Annotated[int, typer.Option(help="Steps of each stage.", min=WARM_UP_ZERO_3 + 1, metavar="N")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a few steps of a recipe on the simulation and show what a Gaudi would compile, and when.

    The model is replaced by a toy of the same architecture, and batches by some of a few rows, cut into minibatches and
    micro-batches as the recipe's are; data, lengths and all other settings are the recipe's. The graphs of a part of a
    step are those of its shapes; another shape compiles them again. A graph that is new after
    step 2 (ZeRO 3: step 3) would be compiled again and again on the card: its line is shown, and how its shapes differ
    from what was known. In lazy mode so is every line that keeps reading values of the device in the middle of a step.

    A card runs in eager mode, unless PT_HPU_LAZY_MODE=1 is set. Lazy mode refuses ZeRO 3.

    Exit code 0: no late compilation, no read; 1: some; 2: the recipe cannot run.
    """
    from rlhf.cli.tables import print_json
    from rlhf.config.schema import load_config

    recipe = load_config(config, overrides or ())
    modes = _modes(mode, recipe)
    reports = examine(recipe, _all(stages or ["ppo"]), modes, steps, _say if not as_json else lambda line: None)
    if as_json:
        print_json([asdict(report) | {"stable": report.stable} for report in reports])
    else:
        for each in modes:
            _print([report for report in reports if report.mode == each])
    if all(report.stable for report in reports):
        return
    if not as_json and recipe.engine.shapes in ("bucketed", "dynamic"):
        typer.echo(f"engine.shapes is {recipe.engine.shapes}; with static, batches have the recipe's longest lengths")
    raise typer.Exit(1)


def _all(stages: Sequence[str]) -> list[str]:
    """Return the stages and those that they start from, in order.

    Raises:
        ConfigError: there is no such stage.
    """
    from rlhf.errors import ConfigError

    for stage in stages:
        if stage not in _STARTS_FROM:
            raise ConfigError(f"--stage {stage}: no such stage; use one of {', '.join(_STARTS_FROM)}")
    wanted = {needed for stage in stages for needed in _STARTS_FROM[stage]}
    return [stage for stage in _STARTS_FROM if stage in wanted]


def _modes(mode: str, config: Config) -> list[str]:
    """Return the modes to run in; of both, ZeRO 3 has eager mode alone.

    Raises:
        ConfigError: there is no such mode.
    """
    from rlhf.errors import ConfigError

    if mode != "both" and mode not in MODES:
        raise ConfigError(f"--mode {mode}: no such mode; use one of {', '.join(MODES)}, both")
    if mode == "both" and config.engine.zero_stage == 3:
        return ["eager"]
    return list(MODES) if mode == "both" else [mode]


def examine(
    config: Config, stages: Sequence[str], modes: Sequence[str], steps: int, say: Callable[[str], None]
) -> list[StageReport]:
    """Run `steps` steps of the stages on the simulation, in each mode.

    Raises:
        RLHFError, AcceleratorError: the recipe is wrong.
        typer.Exit: a stage failed; its own line is on standard error.
    """
    from gaudi_sim.toy import toy_copy

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = toy_copy(config.model, folder / "toy") if config.model.path else config.model
        values = _short(config, model, steps)
        if config.reward.model and config.reward.model != config.model.path and "reward" in stages:
            other = config.model.model_copy(update={"path": config.reward.model, "gguf_file": None})
            values["reward"]["model"] = toy_copy(other, folder / "toy-reward").path
        reports = []
        for mode in modes:
            own = folder / mode
            own.mkdir()
            (own / "recipe.yaml").write_text(json.dumps(values | {"output": str(own / "run")}))  # JSON is YAML
            for stage in stages:
                say(f"{stage}: {steps} steps on the simulation, {mode} mode")
                reports.append(_run(stage, mode, own, zero_3=config.engine.zero_stage == 3))
        return reports


def _short(config: Config, model: Any, steps: int) -> dict[str, Any]:
    """Return the recipe with the toy model, few rows and few steps, and every length unchanged."""
    values = config.model_dump(mode="json")
    values |= {"accelerator": "auto", "model": model.model_dump(mode="json")}
    for stage, key in (("sft", "max_steps"), ("reward", "max_steps"), ("dpo", "max_steps"), ("ppo", "steps")):
        section = values[stage]
        section |= _few_rows(section)
        # One evaluation batch and a part of one: the last one is seldom full.
        rows = min(section["eval_rows"], section["batch_size"] + max(1, section["batch_size"] // 2))
        section |= {key: steps, "eval_rows": rows, "log_every": 1, "checkpoint_every": 0}
        section["epochs"] = None if stage == "ppo" else steps  # small data sets last for all steps
    # Stages start from the models of earlier stages; a separate reward model may have another shape.
    values["dpo"]["model"] = values["ppo"]["actor"] = values["ppo"]["reward_model"] = values["ppo"]["critic"] = None
    values["reward"]["model"] = values["model"]["path"] if config.reward.model else None
    return values


def _few_rows(section: dict[str, Any]) -> dict[str, int]:
    """Return small batch sizes for a stage: the same number of micro-batches, up to `PARTS`, of a few rows each."""
    batch = section["batch_size"]
    minibatch = section.get("minibatch_size") or batch
    micro = section["micro_batch_size"] or minibatch
    sizes = {"micro_batch_size": min(micro, ROWS)}
    sizes["batch_size"] = few = sizes["micro_batch_size"] * min(minibatch // micro, PARTS)
    if "minibatch_size" in section:
        sizes |= {"minibatch_size": few, "batch_size": few * min(batch // minibatch, PARTS)}
    return sizes


def _run(stage: str, mode: str, folder: Path, *, zero_3: bool) -> StageReport:
    report = folder / f"{stage}.json"
    environment = os.environ | {"RLHF_GAUDI_SIM": "1", "RLHF_GAUDI_SIM_REPORT": str(report)}
    environment[accounting.LAZY_VARIABLE] = MODES[mode]
    environment.pop("RLHF_GAUDI_SIM_STRICT", None)  # all lines are wanted, not the first
    command = [sys.executable, "-m", "rlhf", stage, "--debug", "--accelerator", "hpu"]
    command += ["--config", str(folder / "recipe.yaml")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        typer.echo((done.stderr.strip().splitlines() or [f"{stage} ended without a word"])[-1], err=True)
        raise typer.Exit(2)
    records = [json.loads(line) for line in (folder / "run" / stage / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "compilations" in record]
    totals = [int(step["compilations"]) for step in steps]
    warm_up = WARM_UP_ZERO_3 if zero_3 else WARM_UP
    events = json.loads(report.read_text())["events"]
    late = events_between(events, steps[warm_up - 1], (steps if zero_3 else numeric_records(records))[-1])
    known = [event for event in events_between(events, {"time": 0}, steps[-1]) if event["kind"] == "compilation"]
    return StageReport(
        mode=mode,
        stage=stage,
        compilations=[after - before for before, after in zip([0, *totals], totals)],
        graphs=dict(Counter(_part(event, mode) for event in known).most_common()),
        warm_up=warm_up,
        late=[event for event in late if event["kind"] == "compilation"],
        breaks=[event for event in late if event["kind"] == "break" and event["in_step"]],
        unrecorded=refusal[1] if (refusal := _REFUSAL.search(done.stderr)) else None,
        uncompiled=_UNCOMPILED.findall(done.stderr),
    )


def _part(event: dict[str, Any], mode: str) -> str:
    """Return the part of a step that a graph belongs to."""
    return f"{event['tag']} at {Path(event['line']).name}" if mode == "eager" else event["tag"]


def numeric_records(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records without a tag; texts have one, and the last text may be written after the model is saved."""
    return [record for record in records if "tag" not in record]


def events_between(
    events: Sequence[dict[str, Any]], first: dict[str, Any], last: dict[str, Any]
) -> list[dict[str, Any]]:
    """Events of a report between two records of metrics.jsonl, but for those of writing a checkpoint.

    A checkpoint reads everything on the host, now and then, whatever the recipe; the last one follows the last step.
    """
    rounding = 0.0005  # records have milliseconds
    between = [event for event in events if first["time"] + rounding < event["time"] <= last["time"] + rounding]
    return [event for event in between if "rlhf/checkpoint/" not in event["line"]]


def _print(reports: Sequence[StageReport]) -> None:
    from rlhf.cli.tables import print_table

    steps = range(1, 1 + max(len(report.compilations) for report in reports))
    rows = []
    for report in reports:
        verdict = "stable" if report.stable else f"{len(report.late)} late, {len(report.breaks)} reads"
        rows.append([report.stage, *map(str, report.compilations), verdict])
    mode = reports[0].mode
    print_table(
        f"New graphs on a simulated Gaudi2, {mode} mode", ["stage", *(f"step {step}" for step in steps), "shapes"], rows
    )
    for report in reports:
        parts = ", ".join(f"{count} {part}" for part, count in report.graphs.items())
        typer.echo(f"{report.stage}: {sum(report.graphs.values())} graphs by {_PARTS[mode]}: {parts}")
        late = f"compiled after step {report.warm_up}"
        for what, events in ((late, report.late), ("reads a value inside a step", report.breaks)):
            for line, same in _by_line(events).items():
                times = f" ({len(same)} times)" if len(same) > 1 else ""
                typer.echo(f"{report.stage}: {line}{times} {what}: {same[0]['difference']}")
        if report.unrecorded:
            typer.echo(f"{report.stage}: steps of generation are not recorded, so they are slower: {report.unrecorded}")
        for layer in report.uncompiled:
            typer.echo(f"{report.stage}: layers run uncompiled, and slower: {layer}")
    graphs = sum(sum(report.graphs.values()) for report in reports)
    least, most = (graphs * seconds / 60 for seconds in SECONDS_A_GRAPH)
    size = "a layer each, rarely a model" if mode == "eager" else "up to a model each"
    typer.echo(
        f"{mode} mode: {graphs} graphs ({size}) would take {least:.1f} to {most:.0f} minutes to compile, at "
        f"{SECONDS_A_GRAPH[0]} to {SECONDS_A_GRAPH[1]} s each: vLLM's published logs of whole 8B models on a Gaudi2, "
        "not measured here"
    )


def _by_line(events: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    lines: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        lines.setdefault(f"{event['line']} (up to {event['tag']})", []).append(event)
    return lines


def _say(line: str) -> None:
    typer.echo(line, err=True)


def main() -> None:
    """Entry point of the `gaudi-sim` script."""
    from typer.main import get_command

    from rlhf.launchers.exit_status import ExitStatus
    from rlhf.reporting import verbosity

    verbosity.configure_logging(debug=False)
    try:
        code = get_command(app).main(prog_name="gaudi-sim", standalone_mode=False)
    except (Exception, KeyboardInterrupt) as error:
        code = ExitStatus.from_error(error).report()
    sys.exit(code if isinstance(code, int) else 0)
