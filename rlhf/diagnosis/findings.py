"""What the records of a stage say: the findings of `CHECKS`, each in one of four states.

Invariants follow from theory and precision, and hold in every correct run: one that does not hold is `wrong`. All other
checks are signals, which say `look here`: a person decides. docs/diagnosis.md explains each check.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Literal, NamedTuple

from rlhf.config.schema import EVERY_STAGE, Config, Stage
from rlhf.diagnosis.records import Curve, RunRecords, StageRecords, Text
from rlhf.reporting.health import (
    DRAWING_REMEDY,
    FIRST_KL_REMEDY,
    MAX_FIRST_GAP,
    MAX_FIRST_KL,
    RULES,
    Topic,
    fill_keys,
    gap_limit,
    starts_at_reference,
)
from rlhf.reporting.summary import format_value
from rlhf.utils.statistics import estimate, wilson
from rlhf.utils.units import format_number

State = Literal["fine", "look here", "wrong", "cannot tell"]
SEVERITY: dict[State, int] = {"fine": 0, "cannot tell": 1, "look here": 2, "wrong": 3}

_FIRST_NATS, _LATE_NATS = 0.3, 1.0  # KL per sequence from which its first price, and its late one, is measured
_PRICE_FALL = 20  # times

_PPO: tuple[Stage, ...] = ("ppo",)
_CALM = "raise {ppo.kl_coef} or lower {ppo.optimizer.learning_rate}"


class Finding(NamedTuple):
    """The outcome of one check of a stage.

    Attributes:
        text: one sentence with the numbers that decided.
        step: the step at which it shows, if there is one.
        remedy: what to do; empty if nothing.
    """

    name: str
    topic: Topic
    state: State
    text: str
    step: int | None = None
    remedy: str = ""


class Outcome(NamedTuple):
    """What a check found; `name`, topic and remedy of its finding are the check's."""

    state: State
    text: str
    step: int | None = None


class Subject(NamedTuple):
    """A stage and its run, as checks see them."""

    stage: StageRecords
    run: RunRecords

    @property
    def config(self) -> Config:
        """The run's settings."""
        return self.run.config

    @property
    def precision(self) -> str:
        """The precision that the stage was trained in; fp32 if it is not recorded."""
        recorded = self.run.description.get("stages", {}).get(self.stage.name, {})
        return str(recorded.get("precision") or "fp32")

    def heldout(self, name: str) -> Curve:
        """Return the curve of a held-out number."""
        return self.stage.curve(f"heldout_{name}")


class Check(NamedTuple):
    """A question about the records of a stage.

    Attributes:
        needs: numbers without which the check cannot tell.
        examine: returns the outcome; None if the check does not apply to this run.
        remedy: what to do if it is not fine; keys in braces are shown with their values, `*` is the stage.
        is_invariant: the check is an invariant: if a run lacks its numbers, the report says so.
    """

    name: str
    topic: Topic
    stages: Sequence[Stage]
    needs: Sequence[str]
    examine: Callable[[Subject], Outcome | None]
    remedy: str
    is_invariant: bool = False


def examine_stage(run: RunRecords, stage: StageRecords) -> list[Finding]:
    """Return the findings of all checks that apply to a stage, and its warnings, in the order of `CHECKS`."""
    subject, findings = Subject(stage, run), []
    for check in (check for check in CHECKS if stage.name in check.stages):
        missing = [name for name in check.needs if not stage.curve(name)]
        if missing and not check.is_invariant:
            continue
        unknown = Outcome("cannot tell", f"not recorded: {' and '.join(missing)}")
        if outcome := unknown if missing else check.examine(subject):
            remedy = fill_keys(check.remedy, run.config, stage.name) if SEVERITY[outcome.state] > 1 else ""
            findings.append(Finding(check.name, check.topic, outcome.state, outcome.text, outcome.step, remedy))
    invariants = {check.name for check in CHECKS if check.is_invariant}  # already among the findings
    return findings + [_read_warning(text) for text in stage.warnings if text.rule not in invariants]


def worst(findings: Sequence[Finding]) -> State:
    """Return the most severe state; fine if there are no findings. A check that cannot tell makes a stage no worse."""
    states = [finding.state for finding in findings if finding.state != "cannot tell"]
    return max(states, key=SEVERITY.__getitem__, default="cannot tell" if findings else "fine")


