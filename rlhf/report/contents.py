"""The contents of a report: from the records of runs to the sections, charts and tables of the page.

Sections answer what a person asks, in this order: how did it go, is the plumbing right, is it learning, is it cheating,
is it exploring, are updates sane, where did time and memory go, what does it write, where does it come from.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

from rlhf.config.schema import EVERY_STAGE, Stage
from rlhf.diagnosis.checks import find_validated_scores
from rlhf.diagnosis.findings import SEVERITY, Finding
from rlhf.diagnosis.records import Curve, StageRecords
from rlhf.diagnosis.verdict import ExaminedRun
from rlhf.report.charts import COLORS, Chart, Point, Series, histogram, plane, stacked_bar
from rlhf.reporting.rules import Topic
from rlhf.utils.statistics import best_of_kl, expected_best
from rlhf.utils.units import format_bytes, format_seconds

_QUESTIONS: dict[Topic, str] = {
    "plumbing": "Is the plumbing right?",
    "learning": "Is it learning?",
    "cheating": "Is it cheating?",
    "exploring": "Is it still exploring?",
    "updates": "Are the updates sane?",
}


_GREY = COLORS - 1


class _Plot(NamedTuple):
    """A chart to draw if its numbers were recorded: `names` in the same chart, with their held-out values.

    A name with `*` stands for all numbers that match it.
    """

    topic: Topic
    title: str
    names: tuple[str, ...]
    about: str = ""
    scale: str = "linear"

    def find_names(self, stage: StageRecords) -> list[str]:
        """Return the names of a stage's numbers."""
        recorded = dict.fromkeys(key.removeprefix("heldout_") for key in stage.curves)
        return [found for name in self.names for found in (fnmatch.filter(recorded, name) if "*" in name else [name])]


_LEARNING_RATE = _Plot("updates", "learning rate", ("learning_rate", "lora_learning_rate"))
_NORM = _Plot("updates", "gradient norm", ("grad_norm", "critic_grad_norm"), "before clipping", "log")
_PLOTS: dict[Stage, tuple[_Plot, ...]] = {
    "sft": (
        _Plot("learning", "loss", ("loss",), "nats per target token"),
        _Plot("learning", "held-out perplexity", ("heldout_perplexity",), scale="log"),
        _NORM,
        _LEARNING_RATE,
    ),
    "reward": (
        _Plot("learning", "accuracy", ("accuracy",), "pairs whose chosen reply scores higher"),
        _Plot("learning", "loss", ("loss",), "at chance 0.693"),
        _Plot("learning", "margin", ("margin",), "score of the chosen reply − that of the rejected one"),
        _NORM,
        _LEARNING_RATE,
    ),
    "dpo": (
        _Plot("learning", "accuracy", ("accuracy",), "pairs whose chosen reply gained more probability"),
        _Plot("learning", "loss", ("loss",), "at the start ln 2"),
        _Plot("learning", "rewards", ("chosen_reward", "rejected_reward"), "β · log(policy / reference)"),
        _Plot("cheating", "log-probabilities", ("chosen_log_prob", "rejected_log_prob"), "nats per reply"),
        _Plot("cheating", "drift", ("drift",), "below 0: away from both replies"),
        _NORM,
        _LEARNING_RATE,
    ),
    "ppo": (
        _Plot("plumbing", "gap between drawing and training", ("draw_gap", "draw_gap_max"), "nats per token", "log"),
        _Plot("learning", "reward", ("reward",), "mean score"),
        _Plot("learning", "score by the judge", ("heldout_judge_reward",), "a second reward model, never trained on"),
        _Plot("learning", "approved", ("heldout_approved_share",), "by the rule of the embedded data"),
        _Plot("learning", "explained variance", ("explained_variance",), "of the returns, by the critic"),
        _Plot("learning", "prompts without variance", ("equal_group_share",), "all completions have the same score"),
        _Plot("cheating", "reward parts", ("reward_model", "reward/*"), "mean scores, without their weights"),
        _Plot("cheating", "KL to the reference", ("kl",), "nats per sequence"),
        _Plot("cheating", "length", ("response_length",), "tokens"),
        _Plot("cheating", "cut off", ("truncated_share",), "share of completions without an end"),
        _Plot("exploring", "entropy", ("entropy",), "nats per token"),
        _Plot("exploring", "distinct pairs of tokens", ("heldout_distinct_2",), "near 0, all completions are alike"),
        _Plot("updates", "clipped", ("clip_fraction", "value_clip_fraction"), "share of tokens: policy, critic"),
        _Plot("updates", "KL of an update", ("approx_kl",), "nats per token"),
        _Plot("updates", "losses", ("policy_loss", "value_loss"), "policy, critic"),
        _NORM,
        _LEARNING_RATE,
        _Plot("updates", "KL coefficient", ("kl_coef",)),
        _Plot("updates", "clipped scores", ("score_clip_fraction",), "share of completions"),
    ),
    "distill": (
        _Plot("learning", "divergence from the teacher", ("loss",), "nats per token", "log"),
        _Plot("learning", "score by the judge", ("heldout_judge_reward",), "a reward model that is not trained on"),
        _Plot("learning", "approved", ("heldout_approved_share",), "by the rule of the embedded data"),
        _Plot("cheating", "length", ("response_length",), "tokens"),
        _Plot("cheating", "cut off", ("truncated_share",), "share of completions without an end"),
        _Plot("exploring", "distinct pairs of tokens", ("heldout_distinct_2",), "near 0, all completions are alike"),
        _NORM,
        _LEARNING_RATE,
    ),
}


