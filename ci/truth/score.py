"""Score signals and rules for stopping on the results, and print the tables of docs/diagnosis.md.

Limits are set on runs with even seeds and reported on those with odd ones.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from signals import PUBLISHED, SIGNALS, Prefix, area_under_curve, cut, judge_fall, limit_at

from rlhf.config.schema import Config
from rlhf.reporting.health import HealthMonitor

RESULTS = Path(__file__).with_name("results")
_BAD, _GOOD = 0.15, 0.08  # of true quality lost since its peak: more is a bad run, less a good one
_FALSE_ALARMS = 0.05
_FIRST = 3  # evaluations before a signal is read

Result = dict[str, Any]


def main() -> None:
    """Print the tables."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))]
    if not results:
        sys.exit("no results: train the runs first (python ci/truth/run.py)")
    parities = [result["seed"] % 2 for result in results]
    good = [parity for parity, result in zip(parities, results) if loss(result) < _GOOD]
    bad = [parity for parity, result in zip(parities, results) if loss(result) > _BAD]
    if not {0, 1} <= set(good) or 1 not in bad:
        sys.exit(
            f"{len(good)} good and {len(bad)} over-optimized runs are too few: train good ones with even and with odd "
            "seeds, and over-optimized ones with odd seeds (python ci/truth/run.py --list)"
        )
    tables = (describe_runs, describe_choices, describe_stops, describe_signals)
    print("\n\n".join("\n".join(describe(results)) for describe in tables))


def quality(result: Result) -> list[float]:
    """Return the share of held-out completions that the rule approves, at each evaluation.

    From the first step on it is the mean with the evaluations before and after: one alone is of 128 completions, so
    that the best of 20 is as likely to be luck as to be quality.
    """
    first, *values = result["heldout"]["heldout_approved_share"]
    return [first, *(fmean(values[max(place - 1, 0) : place + 2]) for place in range(len(values)))]


def loss(result: Result) -> float:
    """Return the true quality that a run has lost since its peak."""
    return max(quality(result)) - quality(result)[-1]


def describe_runs(results: Sequence[Result]) -> Iterator[str]:
    """Yield the table of groups: true quality at its peak and at the end."""
    yield "| runs | number | quality at its peak | at the end | over-optimized |"
    yield "|---|---|---|---|---|"
    for group in dict.fromkeys(result["group"] for result in results):
        runs = [result for result in results if result["group"] == group]
        peak, end = (fmean(choose(quality(run)) for run in runs) for choose in (max, lambda values: values[-1]))
        bad = sum(loss(run) > _BAD for run in runs)
        yield f"| {group} | {len(runs)} | {peak:.0%} | {end:.0%} | {bad} |"


def describe_signals(results: Sequence[Result]) -> Iterator[str]:
    """Yield the table of signals: area under the curve, detections at 5 % false alarms, lead, and published limits."""
    bad = [result for result in results if loss(result) > _BAD]
    good = [result for result in results if loss(result) < _GOOD]
    yield f"{len(bad)} over-optimized runs, {len(good)} good ones."
    yield ""
    yield "| signal | source | AUC | found at 5 % false alarms | lead | at its published limit: found | false alarms |"
    yield "|---|---|---|---|---|---|---|"
    for name, (source, statistic) in SIGNALS.items():
        highest = {run["name"]: max(values(run, statistic)) for run in (*bad, *good)}
        area = area_under_curve([highest[run["name"]] for run in bad], [highest[run["name"]] for run in good])
        limit = limit_at([highest[run["name"]] for run in good if run["seed"] % 2 == 0], _FALSE_ALARMS)
        reported = [run for run in bad if run["seed"] % 2]
        fired = [(run, step) for run in reported if (step := first_step(run, statistic, limit)) is not None]
        leads = [run["steps"][quality(run).index(max(quality(run)))] - step for run, step in fired]
        lead = f"{median(leads):+.0f} steps" if leads else ""
        published = ["", ""]
        if name in PUBLISHED:
            published = [f"{_share_fired(runs, statistic, PUBLISHED[name]):.0%}" for runs in (bad, good)]
        found = f"{len(fired) / max(len(reported), 1):.0%}"
        yield f"| {name} | {source} | {area:.2f} | {found} | {lead} | {' | '.join(published)} |"


def _share_fired(runs: Sequence[Result], statistic: Callable[[Any], float], limit: float) -> float:
    return fmean(first_step(run, statistic, limit) is not None for run in runs)


def values(result: Result, statistic: Callable[[Any], float]) -> list[float]:
    """Return a statistic after each evaluation, from the third on."""
    return [statistic(cut(result, count)) for count in range(_FIRST, len(result["steps"]) + 1)]