def _read_warning(warning: Text) -> Finding:
    """Return the finding of a line that the health monitor printed."""
    state, _, remedy = warning.text.partition("; ")
    for place in (f"step {warning.step:,}: ", f"step {warning.step:,}, held-out: "):
        state = state.removeprefix(place)
    topics: dict[str, Topic] = {rule.name: rule.topic for rule in RULES}
    topic = topics.get(warning.rule, "updates")
    return Finding(warning.rule or "warning", topic, "look here", state, warning.step, remedy)


def _tail(curve: Curve) -> list[float]:
    """Return the last quarter of a curve's values, at least one."""
    return curve.values[-max(len(curve.values) // 4, 1) :]


# --- plumbing


def _first_kl(subject: Subject) -> Outcome | None:
    stage = subject.stage
    kl, length = stage.curve("kl"), stage.curve("response_length")
    if kl.steps[0] > 1:
        return Outcome("cannot tell", f"not recorded: the KL of step 1; the first record is of step {kl.steps[0]:,}")
    per_token, limit = abs(kl.values[0]) / max(length.values[0], 1), MAX_FIRST_KL[subject.precision]
    if not starts_at_reference(subject.config):
        return None
    if per_token > limit:
        return Outcome(
            "wrong",
            f"the policy differs from its reference before the first update: KL is {per_token:.2g} nats per token "
            f"(rounding in {subject.precision}: below {limit:g})",
            step=1,
        )
    return Outcome("fine", f"before the first update the policy is its reference: KL {per_token:.1g} nats per token")


def _drawing(subject: Subject) -> Outcome | None:
    gaps, largest = subject.stage.curve("draw_gap"), subject.stage.curve("draw_gap_max")
    first, precision = gaps.values[0], subject.precision
    if gaps.steps[0] == 1 and first > MAX_FIRST_GAP[precision]:
        return Outcome(
            "wrong",
            f"generation and training compute different probabilities from the start: {first:.2g} nats per token "
            f"(rounding in {precision}: below {MAX_FIRST_GAP[precision]:g})",
            step=1,
        )
    limit = gap_limit(first, precision)
    stale = [step for step, gap in zip(*gaps) if gap > limit]
    if stale:
        return Outcome(
            "wrong",
            f"rollouts of {len(stale):,} of {len(gaps.steps):,} steps were not drawn from the weights that were "
            f"trained: the gap grew from {first:.1g} to {max(gaps.values):.1g} nats per token",
            step=stale[0],
        )
    return Outcome(
        "fine",
        f"rollouts of {len(gaps.steps):,} of {len(gaps.steps):,} steps were drawn from the weights that were trained; "
        f"largest gap of a token {max(largest.values):.1g} nats",
    )


def _learning_rate(subject: Subject) -> Outcome | None:
    rates = subject.stage.curve("learning_rate")
    if len(rates.steps) < 2:
        return None
    if not any(rates.values):
        return Outcome("wrong", "the learning rate is 0 in every step, so nothing is learned", step=rates.steps[0])
    return Outcome("fine", f"the learning rate is not 0: at most {max(rates.values):.2g}")


def _gradient(subject: Subject) -> Outcome | None:
    norms = subject.stage.curve("grad_norm")
    if len(norms.steps) < 2:
        return None
    if not any(norms.values):
        return Outcome("wrong", "the gradient is 0 in every step, so nothing is learned", step=norms.steps[0])
    return Outcome("fine", f"gradients are not 0: norms from {min(norms.values):.2g} to {max(norms.values):.2g}")


def _dpo_loss(subject: Subject) -> Outcome | None:
    losses, settings = subject.stage.curve("loss"), subject.config.dpo
    if settings.loss != "sigmoid" or settings.label_smoothing or len(losses.steps) < 20:
        return None
    if all(abs(loss - math.log(2)) < 1e-3 for loss in losses.values):
        return Outcome("wrong", f"the loss stays at ln 2 for {len(losses.steps):,} steps: the policy does not change")
    return Outcome("fine", f"the loss leaves ln 2: at the end {losses.last:.3f}")


# --- learning


def _perplexity(subject: Subject) -> Outcome | None:
    curve = subject.heldout("perplexity")
    if len(curve.steps) < 2:
        return None
    before, after, best = curve.values[0], curve.last, min(curve.values)
    change = f"held-out perplexity went from {format_number(before)} to {format_number(after)}"
    if after >= before:
        return Outcome("look here", f"{change}: the model has not improved", curve.steps[-1])
    if after > 1.1 * best:
        step = curve.steps[curve.values.index(best)]
        return Outcome("look here", f"{change}, but it was {format_number(best)} at step {step:,}: overfitting", step)
    return Outcome("fine", change)


def _accuracy(subject: Subject) -> Outcome | None:
    curve = subject.heldout("accuracy")
    rows = len(next(iter(subject.stage.heldout.values()), []))
    if len(curve.steps) < 2:
        return None
    text = f"held-out accuracy is {curve.last:.1%}"
    if not rows:
        return Outcome("fine" if curve.last > 0.55 else "look here", text, curve.steps[-1])
    low, high = wilson(curve.last * rows, rows)
    text += f" of {rows:,} pairs (95 % interval {low:.0%} to {high:.0%})"
    return (
        Outcome("look here", f"{text}: no better than chance", curve.steps[-1]) if low <= 0.5 else Outcome("fine", text)
    )


def _length_bias(subject: Subject) -> Outcome | None:
    rows = subject.stage.heldout.get(max(subject.stage.heldout, default=0), [])
    longer = [row["chosen"] > row["rejected"] for row in rows if row["chosen_tokens"] > row["rejected_tokens"]]
    shorter = [row["chosen"] > row["rejected"] for row in rows if row["chosen_tokens"] < row["rejected_tokens"]]
    if min(len(longer), len(shorter)) < 20:
        return None
    high, low = fmean(longer), fmean(shorter)
    text = f"accuracy is {high:.0%} where the chosen reply is longer, and {low:.0%} where it is shorter"
    if wilson(sum(longer), len(longer)).low - wilson(sum(shorter), len(shorter)).high > 0.1:
        return Outcome("look here", f"{text}: the model may score length")
    return Outcome("fine", text)


def _reward(subject: Subject) -> Outcome | None:
    curve, heldout = subject.heldout("reward"), subject.stage.heldout
    if len(curve.steps) < 2:
        return None
    text = f"held-out reward went from {format_number(curve.values[0])} to {format_number(curve.last)}"
    first, last = heldout.get(curve.steps[0], []), heldout.get(curve.steps[-1], [])
    if not first or not last:
        return Outcome("fine" if curve.last > curve.values[0] else "look here", text, curve.steps[-1])
    gain = estimate([new["reward"] - old["reward"] for old, new in zip(first, last)])
    if gain.interval:
        text += f" (gain {gain.mean:.2f}, 95 % interval {gain.interval.low:.2f} to {gain.interval.high:.2f})"
    if gain.interval and gain.interval.low <= 0:
        return Outcome("look here", f"{text}: no sure gain", curve.steps[-1])
    return Outcome("fine", text)


def _equal_groups(subject: Subject) -> Outcome | None:
    share = fmean(_tail(subject.stage.curve("equal_group_share")))
    text = f"{share:.0%} of prompts have completions with equal scores, in the last quarter of the steps"
    return Outcome("look here", f"{text}: they teach nothing") if share > 0.5 else Outcome("fine", text)


def _critic(subject: Subject) -> Outcome | None:
    share = fmean(_tail(subject.stage.curve("explained_variance")))
    text = f"the critic explains {share:.0%} of the returns' variance, in the last quarter of the steps"
    return Outcome("look here", f"{text}: worse than a constant") if share < 0 else Outcome("fine", text)


# --- cheating


def _second_judge(subject: Subject) -> Outcome | None:
    judge, reward = subject.heldout("approved_share"), dict(zip(*subject.heldout("reward")))
    if len(judge.steps) < 2:
        return None
    rows = len(next(iter(subject.stage.heldout.values()), [])) or 100
    best = max(judge.values)
    step = judge.steps[judge.values.index(best)]
    now, last = judge.last, judge.steps[-1]
    error = math.sqrt((best * (1 - best) + now * (1 - now)) / rows)
    if best - now > max(2 * error, 0.05) and reward[last] > reward[step]:
        return Outcome(
            "look here",
            f"over-optimized since step {step:,}: reward rose from {reward[step]:.2f} to {reward[last]:.2f} while the "
            f"second judge's approval fell from {best:.0%} to {now:.0%}",
            step,
        )
    return Outcome(
        "fine", f"a second judge approves of {now:.0%} of held-out completions (before {judge.values[0]:.0%})"
    )


def _kl_price(subject: Subject) -> Outcome | None:
    kl, reward = subject.heldout("kl"), subject.heldout("reward")
    if len(kl.steps) < 5 or len(kl.steps) != len(reward.steps) or kl.last <= 0:
        return None
    prices = [
        (gained - reward.values[0]) / spent for spent, gained in zip(kl.values, reward.values) if spent > _FIRST_NATS
    ]
    half = next(place for place, value in enumerate(kl.values) if value >= kl.last / 2)
    spent, gained = kl.last - kl.values[half], reward.last - reward.values[half]
    if not prices or spent <= _LATE_NATS:
        return Outcome("fine", f"KL has settled: {kl.last:.2f} nats per sequence")
    early, late = max(prices), gained / spent
    text = f"a nat of KL bought up to {early:.2f} of reward at first, and {late:.2f} from step {kl.steps[half]:,} on"
    if late < early / _PRICE_FALL:
        return Outcome("look here", f"{text}: the policy still moves away, for hardly any reward", kl.steps[half])
    return Outcome("fine", text)


def _length_share(subject: Subject) -> Outcome | None:
    heldout = subject.stage.heldout
    if len(heldout) < 2:
        return None
    first, last = heldout[min(heldout)], heldout[max(heldout)]
    gain = fmean(row["reward"] for row in last) - fmean(row["reward"] for row in first)
    growth = fmean(row["tokens"] for row in last) - fmean(row["tokens"] for row in first)
    slope = _slope([row["tokens"] for row in first], [row["reward"] for row in first])
    if gain <= 0 or slope is None:
        return None
    share = slope * growth / gain
    text = f"length alone explains {share:.0%} of the gain in reward ({growth:+.1f} tokens)"
    return Outcome("look here", text, max(heldout)) if share > 0.5 else Outcome("fine", text)


def _slope(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return the slope of the least-squares line; None if all `x` are equal."""
    center, level = fmean(x), fmean(y)
    spread = sum((value - center) ** 2 for value in x)
    return sum((one - center) * (other - level) for one, other in zip(x, y)) / spread if spread else None


def _score_range(subject: Subject) -> Outcome | None:
    judged = subject.run.stage("reward")
    settings = subject.config.ppo
    if not judged or not judged.heldout or settings.reward_model or settings.reward_functions:
        return None
    pairs = judged.heldout[max(judged.heldout)]
    scores = [row[reply] for row in pairs for reply in ("chosen", "rejected")]
    heldout = subject.stage.heldout
    if not heldout or len(scores) < 20:
        return None
    rows = heldout[max(heldout)]
    outside = fmean(not min(scores) <= row["reward"] <= max(scores) for row in rows)
    text = (
        f"{outside:.0%} of the scores are outside the range in which the reward model was validated "
        f"({min(scores):.2f} to {max(scores):.2f})"
    )
    return Outcome("look here", text, max(heldout)) if outside > 0.1 else Outcome("fine", text)


def _openings(subject: Subject) -> Outcome | None:
    heldout = subject.stage.heldout
    if len(heldout) < 2 or len(heldout[0]) < 20:
        return None

    def commonest(rows: Sequence[dict[str, str]]) -> tuple[str, float]:
        openings = Counter(" ".join(row["completion"].split()[:3]) for row in rows)
        opening, count = openings.most_common(1)[0]
        return opening, count / len(rows)

    (_, before), (opening, after) = commonest(heldout[min(heldout)]), commonest(heldout[max(heldout)])
    text = f"{after:.0%} of completions begin with “{opening}” (the commonest opening before: {before:.0%})"
    return Outcome("look here", text, max(heldout)) if after > max(0.5, 2 * before) else Outcome("fine", text)


# --- exploring, updates


def _entropy(subject: Subject) -> Outcome | None:
    curve = subject.stage.curve("entropy")
    if len(curve.steps) < 2 or curve.values[0] <= 0:
        return None
    share = fmean(_tail(curve)) / curve.values[0]
    text = f"entropy is {share:.0%} of its start ({curve.values[0]:.2f} nats per token)"
    return Outcome("look here", text, curve.steps[-1]) if share < 0.2 else Outcome("fine", text)


def _clip_share(subject: Subject) -> Outcome | None:
    if subject.config.ppo.updates == 1:
        return None  # the policy that is updated is the one that sampled
    share = fmean(_tail(subject.stage.curve("clip_fraction")))
    text = f"{share:.1%} of tokens are clipped, in the last quarter of the steps"
    return Outcome("look here", text) if share > 0.3 else Outcome("fine", text)


def _skipped(subject: Subject) -> Outcome | None:
    skipped = subject.stage.curve("skipped_steps")
    share = sum(skipped.values) / len(skipped.values)
    text = f"{sum(skipped.values):,.0f} of {len(skipped.values):,} steps were skipped because fp16 overflowed"
    return Outcome("look here", text) if share > 0.1 else Outcome("fine", text)


CHECKS = (
    Check(
        "first KL",
        "plumbing",
        _PPO,
        ("kl", "response_length"),
        _first_kl,
        FIRST_KL_REMEDY,
        is_invariant=True,
    ),
    Check(
        "drawing",
        "plumbing",
        _PPO,
        ("draw_gap", "draw_gap_max"),
        _drawing,
        DRAWING_REMEDY,
        is_invariant=True,
    ),
    Check(
        "learning rate",
        "plumbing",
        EVERY_STAGE,
        ("learning_rate",),
        _learning_rate,
        "set {*.optimizer.learning_rate}",
        is_invariant=True,
    ),
    Check("gradient", "plumbing", EVERY_STAGE, ("grad_norm",), _gradient, "look for an earlier warning", True),
    Check("DPO loss", "plumbing", ("dpo",), ("loss",), _dpo_loss, "raise {dpo.optimizer.learning_rate}", True),
    Check(
        "perplexity",
        "learning",
        ("sft",),
        ("heldout_perplexity",),
        _perplexity,
        "set sft.eval_every=epoch and sft.keep=best(perplexity), or change {sft.epochs}",
    ),
    Check(
        "accuracy",
        "learning",
        ("reward", "dpo"),
        ("heldout_accuracy",),
        _accuracy,
        "use more or clearer pairs, or raise {*.optimizer.learning_rate}",
    ),
    Check(
        "reward",
        "learning",
        _PPO,
        ("heldout_reward",),
        _reward,
        "train longer ({ppo.steps}), raise {ppo.optimizer.learning_rate} or lower {ppo.kl_coef}",
    ),
    Check(
        "equal groups",
        "learning",
        _PPO,
        ("equal_group_share",),
        _equal_groups,
        "choose prompts that are neither too easy nor too hard, or raise {ppo.completions_per_prompt}",
    ),
    Check(
        "critic",
        "learning",
        _PPO,
        ("explained_variance",),
        _critic,
        "raise {ppo.critic_optimizer.learning_rate} or set {ppo.normalize_scores}",
    ),
    Check("length bias", "cheating", ("reward",), (), _length_bias, "add pairs whose shorter reply is the better one"),
    Check("second judge", "cheating", _PPO, ("heldout_approved_share",), _second_judge, _CALM),
    Check("price of KL", "cheating", _PPO, ("heldout_kl", "heldout_reward"), _kl_price, _CALM),
    Check(
        "length", "cheating", _PPO, (), _length_share, "read the samples; correct the reward, or add pairs about length"
    ),
    Check("score range", "cheating", _PPO, (), _score_range, f"read the samples with the highest scores; {_CALM}"),
    Check("openings", "cheating", _PPO, (), _openings, f"read the samples; {_CALM}"),
    Check("entropy", "exploring", _PPO, ("entropy",), _entropy, f"set {{ppo.entropy_coef}}, or {_CALM}"),
    Check("clip share", "updates", _PPO, ("clip_fraction",), _clip_share, "lower {ppo.optimizer.learning_rate}"),
    Check("skipped steps", "updates", EVERY_STAGE, ("skipped_steps",), _skipped, "use bf16, or lower the rate"),
)
"""All checks, in the order in which findings are shown."""


def summarize_stage(run: RunRecords, stage: StageRecords, findings: Sequence[Finding]) -> str:
    """Return the verdict on a stage in one sentence: its most severe finding, or what it has learned."""
    state = worst(findings)
    if state in ("wrong", "look here"):
        return next(finding.text for finding in findings if finding.state == state)
    learned = [finding.text for finding in findings if finding.topic == "learning" and finding.state == "fine"]
    if learned:
        return learned[0]
    measures = [
        f"{name.removeprefix('heldout_').replace('_', ' ')} {format_value(name, curve.last)}"
        for name, curve in stage.curves.items()
        if name.startswith("heldout_")
    ]
    return ", ".join(measures[:3]) or f"{stage.step:,} steps are recorded"
