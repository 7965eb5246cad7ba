"""The contents of a report: from the records of runs to the sections, charts and tables of the page.

Sections answer what a person asks, in this order: how did it go, is the plumbing right, is it learning, is it cheating,
is it exploring, are updates sane, where did time and memory go, what does it write, where does it come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from typing import Any, NamedTuple

from rlhf.config.schema import EVERY_STAGE, Config, Stage
from rlhf.diagnosis.findings import SEVERITY, Finding, State, examine_stage, summarize_stage, worst
from rlhf.diagnosis.records import Curve, RunRecords, StageRecords
from rlhf.report.charts import COLORS, Chart, Point, Series, histogram, plane, stacked_bar
from rlhf.reporting.health import Topic
from rlhf.reporting.summary import format_value
from rlhf.utils.units import format_bytes, format_number, format_seconds

STATES: dict[State, str] = {"fine": "✓", "look here": "▲", "wrong": "✕", "cannot tell": "?"}
"""Each state with its sign, so that colours are not needed."""

_QUESTIONS: dict[Topic, str] = {
    "plumbing": "Is the plumbing right?",
    "learning": "Is it learning?",
    "cheating": "Is it cheating?",
    "exploring": "Is it still exploring?",
    "updates": "Are the updates sane?",
}


class _Plot(NamedTuple):
    """A chart to draw if its numbers were recorded: `names` in the same chart, with their held-out values."""

    topic: Topic
    title: str
    names: tuple[str, ...]
    about: str = ""
    scale: str = "linear"


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
        _Plot("learning", "reward", ("reward",), "mean score, with its 95 % interval"),
        _Plot("learning", "approved by the second judge", ("heldout_approved_share",)),
        _Plot("learning", "explained variance", ("explained_variance",), "of the returns, by the critic"),
        _Plot("learning", "prompts without variance", ("equal_group_share",), "all completions have the same score"),
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
}
_COMPLETIONS_SHOWN, _CHARACTERS = 60, 700
_TOKEN_SAMPLES = 12


@dataclass(frozen=True)
class StageReport:
    """A stage of a run, examined."""

    records: StageRecords
    findings: list[Finding]
    state: State
    sentence: str


@dataclass(frozen=True)
class RunReport:
    """A run, examined; `color` is the index of its colour if several runs are compared."""

    records: RunRecords
    stages: list[StageReport]
    color: int

    @property
    def state(self) -> State:
        """The most severe state of its stages."""
        return worst([finding for stage in self.stages for finding in stage.findings])

    @property
    def facts(self) -> list[tuple[str, str]]:
        """The run's state, device and duration, each with a name."""
        records, accelerator = self.records, self.records.description.get("accelerator") or {}
        device = accelerator.get("device") or {}
        precision = (accelerator.get("precision") or {}).get("name", "")
        seconds = sum((stage.records.summary or {}).get("seconds", 0.0) for stage in self.stages)
        started = [invocation.get("started", "") for invocation in records.description.get("invocations", [])]
        facts = [
            ("state", records.state),
            ("device", " ".join(filter(None, [accelerator.get("name", ""), device.get("model", ""), precision]))),
            ("time", format_seconds(seconds) if seconds else ""),
            ("started", started[0].replace("T", " ")[:16] + " UTC" if started and started[0] else ""),
        ]
        return [(name, value) for name, value in facts if value]


def examine_run(records: RunRecords, color: int = 0) -> RunReport:
    """Examine all stages of a run."""
    stages = []
    for stage in records.stages:
        findings = examine_stage(records, stage)
        stages.append(StageReport(stage, findings, worst(findings), summarize_stage(records, stage, findings)))
    return RunReport(records, stages, color % COLORS)


