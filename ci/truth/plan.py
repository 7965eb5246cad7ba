"""The runs that run.py trains: PPO on the embedded world with known true quality, from good ones to ruined ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

STEPS = 200
SIZES = (32, 256, 2048)
"""Pairs on which reward models are trained: small ones are easier to fool."""

_SEEDS = range(20)
_COMMON = {
    "ppo.steps": STEPS,
    "ppo.batch_size": 32,  # half of the recipe's, for half the time
    "ppo.minibatch_size": 16,
    "ppo.eval_every": 10,
    "ppo.eval_rows": 128,
    "ppo.score_clip": 50,
    "ppo.samples_every": 0,
    "ppo.checkpoint_every": 0,
    "ppo.save_critic": "false",
}


@dataclass(frozen=True)
class Run:
    """One run of PPO.

    Attributes:
        group: the question that the run is about; figures are given for each group.
        pairs: pairs of its reward model.
        settings: keys that differ from those of all runs.
    """

    name: str
    group: str
    seed: int
    pairs: int
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def keys(self) -> dict[str, object]:
        """All keys of the run, without paths."""
        return {**_COMMON, **self.settings}


def list_runs() -> list[Run]:
    """Return all runs, in the order in which they are trained: those of the first seeds are of every group."""
    runs = [*_sizes(), *_coefficients(), *_estimators(), *_rates(), *_rewards()]
    return sorted(runs, key=lambda run: run.seed)


def _sizes() -> Iterator[Run]:
    """Yield 20 seeds of three sizes of reward models, with little to hold the policy back."""
    for seed in _SEEDS:
        for pairs in SIZES:
            yield Run(f"pairs-{pairs}-seed-{seed}", "pairs", seed, pairs, {"ppo.kl_coef": 0.05})


def _coefficients() -> Iterator[Run]:
    """Yield KL coefficients from those that hold the policy to none; the one of `_sizes` is not repeated.

    One of them holds it with every seed: false alarms are counted on such runs.
    """
    for seed in _SEEDS:
        for coefficient in (0.5, 0.25, 0.1, 0.0) if seed < 4 else (0.25,):
            yield Run(f"kl-{coefficient}-seed-{seed}", "kl", seed, SIZES[-1], {"ppo.kl_coef": coefficient})


def _estimators() -> Iterator[Run]:
    """Yield estimators without a critic, held and not held."""
    for estimator in ("rloo", "grpo", "reinforce++"):
        for coefficient in (0.25, 0.05):
            settings = {"ppo.estimator": estimator, "ppo.kl_coef": coefficient}
            yield Run(f"{estimator.strip('+')}-{coefficient}", "estimator", 0, SIZES[-1], settings)


def _rates() -> Iterator[Run]:
    """Yield rates that are too high."""
    for rate in (1e-3, 3e-3):
        settings = {"ppo.kl_coef": 0.25, "ppo.optimizer.learning_rate": rate}
        yield Run(f"rate-{rate}", "rate", 0, SIZES[-1], settings)


def _rewards() -> Iterator[Run]:
    """Yield rewards that are wrong (length, politeness alone), and one that is right (the rule itself)."""
    for name in ("length", "opener", "rule"):
        settings = {
            "ppo.kl_coef": 0.05,
            "ppo.reward_weight": 0,
            "ppo.reward_functions": f"[ci/truth/rewards.py:{name}]",
        }
        yield Run(f"reward-{name}", "reward", 0, SIZES[-1], settings)