@dataclass
class Section:
    """A section of the page: findings and charts by stage, and further tables and drawings."""

    key: str
    title: str
    findings: list[tuple[str, Finding]] = field(default_factory=list)
    charts: list[tuple[str, list[Chart]]] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.findings or self.charts or self.figures)

    @property
    def open(self) -> list[tuple[str, Finding]]:
        """The findings that need a reader, the most severe first."""
        found = [(label, finding) for label, finding in self.findings if finding.state != "fine"]
        return sorted(found, key=lambda item: -SEVERITY[item[1].state])

    @property
    def fine(self) -> list[tuple[str, Finding]]:
        """The other findings."""
        return [(label, finding) for label, finding in self.findings if finding.state == "fine"]


def question_sections(runs: Sequence[ExaminedRun]) -> list[Section]:
    """Return the sections of the questions, without those to which no run has an answer."""
    sections = []
    for topic, title in _QUESTIONS.items():
        section = Section(topic, title)
        for run in runs:
            for stage in run.stages:
                label = _label(run, stage.records, len(runs))
                section.findings += [(label, finding) for finding in stage.findings if finding.topic == topic]
        for name in EVERY_STAGE:
            if charts := [*_charts(name, topic, runs)]:
                section.charts.append((_stage_title(name, runs), charts))
        if topic == "cheating":
            section.figures = [*_draw_tradeoff(runs), *(_draw_scores(runs[0]) if len(runs) == 1 else ())]
        sections.append(section)
    return [section for section in sections if section]


def _label(run: ExaminedRun, stage: StageRecords, count: int) -> str:
    return stage.title if count == 1 else f"{run.records.name}: {stage.title}"


def _stage_title(name: Stage, runs: Sequence[ExaminedRun]) -> str:
    return next(stage.title for run in runs if (stage := run.records.stage(name)))


def _charts(name: Stage, topic: Topic, runs: Sequence[ExaminedRun]) -> Iterator[Chart]:
    """Yield the charts of a stage about a topic, with the curves of all runs."""
    recorded = [(run, stage) for run in runs if (stage := run.records.stage(name))]
    for plot in (plot for plot in _PLOTS[name] if plot.topic == topic):
        if len(runs) > 1:
            series = [*_compared_series(recorded, plot)]
        else:
            series = [curves for run, stage in recorded for curves in _own_series(run, stage, plot)]
        if any(_is_worth_drawing(curves.curve, topic) for curves in series):
            key = f"{name}-{plot.title.replace(' ', '-')}"
            about = plot.about + ", with its 95 % interval" * any(one.margin for one in series)
            yield Chart(key, plot.title, series, group=name, about=about, scale=plot.scale)


def _is_worth_drawing(curve: Curve, topic: Topic) -> bool:
    """Return whether a curve has several points, and changes; if nothing is learned, its curve shows that."""
    return len(curve.steps) > 1 and (topic == "learning" or len(set(curve.values)) > 1)


def _own_series(run: ExaminedRun, stage: StageRecords, plot: _Plot) -> Iterator[Series]:
    """Yield the curves of the one run on the page: each number of the plot, and its held-out values."""
    position, group_size = 0, run.records.config.ppo.method.group_size
    for name in plot.find_names(stage):
        label = name.removeprefix("heldout_").replace("_", " ")
        for key, of_kind in ((name, ""), (f"heldout_{name}", "held-out ")):
            if curve := stage.curve(key):
                margin = _reward_margin(stage, curve, group_size) if key == "reward" else []
                yield Series(f"{of_kind}{label}", curve, position % COLORS, margin, key.startswith("heldout_"))
                position += 1


def _compared_series(recorded: Sequence[tuple[ExaminedRun, StageRecords]], plot: _Plot) -> Iterator[Series]:
    """Yield one curve of each run, because more could not be told apart: of the first number.

    They are held-out values if all runs were evaluated in training, and not only before and after it. A plot of many
    numbers has none.
    """
    name = plot.names[0]
    if any("*" in other for other in plot.names):
        return
    evaluated = all(len(stage.curve(f"heldout_{name}").steps) > 2 for _, stage in recorded)
    key = f"heldout_{name}" if evaluated or not any(stage.curve(name) for _, stage in recorded) else name
    is_heldout = key.startswith("heldout_")
    for run, stage in recorded:
        if curve := stage.curve(key):
            title = f"{run.records.name}{', held-out' * is_heldout}"
            yield Series(title, curve, run.number % COLORS, dots=is_heldout)


