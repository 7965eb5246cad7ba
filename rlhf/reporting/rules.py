"""Rules that warn: the numbers of a stage that goes wrong, and the keys to change.

`RULES` is the whole table; `rlhf.reporting.health` applies it while a stage trains. Limits leave a wide margin to
healthy runs; docs/reading-a-run.md states them and what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from rlhf.config.schema import EVERY_STAGE, Config, Stage
from rlhf.roles.roles import model_placements
from rlhf.utils.statistics import wilson
from rlhf.utils.units import format_number

Numbers = Mapping[str, float]
Topic = Literal["plumbing", "learning", "cheating", "exploring", "updates"]
"""The question that a rule or a check answers: is the plumbing right, is it learning, and so on."""

When = Literal["step", "before", "evaluation", "result"]
"""After a training step; after the evaluation before training, or a later one; when the stage ends."""

_MAX_TOKEN_KL = 1.0  # nats per token; healthy runs stay below 0.2
_MIN_ENTROPY = 0.05  # of the entropy at the start
_MIN_DISTINCT = 0.1  # of distinct_2 before training
_NEAR_UNIFORM = 0.7  # of the logarithm of the vocabulary
_FEW_ROWS = 30
_IN_A_ROW, MEMORY_STEPS = 3, 10  # steps; no rule looks back further than the latter

FINITE_GRADIENTS, LEFT_OUT = "finite gradients", "left-out step"
"""Names of warnings about a step that was not taken: it ended the stage, or `alarms.skip_not_finite` left it out."""

# Limits of invariants by precision, in nats per token. In fp32, rounding was below 1e-6; other shapes of a batch, or a
# close choice between experts, may add to it. In half precision, the mean gap that others publish is 0.013; adapters
# that are merged for rollouts add as much.
PRECISIONS = ("fp32", "bf16", "fp16")
_MAX_FIRST_KL = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}
_MAX_GAP = {"fp32": 1e-3, "bf16": 1e-1, "fp16": 1e-1}
_MIN_GAP_LIMIT = {"fp32": 1e-5, "bf16": 3e-2, "fp16": 3e-2}
_MIN_DIRECTION = -0.1  # to first order it is above 0
_GAP_GROWTH = 5  # times the gap of the first step, in which no weight has changed yet


class Reading(NamedTuple):
    """The numbers that rules judge.

    Attributes:
        first: numbers of the first step; for evaluations, those before training.
        recent: numbers of the latest steps, the newest last; for evaluations, only the newest.
        heldout_rows, vocabulary: rows of an evaluation, tokens of the vocabulary; 0 if unknown.
        precision: that of training.
    """

    config: Config
    stage: Stage
    first: Numbers
    recent: Sequence[Numbers]
    heldout_rows: int = 0
    vocabulary: int = 0
    precision: str = "fp32"

    @property
    def now(self) -> Numbers:
        """The newest numbers."""
        return self.recent[-1]

    def last(self, count: int, holds: Callable[[Numbers], bool]) -> bool:
        """Return whether `holds` is true of each of the newest `count` numbers."""
        return len(self.recent) >= count and all(map(holds, self.recent[-count:]))


class Rule(NamedTuple):
    """A sign that a stage goes wrong.

    Attributes:
        name: identifies the rule, which warns once in a stage.
        topic: the section of a report that shows the warning.
        when: what it judges.
        needs: numbers without which it is not judged.
        describe: returns the state as text if the rule fires.
        remedy: what to do; a key in braces is shown with its value, `*` is the stage.
        ruins: a model with such numbers is not worth keeping.
        is_invariant: theory or precision forbids such numbers, so the run is wrong; `alarms.stop` ends it.
        reads: further numbers that `describe` uses where a run has them.
    """

    name: str
    topic: Topic
    stages: Sequence[Stage]
    when: Sequence[When]
    needs: Sequence[str]
    describe: Callable[[Reading], str | None]
    remedy: str
    ruins: bool = False
    is_invariant: bool = False
    reads: Sequence[str] = ()


def starts_at_reference(config: Config) -> bool:
    """Return whether PPO's policy starts with the very weights of its reference: not if one of them is quantized."""
    placements = model_placements(config, "ppo")
    reference = placements.get("reference")
    return reference is None or reference.quantization == placements["actor"].quantization