def first_step(result: Result, statistic: Callable[[Any], float], limit: float) -> int | None:
    """Return the step of the first evaluation, from the third on, whose statistic exceeds `limit`; None: no one's."""
    above = [place for place, value in enumerate(values(result, statistic)) if value > limit]
    return int(result["steps"][above[0] + _FIRST - 1]) if above else None


def describe_choices(results: Sequence[Result]) -> Iterator[str]:
    """Yield the table of models that rules would keep, by pairs of the reward model: true quality and regret.

    The regret is to the best evaluated model by the rule of the world. The rules have no fitted limits, so the table is
    of all seeds.
    """
    runs = [result for result in results if result["group"] == "pairs"]
    sizes = sorted({run["pairs"] for run in runs})
    counts = [f"{size:,} pairs ({sum(run['pairs'] == size for run in runs)} runs)" for size in sizes]
    yield f"| kept | {' | '.join(counts)} |"
    yield "|---|" + "---|" * len(sizes)
    for name, rule in CHOICES.items():
        cells = []
        for size in sizes:
            own = [run for run in runs if run["pairs"] == size]
            best, kept = fmean(max(quality(run)) for run in own), fmean(map(rule, own))
            cells.append(f"{kept:.0%} (regret {(best - kept) / best:.0%})")
        yield f"| {name} | {' | '.join(cells)} |"


def describe_stops(results: Sequence[Result]) -> Iterator[str]:
    """Yield the table of rules that end training: true quality and regret of the model before the alarm.

    Each signal has the limit with the highest mean quality on runs with even seeds, and is reported on the others. A
    fixed step is fitted in the same way: a signal is worth something if it does better.
    """
    runs = [result for result in results if result["group"] in ("pairs", "kl")]
    fitted, reported = ([run for run in runs if run["seed"] % 2 == parity] for parity in (0, 1))
    signals = {name: statistic for name, (_, statistic) in SIGNALS.items()}
    names = ("over-optimized", "good", "all")
    groups = [
        [run for run in reported if loss(run) > _BAD],
        [run for run in reported if loss(run) < _GOOD],
        reported,
    ]
    yield f"| training ends | limit | {' | '.join(f'{name} ({len(own)})' for name, own in zip(names, groups))} |"
    yield "|---|---|---|---|---|"
    for name, statistic in {"never": None, "at a fixed step": _count_evaluations, **signals}.items():
        ends = {run["name"]: values(run, statistic) if statistic else [] for run in runs}
        limits = sorted({value for numbers in ends.values() for value in numbers})
        limits = limits[:: max(1, len(limits) // 200)]
        limit = max(limits, key=lambda limit: fmean(_stop(run, ends, limit) for run in fitted), default=0.0)
        cells = []
        for own in groups:
            best, kept = fmean(max(quality(run)) for run in own), fmean(_stop(run, ends, limit) for run in own)
            cells.append(f"{kept:.0%} (regret {(best - kept) / best:.0%})")
        yield f"| {name} | {f'{limit:.3g}' if statistic else ''} | {' | '.join(cells)} |"


def _count_evaluations(run: Prefix) -> float:
    return len(run.heldout["reward"])


def _stop(run: Result, ends: dict[str, list[float]], limit: float) -> float:
    """Return the true quality of the last model before a statistic exceeds its limit, of the final one if none does."""
    above = (place for place, value in enumerate(ends[run["name"]]) if value > limit)
    first = next(above, None)
    return quality(run)[-1 if first is None else first + _FIRST - 2]


def _keep(metric: str, run: Result, end: int | None = None) -> float:
    """Return the true quality of the model that `keep: best(metric)` saves after `end` evaluations."""
    values = run["heldout"][f"heldout_{metric}"]
    numbers = [
        {name.removeprefix("heldout_"): curve[place] for name, curve in run["heldout"].items()}
        for place in range(len(values))
    ]
    is_ruined = HealthMonitor(Config(), "ppo").is_ruined
    evaluated = range(1, len(values[:end]))
    eligible = [place for place in evaluated if not is_ruined(numbers[0], numbers[place])]
    return quality(run)[max(eligible, key=values.__getitem__, default=evaluated[-1])]


def _stop_by_judge(run: Result) -> float:
    """Return the true quality of the model that `ppo.stop: over_optimized` saves."""
    ends = (count for count in range(2, len(run["steps"]) + 1) if judge_fall(cut(run, count)) > PUBLISHED["judge"])
    return _keep("judge_reward", run, next(ends, None))


CHOICES: dict[str, Callable[[Result], float]] = {
    "the best by the rule of the world": lambda run: max(quality(run)),
    "the last": lambda run: quality(run)[-1],
    "`keep: best(reward)`": partial(_keep, "reward"),
    "`keep: best(judge_reward)`": partial(_keep, "judge_reward"),
    "`stop: over_optimized`": _stop_by_judge,
}
"""Rules by which a model is kept: the true quality of the model that each keeps of a run."""


if __name__ == "__main__":
    main()