def _reward_margin(stage: StageRecords, curve: Curve, group_size: int) -> list[float]:
    """Return half the 95 % interval of each step's mean score over prompts; empty if their number is not known."""
    deviations, tokens, lengths = (
        dict(zip(*stage.curve(name))) for name in ("reward_std", "tokens", "response_length")
    )
    if not deviations or not tokens:
        return []
    # Completions of one prompt are not independent.
    prompts = {step: max(tokens[step] / max(lengths[step], 1) / group_size, 1) for step in tokens if step in lengths}
    return [1.96 * deviations.get(step, 0.0) / math.sqrt(prompts.get(step, 1.0)) for step in curve.steps]


def _draw_tradeoff(runs: Sequence[ExaminedRun]) -> Iterator[dict[str, Any]]:
    """Yield held-out reward against KL, if a run has several evaluations of PPO."""
    paths = []
    for run in runs:
        if stage := run.records.stage("ppo"):
            rewards = dict(zip(*stage.curve("heldout_reward")))
            points = [
                Point(nats, rewards[step], f"step {step:,}")
                for step, nats in zip(*stage.curve("heldout_kl"))
                if step in rewards
            ]
            if len(points) > 1:
                paths.append((run.records.name, run.number % COLORS, points))
            if frontier := _best_of_n(stage):
                paths.append((f"best of n, {run.records.name}", _GREY, frontier))
    if paths:
        yield {
            "title": "reward against KL",
            "about": "held-out prompts; if the curve flattens, more KL buys no more reward",
            "svg": plane("reward against KL", paths, "KL, nats per sequence", "reward"),
            "legend": [(label, color) for label, color, _ in paths] if len(paths) > 1 else [],
        }


def _best_of_n(stage: StageRecords) -> list[Point]:
    """Return the expected reward of the best of n completions before training, at the bound of its KL."""
    drawn = [row["rewards"] for row in stage.first_rows if row.get("rewards")]
    if not drawn:
        return []
    sizes = [2**power for power in range(len(drawn[0]).bit_length()) if 2**power <= len(drawn[0])]
    return [
        Point(best_of_kl(size), fmean(expected_best(rewards, size) for rewards in drawn), f"best of {size}")
        for size in sizes
    ]


def _draw_scores(run: ExaminedRun) -> Iterator[dict[str, Any]]:
    """Yield the scores of completions and those of the pairs on which the reward model was validated."""
    validated, ppo = find_validated_scores(run.records), run.records.stage("ppo")
    if not (validated and ppo and ppo.first_rows and ppo.final_rows):
        return
    scores = {
        ("pairs that validated the reward model", _GREY): validated,
        ("completions before PPO", 0): [row["reward"] for row in ppo.first_rows],
        ("completions at the end", 1): [row["reward"] for row in ppo.final_rows],
    }
    groups = [
        (label, color, [score for score in numbers if isinstance(score, int | float)])
        for (label, color), numbers in scores.items()
    ]
    yield {
        "title": "scores",
        "about": "scores beyond the pairs' range are those of which least is known",
        "svg": histogram("scores", groups),
        "legend": [(label, color) for label, color, _ in groups],
    }


class Cost(NamedTuple):
    """The cost of a stage: rows of a table, and the shares of its phases."""

    label: str
    rows: list[tuple[str, str]]
    bar: str
    phases: list[tuple[str, int, str]]


def cost_tables(runs: Sequence[ExaminedRun]) -> list[Cost]:
    """Return time, memory and speed of each stage."""
    costs = []
    for run in runs:
        for stage in run.stages:
            summary, records = stage.records.summary or {}, stage.records
            peak = summary.get("peak_memory") or max(records.curve("peak_memory").values, default=0)
            rows = [("steps", f"{summary.get('steps', records.step):,}")]
            seconds = summary.get("seconds") or records.elapsed
            rows += [("time", format_seconds(seconds))] if seconds else []
            step = records.curve("seconds").values
            rows += [("a step", format_seconds(sorted(step)[len(step) // 2]))] if step else []
            rows += [("set-up", format_seconds(summary["set_up_seconds"]))] if "set_up_seconds" in summary else []
            rows += [("peak memory", format_bytes(peak))] if peak else []
            if planned := summary.get("planned_memory"):
                # Libraries keep workspaces in the reserve, so no exact peak exists.
                reserve = summary.get("planned_reserve", 0)
                expected = min(max(peak, planned), planned + reserve)
                share = f" ({peak / expected - 1:+.0%})" if peak and (peak != expected or not reserve) else ""
                runtime = f", plus {format_bytes(reserve)} for the device's runtime" if reserve else ""
                rows.append(("planned", f"{format_bytes(planned)}{runtime}{share}"))
            if speed := summary.get("tflops"):
                rows.append(("speed", f"{float(f'{speed:.2g}'):,g} TFLOP/s"))
            phases = {name: value for name, value in summary.get("phases", {}).items() if value > 0}
            total = sum(phases.values()) or 1
            labels = [
                (name, number % COLORS, f"{value / total:.0%}") for number, (name, value) in enumerate(phases.items())
            ]
            bar = stacked_bar("phases", list(phases.items())) if len(phases) > 1 else ""
            costs.append(Cost(_label(run, records, len(runs)), rows, bar, labels if bar else []))
    return costs
