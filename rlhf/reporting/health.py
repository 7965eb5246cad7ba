"""Warn when a stage goes wrong: `HealthMonitor` judges its numbers by the rules of `rlhf.reporting.rules`."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rlhf.config.schema import Config, Stage
from rlhf.reporting.rules import MEMORY_STEPS, RULES, Numbers, Reading, Rule, When

_MAX_RATE = 0.01  # AdamW moves a weight by about the rate in a step, and weights are about 0.02


class HealthWarning(NamedTuple):
    """A rule that fired.

    Attributes:
        state: what was seen, with its numbers.
        remedy: what to do.
        place: the step in words, before the printed state.
    """

    rule: Rule
    state: str
    remedy: str
    place: str

    @property
    def line(self) -> str:
        """The line that is printed."""
        return f"{self.rule.name}{', ' if self.place else ': '}{self.place}{self.state}; {self.remedy}"


class HealthMonitor:
    """The rules of one stage, each of which warns once; checkpoints contain its state.

    Attributes:
        lines: the printed warnings so far, by rule.
        heldout_rows, vocabulary, precision: see `Reading`.
    """

    def __init__(self, config: Config, stage: Stage, *, precision: str = "fp32") -> None:
        self._config, self._stage, self.precision = config, stage, precision
        self.heldout_rows = self.vocabulary = 0
        self.lines: dict[str, str] = {}
        self._first: Numbers = {}
        self._before: Numbers = {}
        self._recent: list[Numbers] = []

    def judge_step(self, step: int, numbers: Numbers) -> list[HealthWarning]:
        """Return warnings about a training step; the first call is about the stage's first step."""
        self._first = self._first or dict(numbers)
        self._recent = [*self._recent[1 - MEMORY_STEPS :], dict(numbers)]
        return self._say("step", f"step {step:,}: ", self._first, self._recent)

    def judge_evaluation(self, step: int, numbers: Numbers) -> list[HealthWarning]:
        """Return warnings about an evaluation; that of step 0 is the one before training."""
        if step == 0:
            self._before = dict(numbers)
            return self._say("before", "", numbers, [numbers])
        return self._say("evaluation", f"step {step:,}, held-out: ", self._before, [numbers])

    def judge_result(self, numbers: Numbers) -> list[HealthWarning]:
        """Return warnings about the held-out numbers of the model that the stage saves."""
        return self._say("result", "", self._before, [numbers])

    def is_ruined(self, before: Numbers, numbers: Numbers) -> bool:
        """Return whether an evaluation's numbers are those of a model that is not worth keeping."""
        reading = Reading(self._config, self._stage, before, [numbers])
        return any(rule.ruins for rule, _ in _find(reading, "evaluation"))

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"lines": self.lines, "first": self._first, "before": self._before, "recent": self._recent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.lines, self._first, self._before, self._recent = (
            state[key] for key in ("lines", "first", "before", "recent")
        )

    def _say(self, when: When, place: str, first: Numbers, recent: Sequence[Numbers]) -> list[HealthWarning]:
        reading = Reading(self._config, self._stage, first, recent, self.heldout_rows, self.vocabulary, self.precision)
        new = [
            HealthWarning(rule, state, fill_keys(rule.remedy, self._config, self._stage), place)
            for rule, state in _find(reading, when)
            if rule.name not in self.lines
        ]
        self.lines |= {warning.rule.name: warning.line for warning in new}
        return new


def _find(reading: Reading, when: When) -> Iterator[tuple[Rule, str]]:
    """Yield the rules that fire, with the state that each describes."""
    for rule in RULES:
        needed = set(rule.needs)  # in the first step, too, which invariants are not compared with
        known = needed <= reading.now.keys() and (rule.is_invariant or needed <= reading.first.keys())
        if reading.stage in rule.stages and when in rule.when and known and (state := rule.describe(reading)):
            yield rule, state


def fill_keys(remedy: str, config: Config, stage: Stage) -> str:
    """Replace each key in braces by the key and its value, `ppo.kl_coef (now 0.1)`.

    `max_steps` replaces `epochs` if it is set, because it may end the stage earlier.
    """

    def show(match: re.Match[str]) -> str:
        key = match[1].replace("*", stage)
        section, _, name = key.rpartition(".")
        if name == "epochs" and getattr(config, section).max_steps:
            key = f"{section}.max_steps"
        value = operator.attrgetter(key)(config)
        return f"{key} (now {'empty' if value is None else f'{value:g}' if isinstance(value, float) else value})"

    return re.sub(r"\{([\w.*]+)\}", show, remedy)


def describe_rates(config: Config, stages: Sequence[Stage]) -> list[str]:
    """Return a line for each learning rate that is too high for any model."""
    keys = [f"{stage}.optimizer.learning_rate" for stage in stages]
    keys += ["ppo.critic_optimizer.learning_rate"] if "ppo" in stages and config.ppo.method.critic else []
    keys += ["lora.learning_rate"] if config.lora.rank else []
    lines = []
    for key in keys:
        rate = operator.attrgetter(key)(config)
        if rate and rate >= _MAX_RATE:
            lines.append(
                f"{key}: {rate:g} changes weights by about their own size in a few steps, which ruins most models; set "
                "a rate below 0.01 (usual are 1e-6 to 1e-3)"
            )
    return lines
