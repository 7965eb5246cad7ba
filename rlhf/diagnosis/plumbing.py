"""Checks of the plumbing: rollouts, losses and updates are of the tokens and weights that they should be."""

from __future__ import annotations

import math
from collections.abc import Callable

from rlhf.config.schema import EVERY_STAGE
from rlhf.diagnosis.subject import Check, Outcome, Subject, tail
from rlhf.reporting.rules import (
    PRECISIONS,
    RULES,
    Numbers,
    describe_first_kl,
    describe_frozen_weights,
    describe_gap,
    describe_ranks,
    describe_targets,
    describe_trained_weights,
    describe_update_gap,
    starts_at_reference,
)


def _first_kl(subject: Subject) -> Outcome | None:
    kl, length = subject.stage.curve("kl"), subject.stage.curve("response_length")
    if subject.precision not in PRECISIONS:
        return Outcome("cannot tell", "not recorded: the precision of training")
    if kl.steps[0] > 1:
        return Outcome("cannot tell", f"not recorded: the KL of step 1; the first record is of step {kl.steps[0]:,}")
    if not starts_at_reference(subject.config):
        return None
    per_token = kl.values[0] / max(length.values[0], 1)
    if wrong := describe_first_kl(per_token, subject.precision):
        return Outcome("wrong", wrong, step=1)
    return Outcome("fine", f"before the first update the policy is its reference: KL {per_token:.1g} nats per token")


def _drawing(subject: Subject) -> Outcome | None:
    gaps, largest = subject.stage.curve("draw_gap"), subject.stage.curve("draw_gap_max")
    if subject.precision not in PRECISIONS:
        return Outcome("cannot tell", "not recorded: the precision of training")
    first = gaps.at(1)
    for step, gap in zip(*gaps):
        if wrong := describe_gap(gap, first, subject.precision):
            return Outcome("wrong", wrong, step)
    if first is None:
        return Outcome("cannot tell", f"not recorded: the gap of step 1; the first record is of step {gaps.steps[0]:,}")
    return Outcome(
        "fine",
        f"rollouts of {len(gaps.steps):,} of {len(gaps.steps):,} steps were drawn from the weights that were trained; "
        f"largest gap of a token {max(largest.values):.1g} nats",
    )


def _first_update(subject: Subject) -> Outcome | None:
    gaps = subject.stage.curve("update_gap")
    if subject.precision not in PRECISIONS:
        return Outcome("cannot tell", "not recorded: the precision of training")
    for step, gap in zip(*gaps):
        if wrong := describe_update_gap(gap, subject.precision):
            return Outcome("wrong", wrong, step)
    return Outcome(
        "fine",
        "the first update of a rollout computes the probabilities that scoring has found; largest mean gap "
        f"{max(gaps.values):.1g} nats",
    )


def _learning_rate(subject: Subject) -> Outcome | None:
    rates = [*subject.stage.curve("learning_rate").values, *subject.stage.curve("lora_learning_rate").values]
    if len(subject.stage.curve("learning_rate").steps) < 2:
        return None
    if not any(rates):
        return Outcome("look here", "the learning rate is 0 in every step, so nothing is learned")
    return Outcome("fine", f"the learning rate is not 0: at most {max(rates):.2g}")


def _gradient(subject: Subject) -> Outcome | None:
    norms = subject.stage.curve("grad_norm")
    if len(norms.steps) < 2:
        return None
    if not any(norms.values):
        return Outcome("look here", "the gradient is 0 in every step, so nothing is learned")
    return Outcome("fine", f"gradients are not 0: norms from {min(norms.values):.2g} to {max(norms.values):.2g}")


def _dpo_loss(subject: Subject) -> Outcome | None:
    losses, settings = subject.stage.curve("loss"), subject.config.dpo
    if settings.loss != "sigmoid" or settings.label_smoothing or not subject.stage.summary:
        return None
    if all(abs(loss - math.log(2)) < 1e-3 for loss in tail(losses)):
        return Outcome("look here", "the loss has not left ln 2, where it starts: the policy has hardly changed")
    return Outcome("fine", f"the loss has left ln 2: at the end {losses.last:.3f}")


def _build_check(name: str, describe: Callable[[Numbers], str | None], fine: str) -> Check:
    """Return the check that the rule `name` about one number holds in each step that has recorded the number."""
    (rule,) = (rule for rule in RULES if rule.name == name)
    (number,) = rule.needs

    def examine(subject: Subject) -> Outcome:
        steps, values = subject.stage.curve(number)
        for step, value in zip(steps, values, strict=True):
            if wrong := describe({number: value}):
                return Outcome("wrong", wrong, step)
        return Outcome("fine", f"{fine} (compared in {len(steps):,} {'step' if len(steps) == 1 else 'steps'})")

    return Check(name, rule.topic, rule.stages, rule.needs, examine, rule.remedy, is_invariant=True)


_REMEDIES = {rule.name: rule.remedy for rule in RULES}
PLUMBING = (
    Check(
        "first KL",
        "plumbing",
        ("ppo",),
        ("kl", "response_length"),
        _first_kl,
        _REMEDIES["first KL"],
        is_invariant=True,
    ),
    Check(
        "drawing",
        "plumbing",
        ("ppo",),
        ("draw_gap", "draw_gap_max"),
        _drawing,
        _REMEDIES["drawing"],
        is_invariant=True,
    ),
    Check(
        "first update",
        "plumbing",
        ("ppo",),
        ("update_gap",),
        _first_update,
        _REMEDIES["first update"],
        is_invariant=True,
    ),
    _build_check("targets", describe_targets, "the loss is on the tokens of the replies, and on no others"),
    _build_check("trained weights", describe_trained_weights, "weights that are trained have changed"),
    _build_check("frozen weights", describe_frozen_weights, "no frozen weight has changed"),
    _build_check("ranks", describe_ranks, "all ranks have the same weights"),
    Check(
        "learning rate",
        "plumbing",
        EVERY_STAGE,
        ("learning_rate",),
        _learning_rate,
        "set {*.optimizer.learning_rate}",
    ),
    Check("gradient", "plumbing", EVERY_STAGE, ("grad_norm",), _gradient, "look for an earlier warning"),
    Check("DPO loss", "plumbing", ("dpo",), ("loss",), _dpo_loss, "raise {dpo.optimizer.learning_rate}"),
)
"""All checks of the plumbing."""
