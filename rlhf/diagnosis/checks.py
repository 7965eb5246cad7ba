"""The checks of a stage's records: what each needs, how it decides, and what to do.

Invariants follow from theory and precision, and hold in every correct run: one that does not hold is `wrong`. All other
checks are signals, which say `look here`: a person decides. docs/diagnosis.md explains each check.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean, quantiles
from typing import Any, NamedTuple

from rlhf.config.schema import EVERY_STAGE, Stage
from rlhf.diagnosis.plumbing import PLUMBING
from rlhf.diagnosis.records import Curve, RunRecords
from rlhf.diagnosis.subject import Check, Outcome, Subject, tail
from rlhf.utils.statistics import (
    Estimate,
    best_of_at,
    best_of_kl,
    estimate,
    expected_best,
    has_fallen_significantly,
    wilson,
)
from rlhf.utils.units import format_number

_FIRST_NATS = 0.3  # KL per sequence from which its first price is measured
_LATE_NATS, _LATE_TOKEN_NATS = 1.0, 0.05  # growth of KL per sequence, and per token, below which KL has settled
PRICE_FALL, MOST_FALL = 20.0, 1000.0  # times, from the early price to the late one
_LOST_PARTS = 0.1  # parts of the reward may lose this share of its gain
_MIN_ROWS = 20

_PPO: tuple[Stage, ...] = ("ppo",)
_CLOSER = "raise {ppo.kl_coef} or lower {ppo.optimizer.learning_rate}"


def _with_numbers(rows: Sequence[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """Return the rows whose numbers under `keys` are all finite."""
    return [row for row in rows if all(isinstance(row.get(key), int | float) for key in keys)]


# --- learning


def _perplexity(subject: Subject) -> Outcome | None:
    curve = subject.heldout("perplexity")
    if len(curve.steps) < 2:
        return None
    before, after, best = curve.values[0], subject.final("perplexity"), min(curve.values)
    change = f"held-out perplexity went from {format_number(before)} to {format_number(after)}"
    if after >= before:
        return Outcome("look here", f"{change}: the model has not improved", subject.stage.final_step)
    if after > 1.1 * best:
        step = curve.steps[curve.values.index(best)]
        return Outcome("look here", f"{change}, but it was {format_number(best)} at step {step:,}: overfitting", step)
    return Outcome("fine", change)


def _accuracy(subject: Subject) -> Outcome | None:
    if len(subject.heldout("accuracy").steps) < 2:
        return None
    accuracy, rows = subject.final("accuracy"), len(subject.stage.final_rows)
    text = f"held-out accuracy is {accuracy:.1%}"
    if not rows:  # DPO records no rows
        chance = accuracy <= 0.5
    else:
        low, high = wilson(accuracy * rows, rows)
        text, chance = f"{text} of {rows:,} pairs (95 % interval {low:.0%} to {high:.0%})", low <= 0.5
    return Outcome("look here", f"{text}: no better than chance") if chance else Outcome("fine", text)


def _length_bias(subject: Subject) -> Outcome | None:
    rows = _with_numbers(subject.stage.final_rows, "chosen", "rejected", "chosen_tokens", "rejected_tokens")
    longer = [row["chosen"] > row["rejected"] for row in rows if row["chosen_tokens"] > row["rejected_tokens"]]
    shorter = [row["chosen"] > row["rejected"] for row in rows if row["chosen_tokens"] < row["rejected_tokens"]]
    if min(len(longer), len(shorter)) < _MIN_ROWS:
        return None
    text = f"accuracy is {fmean(longer):.0%} if the chosen reply is longer, and {fmean(shorter):.0%} if it is shorter"
    if wilson(sum(longer), len(longer)).low - wilson(sum(shorter), len(shorter)).high > 0.1:
        return Outcome("look here", f"{text}: the model may score length")
    return Outcome("fine", text)


def _estimate_gain(subject: Subject) -> Estimate | None:
    """Return the gain in reward over the same held-out prompts; None if rows were not recorded."""
    gains = [
        new["reward"] - old["reward"]
        for old, new in zip(subject.stage.first_rows, subject.stage.final_rows)
        if _with_numbers([old, new], "reward") == [old, new]
    ]
    return estimate(gains) if gains else None


def _reward(subject: Subject) -> Outcome | None:
    curve, stage = subject.heldout("reward"), subject.stage
    if len(curve.steps) < 2:
        return None
    last, gain = subject.final("reward"), _estimate_gain(subject)
    text = f"held-out reward went from {format_number(curve.values[0])} to {format_number(last)}"
    if not gain or not gain.interval:
        return Outcome("fine" if last > curve.values[0] else "look here", f"{text} (no interval: too few prompts)")
    text += f" (gain {gain.mean:.2f}, 95 % interval {gain.interval.low:.2f} to {gain.interval.high:.2f})"
    if gain.interval.low <= 0:
        return Outcome("look here", f"{text}: no significant gain", stage.final_step)
    return Outcome("fine", text)


def _equal_groups(subject: Subject) -> Outcome | None:
    share = fmean(tail(subject.stage.curve("equal_group_share")))
    text = f"{share:.0%} of prompts have completions with equal scores, in the last quarter of the steps"
    return Outcome("look here", f"{text}: they teach nothing") if share > 0.5 else Outcome("fine", text)


def _critic(subject: Subject) -> Outcome | None:
    share = fmean(tail(subject.stage.curve("explained_variance")))
    text = f"the critic explains {share:.0%} of the returns' variance, in the last quarter of the steps"
    return Outcome("look here", f"{text}: worse than a constant") if share < 0 else Outcome("fine", text)


# --- cheating


def _compare_with_reward(name: str, key: str, what: str, style: str) -> Callable[[Subject], Outcome | None]:
    """Return a check: has a held-out number, which PPO does not optimize, fallen while the reward rose?

    Args:
        name: the number, the mean of the rows' `key`.
        what, style: its name and format in the outcome.
    """

    def examine(subject: Subject) -> Outcome | None:
        judged, reward = subject.heldout(name), subject.heldout("reward")
        if len(judged.steps) < 2:
            return None
        best, last = max(judged.values), judged.steps[-1]
        step = judged.steps[judged.values.index(best)]
        before, after = reward.at(step), reward.at(last)
        rows = zip(subject.stage.heldout.get(step, []), subject.stage.heldout.get(last, []))
        pairs = [(old[key], new[key]) for old, new in rows if key in old and key in new]
        has_fallen = pairs and has_fallen_significantly(*zip(*pairs))
        if has_fallen and before is not None and after is not None and after > before:
            return Outcome(
                "look here",
                f"over-optimized since step {step:,}: reward rose from {before:.2f} to {after:.2f} while {what} fell "
                f"from {best:{style}} to {judged.last:{style}}",
                step,
            )
        return Outcome("fine", f"{what} went from {judged.values[0]:{style}} to {judged.last:{style}}")

    return examine


class KLPrice(NamedTuple):
    """Reward per nat of KL: the best early price, and the late one, from `step` on."""

    early: float
    late: float
    step: int

    @property
    def fall(self) -> float:
        """The early price over the late one, at most `MOST_FALL`; `MOST_FALL` if one of them is not above 0."""
        return min(self.early / self.late, MOST_FALL) if self.early > 0 and self.late > 0 else MOST_FALL


def find_kl_price(kl: Curve, reward: Curve, length: float) -> KLPrice | None:
    """Return the price of KL on held-out prompts; None if KL has settled, so that there is no late price.

    Args:
        kl, reward: held-out numbers at the same evaluations; KL in nats per sequence.
        length: tokens of a completion.
    """
    rewards = dict(zip(*reward))
    points = [(step, nats, rewards[step]) for step, nats in zip(*kl) if step in rewards]
    (_, _, start), (_, final_nats, final_reward) = points[0], points[-1]
    least_growth = max(_LATE_NATS, _LATE_TOKEN_NATS * length)
    if final_nats <= least_growth:
        return None
    early = max((gained - start) / nats for _, nats, gained in points if nats > _FIRST_NATS)
    half, half_nats, half_reward = next(point for point in points if point[1] >= final_nats / 2)
    if final_nats - half_nats <= least_growth:
        return None
    return KLPrice(early, (final_reward - half_reward) / (final_nats - half_nats), half)


def _kl_price(subject: Subject) -> Outcome | None:
    kl, lengths = subject.heldout("kl"), subject.heldout("response_length")
    if len(kl.steps) < 5:
        return None
    price = find_kl_price(kl, subject.heldout("reward"), lengths.last if lengths else 0.0)
    if price is None:
        return Outcome("fine", f"KL has settled: {kl.last:.2f} nats per sequence")
    late = f"{price.late:.2f} from step {price.step:,} on"
    text = f"a nat of KL bought up to {price.early:.2f} of reward, and {late}"
    if price.fall > PRICE_FALL:
        return Outcome("look here", f"{text}: the policy still moves away, for hardly any reward", price.step)
    return Outcome("fine", text)


def _best_of_n(subject: Subject) -> Outcome | None:
    """Compare with the best of n completions before training, by the largest n whose KL is at most the policy's."""
    stage, kl = subject.stage, subject.final("kl")
    before = [row.get("rewards") for row in stage.first_rows]
    pairs = [
        (rewards, row["reward"])
        for rewards, row in zip(before, stage.final_rows)
        if rewards and _with_numbers([row], "reward")
    ]
    if not pairs:
        return None
    number = min(best_of_at(max(kl, 0.0)), len(pairs[0][0]))
    best = [expected_best(rewards, number) for rewards, _ in pairs]
    earned = [reward for _, reward in pairs]
    text = (
        f"at KL {kl:.2f} the reward is {fmean(earned):.2f}; the best of {number} completions before training earns "
        f"{fmean(best):.2f} at a KL of at most {best_of_kl(number):.2f}"
    )
    if has_fallen_significantly(best, earned):
        return Outcome("look here", f"{text}: sampling earns more at the same KL", stage.final_step)
    return Outcome("fine", text)