def _first_kl(reading: Reading) -> str | None:
    limit, token_kl = _MAX_FIRST_KL[reading.precision], abs(_token_kl(reading.now))  # an estimate: of either sign
    if reading.now != reading.first or not starts_at_reference(reading.config) or token_kl <= limit:
        return None
    return (
        f"the policy differs from its reference before the first update: KL is {token_kl:.2g} nats per token (rounding "
        f"in {reading.precision}: below {limit:g})"
    )


def _drawing(reading: Reading) -> str | None:
    precision, gap, first_gap = reading.precision, reading.now["draw_gap"], reading.first.get("draw_gap")
    if reading.config.ppo.generation_exact and gap:
        return f"drawn log-probabilities are not exactly those of training: the gap is {gap:.2g} nats per token"
    if reading.config.ppo.rollout.staleness and reading.now != reading.first:  # of the weights before
        return None
    if reading.config.ppo.rollout.where:  # of another precision, perhaps; the hand-over has compared the weights
        if "handover_gap" not in reading.now:  # the rollout is a recorded one
            return None
        limit = _GAP_GROWTH * max(reading.now["handover_gap"], _MIN_GAP_LIMIT["fp32"])
        if gap > limit:
            return (
                f"the rollout was not drawn from the weights that were handed over: the gap is {gap:.2g} nats per "
                f"token (expected after this hand-over: below {limit:.1g})"
            )
        return None
    if first_gap is not None and gap > max(_GAP_GROWTH * first_gap, _MIN_GAP_LIMIT[precision]):
        return (
            "the rollout was not drawn from the weights that are trained: the gap grew from "
            f"{first_gap:.1g} to {gap:.1g} nats per token"
        )
    if gap > _MAX_GAP[precision]:
        return (
            f"generation and training compute different probabilities: the gap is {gap:.2g} nats per token (rounding "
            f"in {precision}: below {_MAX_GAP[precision]:g})"
        )
    return None


def _reference(reading: Reading) -> str | None:
    is_still = reading.last(2, lambda numbers: numbers["kl"] == 0)
    # 16 bits round small updates away. The KL of a step is measured before its update.
    if not is_still or reading.precision != "fp32" or not 0 < reading.recent[-2]["grad_norm"] < math.inf:
        return None
    return "KL is exactly 0 after an update: the policy may be compared with itself, so nothing keeps it near its start"


def _first_update(reading: Reading) -> str | None:
    gap, limit = reading.now["update_gap"], _MAX_GAP[reading.precision]
    if reading.config.ppo.generation_exact and gap:
        return f"scored log-probabilities are not exactly those of the update: the gap is {gap:.2g} nats per token"
    if gap <= limit:
        return None
    return (
        f"scoring and training compute different probabilities: in a rollout's first update the gap is {gap:.2g} nats "
        f"per token (rounding in {reading.precision}: below {limit:g})"
    )


def _scoring(reading: Reading) -> str | None:
    gap, limit = reading.now["score_gap"], _MAX_GAP[reading.precision]
    if gap <= limit:
        return None
    return (
        f"numbers of the first step differ from those computed again from the same rows: the gap is {gap:.2g} "
        f"(rounding in {reading.precision}: below {limit:g})"
    )


def _direction(reading: Reading) -> str | None:
    correlation = reading.now["direction"]
    if correlation >= _MIN_DIRECTION:
        return None
    return (
        "the first update made tokens with high advantages less likely: advantages and changes of log-probability have "
        f"the correlation {correlation:.2f}"
    )


def _frozen_weights(reading: Reading) -> str | None:
    count = reading.now["changed_frozen_weights"]
    return f"{count:,.0f} tensors of frozen weights have changed" if count else None


def _trained_weights(reading: Reading) -> str | None:
    if reading.now["unchanged_weights"] < 1:
        return None
    return "no trained weight of a model has changed, although there are gradients"


def _ranks(reading: Reading) -> str | None:
    count = reading.now["unequal_weights"]
    return f"{count:,.0f} tensors of weights differ between ranks" if count else None


