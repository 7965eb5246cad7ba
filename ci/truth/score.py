"""Score signals and rules for stopping on the results of the bench, and print the tables of docs/diagnosis.md.

Limits are set on runs with even seeds and reported on those with odd ones.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from signals import PUBLISHED, SIGNALS, area_under_curve, cut, limit_at

RESULTS = Path(__file__).with_name("results")
_BAD, _GOOD = 0.15, 0.05  # of true quality lost since its peak: more is a bad run, less a good one
_FALSE_ALARMS = 0.05
_FIRST = 3  # evaluations before a signal is read

Result = dict[str, Any]


def main() -> None:
    """Print the tables."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))]
    if not results:
        sys.exit("no results: train the runs first (python ci/truth/run.py)")
    good = [result["seed"] % 2 for result in results if loss(result) < _GOOD]
    bad = [result["seed"] % 2 for result in results if loss(result) > _BAD]
    if not {0, 1} <= set(good) or 1 not in bad:
        sys.exit(
            f"{len(good)} good and {len(bad)} over-optimized runs are too few: train good ones with even and with odd "
            "seeds, and over-optimized ones with odd seeds (python ci/truth/run.py --list)"
        )
    for line in (*describe_runs(results), "", *describe_signals(results), "", *describe_stops(results)):
        print(line)


def quality(result: Result) -> list[float]:
    """Return the share of held-out completions that the rule approves, at each evaluation."""
    return list(result["heldout"]["heldout_approved_share"])


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
    """Return the step of the first evaluation whose statistic exceeds `limit`; None if none does."""
    above = [place for place, value in enumerate(values(result, statistic)) if value > limit]
    return int(result["steps"][above[0] + _FIRST - 1]) if above else None


def describe_stops(results: Sequence[Result]) -> Iterator[str]:
    """Yield the table of rules for stopping: the true quality of the model that each keeps, and its regret."""
    runs = [result for result in results if result["group"] == "pairs" and result["seed"] % 2]
    good = [result for result in results if loss(result) < _GOOD and result["seed"] % 2 == 0]
    rules: dict[str, Callable[[Result], float]] = {
        "the last model": lambda run: quality(run)[-1],
        "keep: best(reward)": lambda run: quality(run)[_argmax(run["heldout"]["heldout_reward"])],
    }
    for name, (_, statistic) in SIGNALS.items():
        limit = limit_at([max(values(run, statistic)) for run in good], _FALSE_ALARMS) if good else float("inf")
        rules[f"stop at {name}"] = lambda run, statistic=statistic, limit=limit: _stopped(run, statistic, limit)  # type: ignore[misc]
    yield "| rule | quality | regret |"
    yield "|---|---|---|"
    best = fmean(max(quality(run)) for run in runs) if runs else 0.0
    yield f"| the best model by the rule of the world | {best:.0%} | |"
    for name, rule in rules.items():
        kept = fmean(map(rule, runs)) if runs else 0.0
        yield f"| {name} | {kept:.0%} | {(best - kept) / max(best, 1e-9):.0%} |"


def _stopped(run: Result, statistic: Callable[[Any], float], limit: float) -> float:
    """Return the true quality of the model before the first evaluation whose statistic exceeds the limit."""
    step = first_step(run, statistic, limit)
    place = len(run["steps"]) - 1 if step is None else max(run["steps"].index(step) - 1, 0)
    return quality(run)[place]


def _argmax(numbers: Sequence[float]) -> int:
    return max(range(len(numbers)), key=numbers.__getitem__)


if __name__ == "__main__":
    main()
