"""Score signals and rules for stopping on the results, and print the tables of docs/diagnosis.md.

Limits are set on runs with even seeds and reported on those with odd ones.
"""

from __future__ import annotations

import json
import math
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
# True quality lost since its peak: a run is over-optimized above one, and good below the other, two standard errors.
_BAD, _GOOD = 0.15, 0.08
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
    """Return the share of held-out completions that the rule approves, at each evaluation."""
    return list(result["heldout"]["heldout_approved_share"])


def peak(result: Result) -> float:
    """Return the true quality of the best model that was evaluated.

    It is found by one half of the held-out rows and read from the other, in both ways: the highest of 21 shares of 128
    rows would be the luckiest, too.
    """
    first, second = ([fmean(map(int, rows[half::2])) for rows in result["approved"]] for half in (0, 1))
    return fmean(read[find.index(max(find))] for find, read in ((first, second), (second, first)))


def loss(result: Result) -> float:
    """Return the true quality that a run has lost since its peak."""
    return peak(result) - quality(result)[-1]


def find_peak_step(result: Result) -> int:
    """Return the step of the highest mean quality of three evaluations that follow each other."""
    values = quality(result)
    means = [fmean(values[max(place - 1, 0) : place + 2]) for place in range(len(values))]
    return int(result["steps"][means.index(max(means))])


def describe_runs(results: Sequence[Result]) -> Iterator[str]:
    """Yield the table of groups: true quality at its peak and at the end."""
    yield "| runs | number | quality at its peak | at the end | over-optimized |"
    yield "|---|---|---|---|---|"
    for group in dict.fromkeys(result["group"] for result in results):
        runs = [result for result in results if result["group"] == group]
        best, end = fmean(map(peak, runs)), fmean(quality(run)[-1] for run in runs)
        bad = sum(loss(run) > _BAD for run in runs)
        yield f"| {group} | {len(runs)} | {best:.0%} | {end:.0%} | {bad} |"


def describe_signals(results: Sequence[Result]) -> Iterator[str]:
    """Yield the table of signals: area under the curve, detections at 5 % false alarms, lead, and published limits."""
    bad = [result for result in results if loss(result) > _BAD]
    good = [result for result in results if loss(result) < _GOOD]
    yield f"{len(bad)} over-optimized runs, {len(good)} good ones."
    yield ""
    odd_bad, odd_good = ([run for run in runs if run["seed"] % 2] for runs in (bad, good))
    fitted = f"limit at 5 % false alarms: found of {len(odd_bad)} | false alarms in {len(odd_good)} | lead"
    published = f"published limit: found of {len(bad)} | false alarms in {len(good)}"
    yield f"| signal | source | AUC | {fitted} | {published} |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, (source, statistic) in SIGNALS.items():
        highest = {run["name"]: max(values(run, statistic)) for run in (*bad, *good)}
        area = area_under_curve([highest[run["name"]] for run in bad], [highest[run["name"]] for run in good])
        limit = limit_at([highest[run["name"]] for run in good if run["seed"] % 2 == 0], _FALSE_ALARMS)
        fired = [(run, step) for run in odd_bad if (step := first_step(run, statistic, limit)) is not None]
        leads = [find_peak_step(run) - step for run, step in fired]
        lead = f"{median(leads):+.0f} steps" if leads else ""
        counts = ["", ""]
        if name in PUBLISHED:
            counts = [str(_count_fired(runs, statistic, PUBLISHED[name])) for runs in (bad, good)]
        own = f"{area:.2f} | {len(fired)} | {_count_fired(odd_good, statistic, limit)} | {lead}"
        yield f"| {name} | {source} | {own} | {' | '.join(counts)} |"


def _count_fired(runs: Sequence[Result], statistic: Callable[[Any], float], limit: float) -> int:
    return sum(first_step(run, statistic, limit) is not None for run in runs)


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
            best, kept = fmean(map(peak, own)), fmean(map(rule, own))
            cells.append(_describe_kept(best, kept))
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
    for name, statistic in {"never": None, "at a fixed step": _count_steps, **signals}.items():
        ends = {run["name"]: values(run, statistic) if statistic else [] for run in runs}
        candidates = sorted({value for run in fitted for value in ends[run["name"]]})
        candidates = [-math.inf, *candidates[:: max(1, len(candidates) // 200)], math.inf]
        kept_by = {limit: fmean(_stop(run, ends, limit) for run in fitted) for limit in candidates}
        best_limits = [limit for limit in candidates if kept_by[limit] == max(kept_by.values())]
        limit, cells = best_limits[len(best_limits) // 2], []
        for own in groups:
            best, kept = fmean(map(peak, own)), fmean(_stop(run, ends, limit) for run in own)
            cells.append(_describe_kept(best, kept))
        yield f"| {name} | {f'{limit:.3g}' if math.isfinite(limit) else 'none'} | {' | '.join(cells)} |"


def _describe_kept(best: float, kept: float) -> str:
    regret = round((best - kept) / best, 2) + 0.0  # -0 is shown as 0
    return f"{kept:.0%} (regret {regret:.0%})"


def _count_steps(run: Prefix) -> float:
    return len(run.training["reward"])


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
    "the best by the rule of the world": peak,
    "the last": lambda run: quality(run)[-1],
    "`keep: best(reward)`": partial(_keep, "reward"),
    "`keep: best(judge_reward)`": partial(_keep, "judge_reward"),
    "`stop: over_optimized`": _stop_by_judge,
}
"""Rules by which a model is kept: the true quality of the model that each keeps of a run."""


if __name__ == "__main__":
    main()