def _targets(reading: Reading) -> str | None:
    rows = reading.now["wrong_targets"]
    return f"{rows:,.0f} rows learn other tokens than those of their examples" if rows else None


def _repeated_rows(reading: Reading) -> str | None:
    rows = reading.now["repeated_rows"]
    return f"{rows:,.0f} rows were read more than once in an epoch" if rows else None


def _token_kl(numbers: Numbers) -> float:
    return numbers["kl"] / max(numbers["response_length"], 1)


def _kl(reading: Reading) -> str | None:
    per_token, earlier = _token_kl(reading.now), _token_kl(reading.recent[0])
    if per_token > _MAX_TOKEN_KL:
        return f"the policy has left its reference: KL is {per_token:.2g} nats per token (healthy: below 0.2)"
    if per_token > 0.3 * _MAX_TOKEN_KL and 0 < earlier < per_token / 10:
        return f"KL grew from {earlier:.2g} to {per_token:.2g} nats per token in {len(reading.recent) - 1} steps"
    return None


def _entropy(reading: Reading) -> str | None:
    start, now = reading.first["entropy"], reading.now["entropy"]
    if not now < _MIN_ENTROPY * start:
        return None
    return f"the policy samples one completion only: entropy fell from {start:.2g} to {now:.2g} nats per token"


def _truncation(reading: Reading) -> str | None:
    start, now = reading.first["truncated_share"], reading.now["truncated_share"]
    if not start <= 0.5 < now:
        return None
    return f"completions no longer end: {now:.0%} are cut off (at the start {start:.0%})"


def _repetition(reading: Reading) -> str | None:
    start, now = reading.first["distinct_2"], reading.now["distinct_2"]
    if not now < _MIN_DISTINCT * start:
        return None
    return f"completions are alike: distinct_2 fell from {start:.2g} to {now:.2g}"


def _equal_scores(reading: Reading) -> str | None:
    def is_equal(numbers: Numbers) -> bool:
        several = numbers["tokens"] >= 2 * numbers["response_length"]
        return several and numbers["reward_std"] <= 1e-6 * max(1, abs(numbers["reward"]))

    if not reading.last(_IN_A_ROW, is_equal):
        return None
    reward = format_number(reading.now["reward"])
    return f"all completions of {_IN_A_ROW} rollouts have the same score, {reward}, so there is nothing to learn"


def _clipped_scores(reading: Reading) -> str | None:
    if reading.now["score_clip_fraction"] < 1:
        return None
    limit = reading.config.ppo.score_limit or reading.config.ppo.score_clip
    return f"all scores of a rollout are clipped to ±{limit:g}, so better completions earn no more than worse ones"


def _critic(reading: Reading) -> str | None:
    if not reading.last(MEMORY_STEPS, lambda numbers: numbers["explained_variance"] < -1):
        return None
    return f"the critic predicts worse than a constant: explained_variance is below -1 for {MEMORY_STEPS} steps"


def _gradient(reading: Reading) -> str | None:
    if reading.last(MEMORY_STEPS, lambda numbers: not math.isfinite(numbers["grad_norm"])):
        return f"the gradient is not finite for {MEMORY_STEPS} steps"
    first = reading.first["grad_norm"]
    if 0 < first < math.inf and reading.last(_IN_A_ROW, lambda numbers: numbers["grad_norm"] <= 1e-5 * first):
        return f"the model no longer learns: grad_norm is {reading.now['grad_norm']:.1g} (at the start {first:.2g})"
    return None


def _no_gradient(reading: Reading) -> str | None:
    if reading.first["grad_norm"] != 0 or not reading.last(_IN_A_ROW, lambda numbers: numbers["grad_norm"] == 0):
        return None
    return "the model learns nothing: grad_norm is 0, as in the first step"


def _loss(reading: Reading) -> str | None:
    start = reading.first["loss"]
    if not reading.last(_IN_A_ROW, lambda numbers: numbers["loss"] > max(2 * start, start + 1)):
        return None
    return f"training diverges: the loss is {format_number(reading.now['loss'])} (at the start {start:.3g})"