def _reward_parts(subject: Subject) -> Outcome | None:
    """Has the reward risen although parts of it fell?"""
    settings, gains = subject.config.ppo, {}
    weights = {f"reward/{function.label}": function.weight for function in settings.reward_functions}
    for name, weight in ({"reward_model": settings.reward_weight} | weights).items():
        curve = subject.heldout(name)
        if weight and len(curve.steps) > 1:
            gains[name] = weight * (subject.final(name) - curve.values[0])
    total, rows_gain = sum(gains.values()), _estimate_gain(subject)
    if len(gains) < 2 or total <= 0 or (rows_gain and rows_gain.interval and rows_gain.interval.low <= 0):
        return None
    listed = ", ".join(f"{name} {gain:+.2f}" for name, gain in sorted(gains.items(), key=lambda item: -item[1]))
    text = f"gain in held-out reward by part: {listed}"
    if sum(gain for gain in gains.values() if gain < 0) < -_LOST_PARTS * total:
        return Outcome("look here", f"{text}; some parts fell", subject.stage.final_step)
    return Outcome("fine", text)


def _length_share(subject: Subject) -> Outcome | None:
    first, last = (
        _with_numbers(rows, "reward", "tokens") for rows in (subject.stage.first_rows, subject.stage.final_rows)
    )
    if min(len(first), len(last)) < _MIN_ROWS:
        return None
    gain = fmean(row["reward"] for row in last) - fmean(row["reward"] for row in first)
    growth = fmean(row["tokens"] for row in last) - fmean(row["tokens"] for row in first)
    slope = _slope([row["tokens"] for row in first], [row["reward"] for row in first])
    if gain <= 0 or slope is None:
        return None
    share = slope * growth / gain
    text = f"length alone explains {share:.0%} of the gain in reward ({growth:+.1f} tokens)"
    return Outcome("look here", text, subject.stage.final_step) if share > 0.5 else Outcome("fine", text)