def to_document(report: RunReport) -> dict[str, Any]:
    """Return the verdict on a run as JSON: each stage's state, sentence and findings."""
    return {
        "run": str(report.records.path),
        "state": report.state,
        "progress": report.records.state,
        "stages": [
            {
                "stage": stage.records.name,
                "state": stage.state,
                "sentence": stage.sentence,
                "findings": [finding._asdict() for finding in stage.findings],
            }
            for stage in report.stages
        ],
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


def question_sections(reports: Sequence[RunReport]) -> list[Section]:
    """Return the sections of the questions, without those to which no run has an answer."""
    sections = []
    for topic, title in _QUESTIONS.items():
        section = Section(topic, title)
        for report in reports:
            for stage in report.stages:
                label = _label(report, stage.records, len(reports))
                section.findings += [(label, finding) for finding in stage.findings if finding.topic == topic]
        section.charts = [
            (reports_title, charts)
            for name in EVERY_STAGE
            if (charts := [*_charts(name, topic, reports)])
            for reports_title in [_stage_title(name, reports)]
        ]
        if topic == "cheating":
            section.figures = [*_cheating_figures(reports)]
        sections.append(section)
    return [section for section in sections if section]


def _label(report: RunReport, stage: StageRecords, runs: int) -> str:
    return stage.title if runs == 1 else f"{report.records.name}: {stage.title}"


def _stage_title(name: Stage, reports: Sequence[RunReport]) -> str:
    return next(stage.title for report in reports if (stage := report.records.stage(name)))


def _charts(name: Stage, topic: Topic, reports: Sequence[RunReport]) -> Iterator[Chart]:
    """Yield the charts of a stage about a topic, with the curves of all runs."""
    for plot in (plot for plot in _PLOTS[name] if plot.topic == topic):
        series: list[Series] = []
        for report in reports:
            if stage := report.records.stage(name):
                series += _series(stage, plot, report, alone=len(reports) == 1)
        if any(len(one.curve.steps) > 1 and (len(set(one.curve.values)) > 1 or topic == "learning") for one in series):
            key = f"{name}-{plot.title.replace(' ', '-')}"
            yield Chart(key, plot.title, series, group=name, about=plot.about, scale=plot.scale)


def _series(stage: StageRecords, plot: _Plot, report: RunReport, *, alone: bool) -> Iterator[Series]:
    position, group_size = 0, report.records.config.ppo.method.group_size
    for name in plot.names:
        label = name.removeprefix("heldout_").replace("_", " ")
        for key, of_kind in ((name, ""), (f"heldout_{name}", "held-out ")):
            if not (curve := stage.curve(key)):
                continue
            if not alone and len(plot.names) > 1 and name != plot.names[0]:
                continue  # one curve for each run: more could not be told apart
            dots = key.startswith("heldout_")
            margin = _reward_margin(stage, curve, group_size) if key == "reward" and alone else []
            title = f"{of_kind}{label}" if alone else f"{report.records.name}{', held-out' * dots}"
            yield Series(title, curve, position if alone else report.color, margin, dots)
            position += 1


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


def _cheating_figures(reports: Sequence[RunReport]) -> Iterator[dict[str, Any]]:
    """Yield reward against KL, scores against the range in which the reward model was validated, and rising samples."""
    paths = []
    for report in reports:
        if stage := report.records.stage("ppo"):
            kl, reward = stage.curve("heldout_kl"), stage.curve("heldout_reward")
            points = [Point(x, y, f"step {step:,}") for step, x, y in zip(kl.steps, kl.values, reward.values)]
            if len(points) > 1:
                paths.append((report.records.name, report.color, points))
    if paths:
        yield {
            "title": "reward against KL",
            "about": "held-out prompts; where the curve flattens, more KL buys no more reward",
            "svg": plane("reward against KL", paths, "KL, nats per sequence", "reward"),
            "legend": [(label, color) for label, color, _ in paths] if len(paths) > 1 else [],
        }
    for report in reports[:1] if len(reports) == 1 else []:
        reward_stage, ppo = report.records.stage("reward"), report.records.stage("ppo")
        if reward_stage and ppo and reward_stage.final_rows and ppo.first_rows and ppo.final_rows:
            pairs, first, last = reward_stage.final_rows, ppo.first_rows, ppo.final_rows
            groups = [
                (
                    "pairs that validated the reward model",
                    7,
                    [row[key] for row in pairs for key in ("chosen", "rejected")],
                ),
                ("completions before PPO", 0, [row["reward"] for row in first]),
                ("completions at the end", 1, [row["reward"] for row in last]),
            ]
            groups = [(label, color, [x for x in xs if isinstance(x, float)]) for label, color, xs in groups]
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


def cost_tables(reports: Sequence[RunReport]) -> list[Cost]:
    """Return time, memory and speed of each stage."""
    costs = []
    for report in reports:
        for stage in report.stages:
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
                share = f" ({peak / planned - 1:+.0%})" if peak else ""
                rows.append(("planned", f"{format_bytes(planned)}{share}"))
            if speed := summary.get("tflops"):
                rows.append(("speed", f"{float(f'{speed:.2g}'):,g} TFLOP/s"))
            phases = {name: value for name, value in summary.get("phases", {}).items() if value > 0}
            total = sum(phases.values()) or 1
            labels = [
                (name, number % COLORS, f"{value / total:.0%}") for number, (name, value) in enumerate(phases.items())
            ]
            bar = stacked_bar("phases", list(phases.items())) if len(phases) > 1 else ""
            costs.append(Cost(_label(report, records, len(reports)), rows, bar, labels if bar else []))
    return costs


def completion_table(report: RunReport) -> dict[str, Any] | None:
    """Return the same held-out prompts at up to three evaluations of PPO, those whose score rose most first."""
    stage = report.records.stage("ppo")
    if not stage or len(stage.heldout) < 2:
        return None
    steps = sorted(stage.heldout)
    steps = [steps[place] for place in sorted({0, len(steps) // 2, len(steps) - 1})]
    rows = []
    for number in range(min(len(stage.heldout[step]) for step in steps)):
        states = [stage.heldout[step][number] for step in steps]
        if not all(isinstance(state.get(key), int | float) for state in states for key in ("reward", "kl", "tokens")):
            continue  # a number was not finite
        rows.append(
            {
                "number": number,
                "prompt": _cut(states[0]["prompt"]),
                "completions": [_cut(state["completion"]) for state in states],
                "reward": [round(state["reward"], 2) for state in states],
                "change": round(states[-1]["reward"] - states[0]["reward"], 2),
                "kl": round(states[-1]["kl"], 2),
                "tokens": int(states[-1]["tokens"]),
                "approved": states[-1].get("approved"),
            }
        )
    by_change = sorted(rows, key=lambda row: -row["change"])
    half = _COMPLETIONS_SHOWN // 3
    chosen = {row["number"]: row for row in [*by_change[:half], *by_change[-half:], *rows[:half]]}
    if not chosen:
        return None
    shown = sorted(chosen.values(), key=lambda row: -row["change"])
    return {"steps": steps, "rows": shown, "total": len(rows), "judged": shown[0]["approved"] is not None}


def text_tables(report: RunReport) -> list[dict[str, Any]]:
    """Return completions of the same prompts through SFT and DPO, whose evaluations record no more."""
    tables = []
    for stage in report.records.stages:
        if stage.name == "ppo":
            continue
        by_tag: dict[str, list[tuple[int, str]]] = {}
        for text in stage.completions:
            by_tag.setdefault(text.tag, []).append((text.step, text.text))
        rows = []
        for entries in by_tag.values():
            chosen = [entries[place] for place in sorted({0, len(entries) // 2, len(entries) - 1})]
            prompt, _, _ = chosen[0][1].partition("\n")
            rows.append(
                {"prompt": _cut(prompt), "texts": [(step, _cut(text.partition("\n")[2])) for step, text in chosen]}
            )
        if rows:
            tables.append({"title": stage.title, "rows": rows})
    return tables


def token_samples(report: RunReport) -> list[dict[str, Any]]:
    """Return sequences of rollouts with numbers for each token, evenly spaced over the run."""
    stage = report.records.stage("ppo")
    samples = [sample for sample in stage.samples if sample.get("pieces")] if stage else []
    count = min(_TOKEN_SAMPLES, len(samples))
    chosen = [samples[place * len(samples) // count] for place in range(count)]
    result = []
    for sample in chosen:
        numbers = {
            name: [0.0 if value is None else round(value, 3) for value in values[:400]]
            for name, values in sample["by_token"].items()
            if any(values)
        }
        result.append(
            {
                **{key: sample[key] for key in ("step", "tokens")},
                "prompt": _cut(sample["prompt"]),
                "score": _format(sample["score"]),
                "kl": _format(sample["kl"]),
                "pieces": sample["pieces"][:400],
                "numbers": numbers,
            }
        )
    return result


def _format(value: float | None) -> str:
    return "not finite" if value is None else format_number(value)


def _cut(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]}…"


def provenance(report: RunReport) -> dict[str, Any]:
    """Return the origin of a run: settings that differ from the defaults, data, versions, device and commands."""
    description = report.records.description
    accelerator = description.get("accelerator") or {}
    precision = accelerator.get("precision") or {}
    device = accelerator.get("device") or {}
    facts = {
        "accelerator": f"{accelerator.get('name', '')}: {accelerator.get('reason', '')}".strip(": "),
        "device": f"{device.get('count', '')} × {device.get('model', '')}, {device.get('software', '')}".strip(" ×,"),
        "precision": f"{precision.get('name', '')}: {precision.get('reason', '')}".strip(": "),
        "attention": ", ".join(
            f"{choice['name']} ({model})" for model, choice in (accelerator.get("attention") or {}).items()
        ),
    }
    return {
        "settings": changed_settings(report.records.config, [stage.name for stage in report.records.stages]),
        "data": [
            (name, f"{entry.get('rows', 0):,} rows", f"{entry['dropped']:,} dropped" if entry.get("dropped") else "")
            for name, entry in description.get("data", {}).items()
        ],
        "versions": [*description.get("versions", {}).items()],
        "facts": [(name, value) for name, value in facts.items() if value],
        "commands": [
            (invocation.get("started", "").replace("T", " ")[:19], invocation.get("command", ""))
            for invocation in description.get("invocations", [])
        ],
    }


def changed_settings(config: Config, stages: Sequence[Stage]) -> list[tuple[str, str, str]]:
    """Return (key, value, default) of the settings of `stages` that differ from the defaults."""
    ours, default = _flatten(config.model_dump(mode="json")), _flatten(Config().model_dump(mode="json"))
    ignored = ("output", *(f"{name}." for name in EVERY_STAGE if name not in stages))
    return [
        (key, _show(value), _show(default.get(key)))
        for key, value in ours.items()
        if value != default.get(key) and not key.startswith(ignored)
    ]


def differing_settings(reports: Sequence[RunReport]) -> list[tuple[str, list[str]]]:
    """Return the settings in which runs differ, each with its value in every run."""
    settings = [_flatten(report.records.config.model_dump(mode="json")) for report in reports]
    keys = dict.fromkeys(key for one in settings for key in one if key != "output")
    return [
        (key, [_show(one.get(key)) for one in settings])
        for key in keys
        if any(one.get(key) != settings[0].get(key) for one in settings)
    ]


def comparison_table(reports: Sequence[RunReport]) -> dict[str, Any]:
    """Return the held-out numbers after training of several runs, their time and memory, side by side.

    Each cell is a text, and the number's share of the largest one of its column in percent, for a bar.
    """
    columns: dict[tuple[str, str], str] = {}
    for report in reports:
        for stage in report.records.stages:
            for name in _headlines(stage):
                columns[stage.name, name] = f"{stage.name} {name.replace('_', ' ')}"
    formats: list[Callable[[float], str]] = [partial(format_value, name) for _, name in columns]
    formats += [format_seconds, format_bytes]
    rows: list[list[float | None]] = [
        [_last_heldout(report, *column) for column in columns] + _costs(report) for report in reports
    ]
    cells = []
    for numbers, form in zip(zip(*rows), formats):
        most = max((abs(number) for number in numbers if number is not None), default=0.0) or 1.0
        cells.append(
            [("", 0) if number is None else (form(number), round(100 * max(number, 0) / most)) for number in numbers]
        )
    titles = [*columns.values(), "time", "peak memory"]
    return {"columns": titles, "rows": list(zip(reports, zip(*cells)))}


def _last_heldout(report: RunReport, stage: str, name: str) -> float | None:
    records = next((records for records in report.records.stages if records.name == stage), None)
    curve = records.curve(f"heldout_{name}") if records else None
    return curve.last if curve else None


def _costs(report: RunReport) -> list[float | None]:
    """Return the seconds and the peak memory of a run's complete stages."""
    summaries = [stage.records.summary for stage in report.stages if stage.records.summary]
    if not summaries:
        return [None, None]
    return [sum(one.get("seconds", 0.0) for one in summaries), max(one.get("peak_memory", 0) for one in summaries)]


def _headlines(stage: StageRecords) -> list[str]:
    wanted = {
        "sft": ("perplexity",),
        "reward": ("accuracy",),
        "dpo": ("accuracy", "margin"),
        "ppo": ("reward", "approved_share", "kl", "entropy", "response_length"),
    }[stage.name]
    return [name for name in wanted if stage.curve(f"heldout_{name}")]


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        flat: dict[str, Any] = {}
        for key, item in value.items():
            flat |= _flatten(item, f"{prefix}.{key}" if prefix else str(key))
        return flat
    return {prefix: value}


def _show(value: Any) -> str:
    if value is None or value in ("", [], {}):
        return "(empty)"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return ", ".join(_show(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_show(item)}" for key, item in value.items() if item not in (None, [], {}))
    return str(value)


def now() -> str:
    """Return the time for the page's footer."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