def _forgotten_replies(reading: Reading) -> str | None:
    now = reading.now["chosen_log_prob"]
    reference = now - reading.now["chosen_reward"] / reading.config.dpo.beta
    if not now < min(2 * reference, reference - 10):
        return None
    return (
        f"the policy forgets the chosen replies too: their log-probability is {now:.3g} (reference {reference:.3g}), "
        "which accuracy and margin do not show"
    )


def _hardly_learned(reading: Reading) -> str | None:
    perplexity = reading.now["perplexity"]
    uniform = math.log(reading.vocabulary) if reading.vocabulary > 1 else math.inf
    # If it is worse than random guessing, training has diverged, and training longer does not help.
    if not uniform / 2 < math.log(perplexity) <= uniform:
        return None
    return (
        f"SFT has hardly learned: held-out perplexity is {format_number(perplexity)}, that of random guessing "
        f"{reading.vocabulary:,}"
    )


def _endless_greedy(reading: Reading) -> str | None:
    if reading.now["truncated_share"] < 1:
        return None
    return "none of the greedy completions of held-out prompts ends"


def _bad_start(reading: Reading) -> str | None:
    cut_off, entropy = reading.now["truncated_share"], reading.now["entropy"]
    uniform = math.log(reading.vocabulary) if reading.vocabulary > 1 else math.inf
    if not (cut_off > 0.5 or entropy > _NEAR_UNIFORM * uniform):
        return None
    share = f" ({entropy / uniform:.0%} of uniform)" if uniform < math.inf else ""
    return (
        f"PPO starts from a policy that has hardly learned: {cut_off:.0%} of completions are cut off, entropy is "
        f"{entropy:.2g} nats{share}"
    )


def _few_rows(reading: Reading) -> str | None:
    rows = reading.heldout_rows
    if not 0 < rows < _FEW_ROWS:
        return None
    state = f"held-out numbers are of {rows} row{'s' * (rows > 1)} only"
    if "accuracy" not in reading.now:
        return state
    right = reading.now["accuracy"] * rows
    low, high = wilson(right, rows)
    return f"{state}: accuracy {right:.3g} of {rows} has the 95 % interval {low:.0%} to {high:.0%}"


