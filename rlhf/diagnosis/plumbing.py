"""Checks of the plumbing: rollouts, losses and updates are of the tokens and weights that they should be."""

from __future__ import annotations

import math
from collections.abc import Callable

from rlhf.config.schema import EVERY_STAGE
from rlhf.diagnosis.subject import Check, Outcome, Subject, tail
from rlhf.reporting.rules import FINITE_GRADIENTS, PRECISIONS, RULES, Reading, starts_at_reference


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


def _finite_gradients(subject: Subject) -> Outcome | None:
    """Return that all are: a step with others is not taken, and its warning replaces this check."""
    if subject.precision == "fp16":  # they overflow now and then, and lower the loss scale
        return None
    return Outcome("fine", "all gradients are finite")


def _dpo_loss(subject: Subject) -> Outcome | None:
    losses, settings = subject.stage.curve("loss"), subject.config.dpo
    if settings.loss != "sigmoid" or settings.label_smoothing or not subject.stage.summary:
        return None
    if all(abs(loss - math.log(2)) < 1e-3 for loss in tail(losses)):
        return Outcome("look here", "the loss has not left ln 2, where it starts: the policy has hardly changed")
    return Outcome("fine", f"the loss has left ln 2: at the end {losses.last:.3f}")


def _device(subject: Subject) -> Outcome | None:
    devices = (subject.stage.summary or {}).get("devices", [])
    problems = [f"rank {rank}: {', '.join(device['problems'])}" for rank, device in enumerate(devices)]
    if found := [text for text, device in zip(problems, devices) if device["problems"]]:
        return Outcome("look here", f"devices reported problems: {'; '.join(found)}")
    return Outcome("fine", "the devices reported no problems before and after training") if devices else None


def _replay(name: str, describe_fine: Callable[[Subject], str | None], first: str = "") -> Check:
    """Return the check that an invariant of `RULES` holds in each recorded step.

    Args:
        name: the rule.
        describe_fine: returns the sentence if it holds; None if the rule does not apply to the run.
        first: the number whose first value decides: without a record of step 1 the check cannot tell.
    """
    (rule,) = (rule for rule in RULES if rule.name == name)

    def examine(subject: Subject) -> Outcome | None:
        precision = subject.precision
        columns = {name: dict(zip(*subject.stage.curve(name))) for name in (*rule.needs, *rule.reads)}
        if precision not in PRECISIONS:
            return Outcome("cannot tell", "not recorded: the precision of training")
        steps = [step for step in columns[rule.needs[0]] if all(step in columns[name] for name in rule.needs)]
        records = [{name: column[step] for name, column in columns.items() if step in column} for step in steps]
        start = records[0] if steps[0] == 1 else {}
        for step, numbers in zip(steps, records):
            reading = Reading(subject.config, subject.stage.name, start, [numbers], precision=precision)
            if wrong := rule.describe(reading):
                return Outcome("wrong", wrong, step)
        if first and not start:
            text = f"not recorded: {first} of step 1; the first record is of step {steps[0]:,}"
            return Outcome("cannot tell", text)
        fine = describe_fine(subject)
        return Outcome("fine", fine) if fine else None

    return Check(name, rule.topic, rule.stages, rule.needs, examine, rule.remedy, is_invariant=True)


def _describe_start(subject: Subject) -> str | None:
    kl, length = subject.stage.curve("kl").values[0], subject.stage.curve("response_length").values[0]
    if not starts_at_reference(subject.config):
        return None
    return f"before the first update the policy is its reference: KL {kl / max(length, 1):.1g} nats per token"


def _describe_rollouts(subject: Subject) -> str:
    count, largest = len(subject.stage.curve("draw_gap").steps), subject.stage.curve("draw_gap_max").values
    if subject.config.ppo.rollout.staleness:
        drawn = f"of {count:,} steps, all rollouts but the first were drawn ahead, by weights one step older"
    else:
        drawn = (
            f"rollouts of {count:,} of {count:,} steps were drawn from the weights that were trained; largest gap of a "
            f"token {max(largest):.1g} nats"
        )
    if not (gaps := subject.stage.curve("handover_gap").values):
        return drawn
    slopes = subject.stage.curve("handover_slope").values or [1.0]
    return (
        f"{drawn}. Servers confirmed each hand-over: mean gap up to {max(gaps):.1g} nats, change {min(slopes):.3g} to "
        f"{max(slopes):.3g} times the trainer's"
    )


def _describe_updates(subject: Subject) -> str:
    largest = max(subject.stage.curve("update_gap").values)
    return f"a rollout's first update computes the probabilities of scoring; largest mean gap {largest:.1g} nats"


def _describe_rows(subject: Subject) -> str:
    steps = subject.stage.curve("repeated_rows").steps
    return f"no row was read more than once in an epoch; compared in {len(steps):,} steps, up to step {steps[-1]:,}"


def _describe_scoring(subject: Subject) -> str:
    gap = subject.stage.curve("score_gap").values[0]
    return f"numbers of the first step are those computed again from the same rows; gap {gap:.1g}"


PLUMBING = (
    _replay("first KL", _describe_start, first="the KL"),
    _replay("drawing", _describe_rollouts, first="the gap"),
    _replay("first update", _describe_updates),
    _replay("scoring", _describe_scoring),
    _replay("targets", lambda _: "each row learns the tokens of its example, and no others"),
    _replay("repeated rows", _describe_rows),
    _replay("trained weights", lambda _: "the first step has changed the weights that are trained"),
    _replay("frozen weights", lambda _: "the weights that are not trained have not changed"),
    _replay("ranks", lambda _: "all ranks have the same weights"),
    Check(
        "learning rate",
        "plumbing",
        EVERY_STAGE,
        ("learning_rate",),
        _learning_rate,
        "set {*.optimizer.learning_rate}",
    ),
    Check(
        FINITE_GRADIENTS,
        "plumbing",
        EVERY_STAGE,
        ("grad_norm",),
        _finite_gradients,
        "look at the rows in the stage's folder not-finite",
        is_invariant=True,
    ),
    Check("device", "plumbing", EVERY_STAGE, (), _device, "cool or replace the device; repeat the stage after errors"),
    Check("no gradient", "plumbing", EVERY_STAGE, ("grad_norm",), _gradient, "look for an earlier warning"),
    Check("DPO loss", "plumbing", ("dpo",), ("loss",), _dpo_loss, "raise {dpo.optimizer.learning_rate}"),
)
"""All checks of the plumbing."""
