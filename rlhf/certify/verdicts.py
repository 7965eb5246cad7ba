"""Comparisons of a device's steps with the golden numbers, in the device's process; each returns facts for a report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.certify.golden import Verdict, compare, count_comparisons, judge_draws, reach, read_golden
from rlhf.certify.sampling import SLACK, compare_sampling
from rlhf.certify.trace import trace_steps
from rlhf.utils.units import format_number

if TYPE_CHECKING:
    from rlhf.config.schema import Stage
    from rlhf.lockstep.side import Side

Facts = dict[str, Any]


def compare_steps(side: Side, stage: Stage, precision: str, steps: int) -> Facts:
    """Take steps with the golden completions, and compare each phase of the first step, and the curves of all."""
    golden = read_golden()
    right = golden[stage]
    trace = trace_steps(side, steps, right.truth.ids)
    verdicts = compare(right, trace, precision, reach(right.seeds, count_comparisons(golden)), steps)
    return report(verdicts, stage, precision)


def compare_draws(side: Side, precision: str, steps: int) -> Facts:
    """Compare tokens of fixed logits, and the completions that PPO draws, with the distribution they come from."""
    sampled = compare_sampling(side.accelerator)
    verdict = judge_draws(trace_steps(side, steps), count_comparisons(read_golden()), steps)
    facts = report([verdict], "ppo", precision)
    wrong = [
        f"{name}: the draws are {format_number(max(draws))} from those in float64, more than {SLACK:g}"
        for name, draws in sampled.items()
        if not max(draws) <= SLACK
    ]
    return facts | {
        "tokens of fixed logits, from float64": {name: _finite(max(draws)) for name, draws in sampled.items()},
        "failure": "; ".join(filter(None, [*wrong, facts["failure"]])),
    }


def compare_captured(side: Side, folder: Path, precision: str) -> Facts:
    """Take PPO's first step recorded or compiled, and again operator by operator, and compare the two."""
    accelerator, golden = side.accelerator, read_golden()
    capture = accelerator.kernels.capabilities()["graph_capture"]
    if not capture.ok:
        return {"recorded by": f"nothing: not offered by this backend ({capture.reason})"}
    right, state = golden["ppo"], str(folder / "start")
    side.save_state(0, state)
    recorded = trace_steps(side, 1, right.truth.ids)
    facts = {"recorded by": capture.implementation, "graphs": accelerator.compilations()}
    side.load_state(state)
    with side.forced_eager():
        plain = trace_steps(side, 1, right.truth.ids)
    factor = reach(right.seeds, count_comparisons(golden))
    verdicts = compare(replace(right, truth=recorded), plain, precision, factor, steps=1)
    return facts | {"fallbacks": accelerator.fallbacks} | report(verdicts, "ppo", precision, "recorded", "plain")


def report(
    verdicts: Sequence[Verdict], stage: str, precision: str, golden: str = "golden", here: str = "here"
) -> Facts:
    """Return the worst verdict of each phase, and a line about the first that is beyond its band, if there is one."""
    worst: dict[tuple[str, bool], Verdict] = {}
    for verdict in verdicts:
        key = (verdict.quantity.name.phase, verdict.quantity.kind == "curve")
        if key not in worst or verdict.ratio > worst[key].ratio:
            worst[key] = verdict
    rows = [
        {
            "stage": stage,
            "precision": precision,
            "phase": verdict.quantity.name.phase,
            "worst": str(verdict.quantity.name._replace(phase="")),
            "by": verdict.quantity.kind,
            "place": verdict.place,
            **{
                name: _finite(number)
                for name, number in ((golden, verdict.golden), (here, verdict.here), ("of band", verdict.ratio))
            },
        }
        for verdict in worst.values()
    ]
    beyond = [verdict for verdict in verdicts if not verdict.ratio <= 1]
    failure = ""
    if beyond:
        count = f"{len(beyond)} of {len(verdicts)} quantities are beyond their bands"
        failure = f"{stage} in {precision}: {_explain(beyond[0], golden)} ({count})"
    return {"compared": len(verdicts), "rows": rows, "failure": failure}


def _finite(number: float) -> float | str:
    """Return the number, or its name if JSON has none for it."""
    return number if math.isfinite(number) else str(number)


def _explain(verdict: Verdict, golden: str) -> str:
    """Return what is wrong with a quantity; `golden` names the numbers that it is compared with."""
    quantity, place = verdict.quantity, f"{verdict.quantity.name}, {verdict.place}"
    if math.isnan(verdict.golden):
        return place
    values = f"{place}: {verdict.here:.9g}, {golden} {verdict.golden:.9g}"
    if math.isfinite(verdict.ratio):
        return f"{values}; its {quantity.kind} is {format_number(verdict.ratio)} times its band"
    return f"{values}; it must be equal" if quantity.kind == "exact" else f"{values}; it is not finite, or missing"