_REPORT = "please report this as a bug of rlhf or of the backend"
_CALM = "lower {*.optimizer.learning_rate}"
_NEARER = f"raise {{ppo.kl_coef}} or {_CALM}"
_PPO: tuple[Stage, ...] = ("ppo",)
_TRAINED: tuple[When, ...] = ("step", "evaluation")
RULES = (
    Rule(
        "first KL",
        "plumbing",
        _PPO,
        ("step",),
        ("kl", "response_length"),
        _first_kl,
        "check that policy and reference are the same model, at the same temperature and in the same precision",
        is_invariant=True,
    ),
    Rule(
        "drawing",
        "plumbing",
        _PPO,
        ("step",),
        ("draw_gap",),
        _drawing,
        _REPORT,
        is_invariant=True,
        reads=("handover_gap",),
    ),
    Rule("reference", "plumbing", _PPO, ("step",), ("kl", "grad_norm"), _reference, _REPORT),
    Rule("first update", "plumbing", _PPO, ("step",), ("update_gap",), _first_update, _REPORT, is_invariant=True),
    Rule(
        "scoring",
        "plumbing",
        ("sft", "reward", "dpo", "ppo"),
        ("step",),
        ("score_gap",),
        _scoring,
        _REPORT,
        is_invariant=True,
    ),
    Rule("direction", "plumbing", _PPO, ("step",), ("direction",), _direction, _REPORT),
    Rule(
        "frozen weights",
        "plumbing",
        EVERY_STAGE,
        ("step",),
        ("changed_frozen_weights",),
        _frozen_weights,
        _REPORT,
        is_invariant=True,
    ),
    Rule(
        "trained weights",
        "plumbing",
        EVERY_STAGE,
        ("step",),
        ("unchanged_weights",),
        _trained_weights,
        _REPORT,
        is_invariant=True,
    ),
    Rule(
        "ranks",
        "plumbing",
        EVERY_STAGE,
        ("step",),
        ("unequal_weights",),
        _ranks,
        _REPORT,
        is_invariant=True,
    ),
    Rule(
        "targets",
        "plumbing",
        ("sft", "reward", "dpo"),
        ("step",),
        ("wrong_targets",),
        _targets,
        _REPORT,
        is_invariant=True,
    ),
    Rule(
        "repeated rows",
        "plumbing",
        ("sft", "reward", "dpo"),
        ("step",),
        ("repeated_rows",),
        _repeated_rows,
        _REPORT,
        is_invariant=True,
    ),
    Rule("kl", "cheating", _PPO, _TRAINED, ("kl", "response_length"), _kl, _NEARER, ruins=True),
    Rule("collapsed entropy", "exploring", _PPO, _TRAINED, ("entropy",), _entropy, _NEARER, ruins=True),
    Rule(
        "truncation",
        "cheating",
        _PPO,
        _TRAINED,
        ("truncated_share",),
        _truncation,
        f"set {{ppo.missing_eos_penalty}}, {_NEARER}",
        ruins=True,
    ),
    Rule("repetition", "exploring", _PPO, ("evaluation",), ("distinct_2",), _repetition, _NEARER, ruins=True),
    Rule(
        "equal scores",
        "learning",
        _PPO,
        ("step",),
        ("reward", "reward_std", "tokens", "response_length"),
        _equal_scores,
        "read the samples, and correct ppo.reward_functions or ppo.reward_model, or the difficulty of the prompts",
    ),
    Rule(
        "clipped scores",
        "learning",
        _PPO,
        ("step",),
        ("score_clip_fraction",),
        _clipped_scores,
        "set ppo.score_clip to a higher value, or ppo.normalize_scores=running",
    ),
    Rule(
        "useless critic",
        "learning",
        _PPO,
        ("step",),
        ("explained_variance",),
        _critic,
        "raise {ppo.critic_optimizer.learning_rate} or set {ppo.normalize_scores}",
    ),
    Rule(
        "vanished gradient",
        "updates",
        EVERY_STAGE,
        ("step",),
        ("grad_norm",),
        _gradient,
        f"look for an earlier cause, or {_CALM}",
    ),
    Rule(
        "no gradient",
        "plumbing",
        EVERY_STAGE,
        ("step",),
        ("grad_norm",),
        _no_gradient,
        "look for an earlier warning; in PPO, check that the rewards of a prompt's completions differ",
    ),
    Rule("loss", "updates", ("sft", "reward", "dpo", "distill"), ("step",), ("loss",), _loss, _CALM),
    Rule(
        "forgotten replies",
        "cheating",
        ("dpo",),
        _TRAINED,
        ("chosen_log_prob", "chosen_reward"),
        _forgotten_replies,
        f"{_CALM} or raise {{dpo.beta}}",
        ruins=True,
    ),
    Rule(
        "hardly learned",
        "learning",
        ("sft",),
        ("result",),
        ("perplexity",),
        _hardly_learned,
        "raise {sft.epochs} or {sft.optimizer.learning_rate}",
    ),
    Rule(
        "endless",
        "learning",
        ("sft", "reward", "dpo"),
        ("result",),
        ("truncated_share",),
        _endless_greedy,
        "look for an earlier warning, and at the end tokens in `rlhf data`; else raise {*.epochs} or "
        "{data.max_completion_length}",
    ),
    Rule(
        "bad start",
        "learning",
        _PPO,
        ("before",),
        ("truncated_share", "entropy"),
        _bad_start,
        "train SFT longer ({sft.epochs}, {sft.optimizer.learning_rate}), or raise {data.max_completion_length}",
    ),
    Rule(
        "few rows",
        "learning",
        ("sft", "reward", "dpo"),
        ("result",),
        (),
        _few_rows,
        "raise {data.heldout_fraction} or {*.eval_rows}",
    ),
    Rule(
        "few prompts",
        "learning",
        ("ppo", "distill"),
        ("before",),
        (),
        _few_rows,
        "raise {data.heldout_fraction} or {*.eval_rows}",
    ),
)