def _slope(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return the slope of the least-squares line; None if all `x` are equal."""
    center, level = fmean(x), fmean(y)
    spread = sum((value - center) ** 2 for value in x)
    return sum((value - center) * (other - level) for value, other in zip(x, y)) / spread if spread else None


def find_validated_scores(run: RunRecords) -> list[float]:
    """Return the scores of the pairs on which the reward model was validated, as PPO weighs them.

    They are empty if PPO's rewards are not the scores of the run's own reward model.
    """
    stage, settings = run.stage("reward"), run.config.ppo
    if not stage or settings.reward_model or settings.reward_functions:
        return []
    pairs = _with_numbers(stage.final_rows, "chosen", "rejected")
    return [settings.reward_weight * pair[reply] for pair in pairs for reply in ("chosen", "rejected")]


def _score_range(subject: Subject) -> Outcome | None:
    scores = find_validated_scores(subject.run)
    rows = _with_numbers(subject.stage.final_rows, "reward")
    if min(len(scores) // 2, len(rows)) < _MIN_ROWS:
        return None
    bounds = quantiles(scores, n=100)
    outside = fmean(not bounds[0] <= row["reward"] <= bounds[-1] for row in rows)
    text = (
        f"{outside:.0%} of the scores are outside the range in which the reward model was validated "
        f"({bounds[0]:.2f} to {bounds[-1]:.2f})"
    )
    return Outcome("look here", text, subject.stage.final_step) if outside > 0.2 else Outcome("fine", text)


def _openings(subject: Subject) -> Outcome | None:
    first, last = subject.stage.first_rows, subject.stage.final_rows
    if min(len(first), len(last)) < _MIN_ROWS:
        return None

    def find_commonest(rows: Sequence[dict[str, Any]]) -> tuple[str, float]:
        openings = Counter(" ".join(row["completion"].split()[:3]) for row in rows)
        opening, count = openings.most_common(1)[0]
        return opening, count / len(rows)

    (_, before), (opening, after) = find_commonest(first), find_commonest(last)
    text = f"{after:.0%} of completions begin with “{opening}” (the commonest opening before: {before:.0%})"
    is_new = after > max(0.5, 2 * before)
    return Outcome("look here", text, subject.stage.final_step) if is_new else Outcome("fine", text)


# --- exploring, updates


def _entropy(subject: Subject) -> Outcome | None:
    curve = subject.stage.curve("entropy")
    if len(curve.steps) < 2 or curve.values[0] <= 0:
        return None
    share = fmean(tail(curve)) / curve.values[0]
    text = f"entropy is {share:.0%} of its start ({curve.values[0]:.2f} nats per token)"
    return Outcome("look here", text, curve.steps[-1]) if share < 0.2 else Outcome("fine", text)


def _clip_share(subject: Subject) -> Outcome | None:
    if subject.config.ppo.updates == 1:
        return None  # the policy that is updated is the one that sampled
    share = fmean(tail(subject.stage.curve("clip_fraction")))
    text = f"{share:.1%} of tokens are clipped, in the last quarter of the steps"
    return Outcome("look here", text) if share > 0.3 else Outcome("fine", text)


def _skipped(subject: Subject) -> Outcome | None:
    skipped = subject.stage.curve("skipped_steps")
    updates = dict(zip(*subject.stage.curve("updates")))
    half = len(skipped.steps) // 2  # the search for a loss scale skips steps at the start
    count = sum(skipped.values[half:])
    total = sum(updates.get(step, 1.0) for step in skipped.steps[half:])
    text = f"{count:,.0f} of {total:,.0f} optimizer steps were skipped because fp16 overflowed, in the second half"
    return Outcome("look here", text) if count > 0.1 * total else Outcome("fine", text)


CHECKS = (
    *PLUMBING,
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
    Check(
        "approval",
        "cheating",
        _PPO,
        ("heldout_approved_share",),
        _compare_with_reward("approved_share", "approved", "the share of approved completions", ".0%"),
        _CLOSER,
    ),
    Check(
        "judge",
        "cheating",
        _PPO,
        ("heldout_judge_reward",),
        _compare_with_reward("judge_reward", "judge", "the judge's score", ".2f"),
        f"set {{ppo.keep}} to best(judge_reward); or {_CLOSER}",
    ),
    Check("best of n", "cheating", _PPO, ("heldout_kl",), _best_of_n, f"read the samples; train longer, or {_CLOSER}"),
    Check("price of KL", "cheating", _PPO, ("heldout_kl", "heldout_reward"), _kl_price, _CLOSER),
    Check(
        "reward parts",
        "cheating",
        _PPO,
        ("heldout_reward",),
        _reward_parts,
        "change the weights in ppo.reward_functions, or {ppo.reward_weight}",
    ),
    Check(
        "length", "cheating", _PPO, (), _length_share, "read the samples; correct the reward, or add pairs about length"
    ),
    Check("score range", "cheating", _PPO, (), _score_range, f"read the samples with the highest scores; {_CLOSER}"),
    Check("openings", "cheating", _PPO, (), _openings, f"read the samples; {_CLOSER}"),
    Check("entropy", "exploring", _PPO, ("entropy",), _entropy, f"set {{ppo.entropy_coef}}, or {_CLOSER}"),
    Check("clip share", "updates", _PPO, ("clip_fraction",), _clip_share, "lower {ppo.optimizer.learning_rate}"),
    Check("skipped steps", "updates", EVERY_STAGE, ("skipped_steps",), _skipped, "use bf16, or lower the rate"),
)
"""All checks, in the order in which findings are shown."""
