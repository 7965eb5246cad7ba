"""The numbers of a run, counted by hand: small integers, with padding and filled-up rows that must not count."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelerators import ShapePolicy
from rlhf.config.schema import RewardConfig
from rlhf.data.batches import collate_reward
from rlhf.data.examples import Pair
from rlhf.data.stage_dataset import StageData
from rlhf.engine.engine import MetricSums
from rlhf.errors import ConfigError
from rlhf.generation.decoder import Completions, Decoder
from rlhf.reporting import timers
from rlhf.trainers import supervised
from rlhf.trainers.context import StageContext
from rlhf.trainers.loop import fit
from rlhf.trainers.ppo.experience import Scores
from rlhf.trainers.ppo.first_step import measure_direction
from rlhf.trainers.ppo.metrics import select_samples
from rlhf.trainers.ppo.trainer import PPOTrainer
from rlhf.utils.statistics import distinct
from tests.helpers import llama
from tests.in_process import OPTIMIZER, ROW, StubTrainer, one_model, ppo_models, scalar_llama, stage_context
from tests.optimum import language

EOS = 0


def test_a_rate_is_the_steps_own_count_over_its_own_seconds(accelerator, tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timers, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    context = stage_context(accelerator, tmp_path, "sft", {"sft": {"log_every": 3}})
    logged = []

    def log(step: int, numbers: dict[str, float]) -> None:
        logged.append((step, numbers["seconds"], numbers["tokens"], numbers["tokens_per_second"]))

    monkeypatch.setattr(context.recorder, "log", log)

    def step(index: int) -> dict[str, float]:
        now[0] += 4.0
        return {"tokens": 10.0 * (index + 1)}

    fit(StubTrainer(context.config.sft, step, total_steps=4, unit="tokens"), context)
    assert logged == [(1, 4.0, 10.0, 2.5), (3, 4.0, 30.0, 7.5), (4, 4.0, 40.0, 10.0)]


class LastToken(nn.Module):
    """Scores every token with its id."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, read: Tensor | None = None) -> Tensor:
        return input_ids.float()


def last_token_scorer() -> Any:
    """A reward model whose score of a row is its last token."""
    scorer = LastToken()
    scorer.model = None
    return scorer


COUNTED = [
    Pair([1], [9], [5], ROW),
    Pair([1], [3], [6], ROW),
    Pair([1, 2], [8, 4], [7, 4], ROW),
    Pair([1], [7], [2, 5], ROW),
]
"""Scores 9 > 5, 3 < 6, 4 = 4, 7 > 5."""


def collate(pairs, real=None):
    return collate_reward(pairs, real, policy=ShapePolicy("dynamic"), maximum=8, pad_token_id=19)


def test_accuracy_counts_higher_chosen_scores_and_no_ties():
    batch = collate(COUNTED)
    result = supervised.pair_loss(LastToken(), batch, RewardConfig())
    numbers = supervised.pair_means({key: value.item() for key, value in supervised.pair_sums(result, batch).items()})
    # accuracy 2 of 4; chosen (9 + 3 + 4 + 7) / 4; rejected (5 + 6 + 4 + 5) / 4
    assert numbers == {"pairs": 4, "accuracy": 0.5, "chosen_score": 5.75, "rejected_score": 5.0, "margin": 0.75}


def test_the_pairwise_loss_is_a_mean_over_tokens_then_pairs():
    batch = collate([COUNTED[0], COUNTED[3], COUNTED[1]], 2)
    loss = supervised.pair_loss(LastToken(), batch, RewardConfig()).loss.item()
    first = math.log(1 + math.exp(-(9 - 5)))
    # the reply of two tokens: 7 against 2, then the padding, 19, against 5
    second = (math.log(1 + math.exp(-(7 - 2))) + math.log(1 + math.exp(-(19 - 5)))) / 2
    assert loss == pytest.approx((first + second) / 2, rel=1e-5)


def test_loss_of_last_tokens_adds_both_margins():
    batch = collate([COUNTED[0], Pair([1], [7], [2, 5], replace(ROW, margin=1.5)), COUNTED[1]], 2)
    settings = RewardConfig(loss="last", margin=0.5, center=0.01)
    loss = supervised.pair_loss(LastToken(), batch, settings).loss.item()
    first = math.log(1 + math.exp(-(9 - 5 - 0.5))) + 0.01 * (9 + 5) ** 2
    second = math.log(1 + math.exp(-(7 - 5 - 0.5 - 1.5))) + 0.01 * (7 + 5) ** 2
    assert loss == pytest.approx((first + second) / 2, rel=1e-5)


def test_heldout_pairs_that_fill_up_a_batch_do_not_count(accelerator, tmp_path, monkeypatch):
    settings = {"loss": "last", "batch_size": 4, "micro_batch_size": 4}
    context = stage_context(accelerator, tmp_path, "reward", {"reward": settings})
    # five in batches of four: the last one fills its batch up with three copies of itself
    pairs = [*COUNTED, Pair([1], [8], [2], ROW)]
    monkeypatch.setattr(StageContext, "engine", lambda *_, **__: SimpleNamespace(engine=LastToken()))
    data = StageData(pairs, pairs, [])
    evaluation = supervised.RewardTrainer(context, one_model(None), language.tokenizer(), data).evaluate("now")
    scores = sorted((row["chosen"], row["rejected"]) for row in evaluation.rows)
    assert scores == [(3, 6), (4, 4), (7, 5), (8, 2), (9, 5)]
    margins = [9 - 5, 3 - 6, 4 - 4, 7 - 5, 8 - 2]
    # accuracy 3 of 5; chosen (9 + 3 + 4 + 7 + 8) / 5; rejected (5 + 6 + 4 + 5 + 2) / 5
    assert evaluation.numbers == {
        "accuracy": pytest.approx(0.6),
        "chosen_score": pytest.approx(6.2),
        "rejected_score": pytest.approx(4.4),
        "margin": pytest.approx(6.2 - 4.4),
        "loss": pytest.approx(sum(math.log(1 + math.exp(-margin)) for margin in margins) / 5, rel=1e-5),
    }


JUNK = 50.0
"""Stands where nothing must be counted."""
FOUR = math.log(4)  # the models below know four words

# Three rows of 3, 2 and 1 tokens, and one that only fills up the batch.
IDS = torch.tensor([[1, 2, 3], [1, 2, EOS], [EOS, EOS, EOS], [2, 2, 2]])
DRAWN = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]])
# policy now / policy that drew, in the first update, where the policy gives every word 1/4
RATIO = torch.tensor([[1, 1.5, 1], [0.5, 1, JUNK], [1, JUNK, JUNK], [JUNK] * 3])
LOG_RATIO = torch.tensor([[1, 0, 1], [1, 0, JUNK], [0, JUNK, JUNK], [JUNK] * 3])  # policy / reference
LOG_PROBS = -FOUR - RATIO.log()
SCORES = Scores(
    log_probs=LOG_PROBS,
    ref_log_probs=LOG_PROBS - LOG_RATIO,
    entropy=torch.tensor([[1, 2, 3], [1, 3, JUNK], [2, JUNK, JUNK], [JUNK] * 3]),
    values=torch.tensor([[0, 0, 0], [0, 0, JUNK], [0, JUNK, JUNK], [JUNK] * 3]),
    reward=torch.tensor([1.0, 4, 7, JUNK]),
)
ROLLOUT = {
    "reward": 4.0,  # (1 + 4 + 7) / 3, not clipped to 5
    "reward_std": math.sqrt(6),  # ((1 - 4)^2 + (4 - 4)^2 + (7 - 4)^2) / 3 = 6
    "kl": 1.0,  # (2 + 1 + 0) / 3 sequences
    "entropy": 2.0,  # (6 + 4 + 2) / 6 tokens
    "response_length": 2.0,  # 6 tokens / 3 sequences
    "truncated_share": 2 / 3,  # the third row alone has drawn an end token
}


class KnownLogits:
    """Gives the words 0 to 3 these probabilities, everywhere."""

    def __init__(self, *probabilities: float) -> None:
        self.logits = torch.tensor(probabilities).log()
        self.config = SimpleNamespace()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, use_cache: bool, logits_to_keep: Tensor) -> Any:
        return SimpleNamespace(logits=self.logits.expand(len(input_ids), len(logits_to_keep), 4))

    __call__ = forward


@pytest.fixture
def build_ppo(accelerator, tmp_path, monkeypatch):
    """PPO whose decoder draws `IDS` and whose models find `SCORES`, on three prompts in batches of four."""

    def build(**settings: Any) -> PPOTrainer:
        values = {
            "precision": "fp32",
            "data": {"max_prompt_length": 3, "max_completion_length": 3},
            "ppo": {"batch_size": 4, "optimizer": OPTIMIZER, "critic_optimizer": OPTIMIZER, **settings},
        }
        context = stage_context(accelerator, tmp_path, "ppo", values)
        actor, reference = (llama(4, eos_token_id=EOS, num_hidden_layers=1) for _ in range(2))
        critic, reward = scalar_llama(4, eos_token_id=EOS, num_hidden_layers=1), language.TableOfRewards(seed=0)
        models = ppo_models(actor, reference, critic, reward)
        built = PPOTrainer(context, models, language.tokenizer(), StageData(PROMPTS, PROMPTS, []))
        built.batches._endless = False  # here a row fills the batch up, and must count nowhere
        monkeypatch.setattr(Decoder, "generate", lambda *_: Completions(IDS, DRAWN))
        give_scores(built, SCORES)
        return built

    return build


PROMPTS = [language.prompt(1), language.prompt(2, 3), language.prompt(3, 1, 2)]


def give_scores(built: PPOTrainer, scores: Scores) -> None:
    """Have every rollout scored so."""
    built.score = lambda rollout, examples, reward_fn=None, for_update=False: scores


def step_of(models: list[Any]) -> Any:
    """An engine's step that computes the loss with the next of `models`, and updates nothing."""

    def step(parts: list[Any], loss: Any) -> MetricSums:
        sums = MetricSums()
        model = models.pop(0)
        for part in parts:
            value, statistics = loss(model, part)
            sums.add(loss=value, **statistics)
        return sums

    return step


def test_the_numbers_of_a_ppo_step_are_those_counted_by_hand(build_ppo):
    built = build_ppo(ppo_epochs=2, kl_coef=0.5, lam=1.0, whiten_advantages=False, micro_batch_size=2)
    built.actor.step = step_of([KnownLogits(0.25, 0.25, 0.25, 0.25), KnownLogits(1 / 6, 1 / 2, 1 / 6, 1 / 6)])
    built.critic.step = step_of([lambda ids, mask: torch.full(ids.shape, 0.4)] * 2)
    built.actor.grad_norm, built.critic.grad_norm = (lambda: 3.0), (lambda: 4.0)
    built.reward = last_token_scorer()
    # Rewards: -0.5 of the log-ratio, and the score, clipped to 5, on the last token. With gamma = lambda = 1 a return
    # is the sum of the rewards from its token on: [0, .5, .5], [3.5, 4], [5]; the values are 0, so is the advantage.
    # Policy, first update, ratios [1, 1.5, 1], [.5, 1], [1]; the lesser of ratio and clipped ratio times advantage:
    #   0 + 1.2 * .5 + .5 + .5 * 3.5 + 4 + 5 = 11.85
    # second update, where word 1 has become twice as likely and the others 2/3 times: [2, 1, 2/3], [1, 2/3], [2/3]
    #   0 + .5 + 1/3 + 3.5 + 8/3 + 10/3 = 31/3
    # Critic: the value is .4, clipped to .2; the greater of (.4 - R)^2 and (.2 - R)^2, the latter but for the first:
    #   .16 + .09 + .09 + 10.89 + 14.44 + 23.04 = 48.71
    # Approximate KL, the sum of ratio - 1 - log ratio: first .5 - log 1.5 - .5 + log 2, then 1 - log 2 - 1 + 3 log 1.5
    assert built.step(0) == {
        **{key: pytest.approx(value, rel=1e-5) for key, value in ROLLOUT.items()},
        "tokens": 6,
        "padding_share": 12 / 24,  # 2 + 3, 3 + 2 and 1 + 1 tokens of real rows in 4 x (3 + 3) positions
        "returns": pytest.approx(13.5 / 6),
        "policy_loss": pytest.approx(-(11.85 + 31 / 3) / 6 / 2, rel=1e-5),
        "value_loss": pytest.approx(48.71 / 6 / 2, rel=1e-5),
        "clip_fraction": pytest.approx((2 / 6 + 4 / 6) / 2),  # 1.5 and .5; then 2 and three of 2/3
        "approx_kl": pytest.approx(2 * math.log(1.5) / 6 / 2, rel=1e-5),
        "update_gap": pytest.approx((math.log(1.5) + math.log(2)) / 6, rel=1e-5),  # of the first update alone
        "score_gap": pytest.approx(2 / math.sqrt(8.5)),  # first micro-batch: rewards 1 and 4, last tokens 3 and 2
        "value_clip_fraction": pytest.approx(5 / 6),
        "updates": 2,
        "score_clip_fraction": pytest.approx(1 / 3),  # 7 of 1, 4 and 7; the fourth row only fills up the batch
        "explained_variance": 0.0,  # the values do not differ
        "reward_ema": pytest.approx(4.0),
        "kl_coef": 0.5,
        "learning_rate": 0.05,
        "grad_norm": 3.0,
        "critic_grad_norm": 4.0,
    }


@pytest.mark.parametrize(("size", "expected"), [(0.01, 0.09 / math.sqrt(53.75 * 8e-4)), (0.1, None), (0.0, None)])
def test_direction_of_an_update_is_counted_by_hand(build_ppo, accelerator, size, expected):
    """Advantages are [0, .5, .5], [3.5, 4], [5], as above; changes are `size` times [1, -1, 2], [1, 0], [1]."""
    built = build_ppo(ppo_epochs=2, kl_coef=0.5, lam=1.0, whiten_advantages=False, micro_batch_size=2)
    give_scores(built, replace(SCORES, values=torch.zeros(4, 3)))
    (prompts,) = built.batches.step(0)
    experience = built.collect(prompts, MetricSums())
    now = experience.log_probs + size * torch.tensor([[1, -1, 2], [1, 0, JUNK], [1, JUNK, JUNK], [JUNK] * 3])
    parts = [cut.select(now, 3) for cut in experience.micro_batches]

    def measure(context: Any) -> Any:
        given = iter(parts)
        return measure_direction(context, experience, lambda *_: SimpleNamespace(log_probs=next(given)))

    assert measure(built.context) == ({} if expected is None else {"direction": pytest.approx(expected)})
    in_16_bits = replace(built.context, precision=accelerator.precision("bf16"))
    assert measure(in_16_bits) == {}, "rounding changes all tokens alike"


def test_judge_takes_no_part_in_the_operations_of_steps(accelerator, tmp_path):
    context = stage_context(accelerator, tmp_path, "ppo", {"ppo": {"judge": "j"}})
    context.models.update(dict.fromkeys(context.placements, llama(4)))
    assert context.placements.keys() - context.model_flops.keys() == {"judge"}


def test_gap_between_drawing_and_scoring_is_counted_by_hand(build_ppo, monkeypatch):
    """Generation finds log-probabilities that are lower by 0, 0.1, 0.2; 0.3, 0; 0 than scoring does."""
    gaps = torch.tensor([[0, 0.1, 0.2], [0.3, 0, JUNK], [0, JUNK, JUNK], [JUNK] * 3])
    built = quiet(build_ppo())
    monkeypatch.setattr(Decoder, "generate", lambda *_: Completions(IDS, DRAWN, LOG_PROBS - gaps))
    numbers = built.step(0)
    assert numbers["draw_gap"] == pytest.approx(0.6 / 6, rel=1e-5)
    assert numbers["draw_gap_max"] == pytest.approx(0.3, rel=1e-5)
    # of log(drawn / scored) = -gap: scored / drawn - 1 - gap
    expected = sum(math.exp(gap) - 1 - gap for gap in (0.1, 0.2, 0.3)) / 6
    assert numbers["draw_kl"] == pytest.approx(expected, rel=1e-4)


def test_groups_without_variance_are_counted_by_hand(build_ppo):
    built = quiet(build_ppo(estimator="rloo", completions_per_prompt=2))
    give_scores(built, replace(SCORES, values=None, reward=torch.tensor([3.0, 3.0, 1.0, 4.0])))
    assert built.step(0)["equal_group_share"] == 0.5
    give_scores(built, replace(SCORES, values=None, reward=torch.tensor([3.0, 3.0, 1.0, 1.0])))
    assert built.step(1)["equal_group_share"] == 1.0, "the second prompt only fills up the batch"


def quiet(built: PPOTrainer) -> PPOTrainer:
    """Its engines take no step."""
    for engine in built.engines.values():
        engine.step, engine.grad_norm = (lambda parts, loss: MetricSums()), (lambda: 0.0)
    return built


def test_explained_variance_is_counted_by_hand(build_ppo):
    built = quiet(build_ppo(kl_coef=0.5, lam=1.0, minibatch_size=2))
    values = torch.tensor([[0, 1, 1], [3, 4, JUNK], [3, JUNK, JUNK], [JUNK] * 3])
    give_scores(built, replace(SCORES, values=values))
    # Returns [0, .5, .5], [3.5, 4], [5], their mean 2.25: squares 5.0625 + 2 * 3.0625 + 1.5625 + 3.0625 + 7.5625
    # Errors [0, -.5, -.5], [.5, 0], [2], their mean .25: squares .0625 + 2 * .5625 + .0625 + .0625 + 3.0625
    assert built.step(0)["explained_variance"] == pytest.approx(1 - 4.375 / 23.375, rel=1e-5)


def test_scores_are_scaled_then_clipped_then_penalized(build_ppo):
    built = quiet(build_ppo(normalize_scores="batch", score_clip=1, missing_eos_penalty=0.5, kl_coef=0, lam=1.0))
    built.step(0)
    # 1, 4 and 7 have mean 4 and deviation sqrt(6): -1.22, 0 and 1.22, clipped to 1; the third alone ends.
    assert built.experience.returns[:, 0].tolist() == pytest.approx([-1.5, -0.5, 1.0, 0.0])


@pytest.mark.parametrize(
    ("settings", "given_function", "limit"),
    [
        ({}, False, 5),  # the reward model alone
        ({"reward_functions": ["rewards.py:points"]}, False, None),
        ({"reward_functions": ["rewards.py:points"], "reward_weight": 0}, False, None),
        ({"reward_functions": [{"function": "rewards.py:points", "weight": 0}]}, False, 5),  # only recorded
        ({"reward_functions": ["rewards.py:points"], "score_clip": 6}, False, 6),
        ({}, True, None),  # a function in a loop of rlhf.session
        ({"score_clip": 6}, True, 6),
    ],
)
def test_only_scores_of_a_reward_model_are_clipped_by_default(build_ppo, monkeypatch, settings, given_function, limit):
    monkeypatch.setattr("rlhf.trainers.ppo.trainer.WeightedRewards", lambda *_: None)
    built = quiet(build_ppo(kl_coef=0, lam=1.0, **settings))
    metrics = built.step(0, (lambda *_: None) if given_function else None)
    assert built.experience.returns[:3, 0].tolist() == pytest.approx([1, 4, 7 if limit is None else limit])
    assert metrics.get("score_clip_fraction") == (None if limit is None else pytest.approx(1 / 3))


def test_deviation_of_scores_has_digits_beside_a_large_mean(build_ppo):
    built = quiet(build_ppo())
    give_scores(built, replace(SCORES, reward=torch.tensor([10_001.0, 10_004.0, 10_007.0, JUNK])))
    assert built.step(0)["reward_std"] == pytest.approx(math.sqrt(6), rel=1e-5)
    assert built.evaluate("before").numbers["reward_std"] == pytest.approx(math.sqrt(6), rel=1e-5)


def test_scores_of_all_rollouts_share_a_scale_after_a_restart(build_ppo):
    settings = {"normalize_scores": "running", "score_clip": 9, "kl_coef": 0, "lam": 1.0}
    first, second = quiet(build_ppo(**settings)), quiet(build_ppo(**settings))
    first.step(0)
    second.load_state_dict(first.state_dict())
    give_scores(second, replace(SCORES, reward=torch.tensor([10.0, 10, 10, JUNK])))
    second.step(1)
    # 1, 4, 7 and three times 10: mean 7, squares 36 + 9 + 0 + 3 * 9 = 72, deviation sqrt(12)
    assert second.experience.returns[:3, 0].tolist() == pytest.approx([3 / math.sqrt(12)] * 3)


def test_moving_mean_weighs_steps_by_nine_tenths(build_ppo):
    built = quiet(build_ppo())
    rewards = [4.0, 1.0, 10.0]
    averages = [built.shaping.update({"reward": reward, "kl": 0.0})["reward_ema"] for reward in rewards]
    assert averages == pytest.approx([4, (0.9 * 4 + 1) / 1.9, (0.81 * 4 + 0.9 + 10) / 2.71])


def test_samples_are_texts_with_their_score_and_kl(build_ppo):
    built = build_ppo()
    assert built.experience is None, "there is no rollout yet"
    (prompts,) = built.batches.step(0)
    built.experience = built.collect(prompts, MetricSums())
    asked = [" ".join(language.WORDS[token] for token in row if token) for row in prompts["prompt_ids"].tolist()]
    assert set(asked[:3]) == {example.row.text for example in PROMPTS}
    expected = [("a b c", 1.0, 2.0, 3), ("a b", 4.0, 1.0, 2), ("", 7.0, 0.0, 1)]  # an end is not shown
    samples = partial(select_samples, built.experience, built.tokenizer, host="cpu")
    chosen = samples(3)
    assert [sample.prompt for sample in chosen] == asked[:3]
    assert [sample[1:5] for sample in chosen] == [
        (text, score, pytest.approx(kl, abs=1e-5), tokens) for text, score, kl, tokens in expected
    ]
    for row, sample in enumerate(chosen):
        drawn = DRAWN[row].bool()
        assert sample.by_token["log_ratio"] == LOG_RATIO[row][drawn].tolist()
        assert sample.by_token["value"] == [0.0] * sample.tokens
        advantages = built.experience.advantages[row][drawn].tolist()
        assert sample.by_token["advantage"] == pytest.approx(advantages, abs=1e-4)
        assert len(sample.pieces) == sample.tokens
    assert chosen[0].numbers == "score 1, KL 2, 3 tokens"
    assert samples(2) == [chosen[0], chosen[2]], "as far apart as can be"
    assert len(samples(9)) == 4


def test_heldout_numbers_are_those_counted_by_hand(build_ppo):
    built = build_ppo()
    built.held_out = replace(built.held_out, rule=lambda prompt, completion: completion.endswith("c"))
    result = built.evaluate("now")
    assert result.numbers == {
        **{key: pytest.approx(value, rel=1e-5) for key, value in ROLLOUT.items()},
        "distinct_2": pytest.approx(2 / 3),  # (1, 2), (2, 3) and (1, 2) again
        "approved_share": pytest.approx(1 / 3),  # "a b c", "a b", ""
    }


def test_without_a_rule_and_a_judge_there_are_no_such_numbers(build_ppo):
    result = build_ppo().evaluate("now")
    assert not {"approved_share", "judge_reward"} & result.numbers.keys()
    assert not result.judged and not any("judge" in row for row in result.rows)


def test_few_prompts_cannot_end_training_early(build_ppo):
    keys = {"judge": "j", "eval_every": 1, "keep": "best(judge_reward)", "stop": "over_optimized"}
    with pytest.raises(ConfigError, match="at least 10 held-out prompts for a significant fall, got 3"):
        build_ppo(**keys)


def test_more_completions_are_drawn_before_training_alone(build_ppo):
    """Rewards of three draws: 1, 4, 7, then each by 10 and by 20 more; the first draw is the one that is evaluated."""
    built = build_ppo(best_of=3)
    drawn = itertools.cycle([0.0, 10.0, 20.0])
    built.score = lambda rollout, examples: replace(SCORES, reward=SCORES.reward + next(drawn))
    rows = built.evaluate("before").rows
    assert [row["rewards"] for row in rows] == [[1, 11, 21], [4, 14, 24], [7, 17, 27]]
    assert [row["reward"] for row in rows] == [1, 4, 7]
    assert not any("rewards" in row for row in built.evaluate("after step 3").rows)


def test_judge_scores_heldout_completions_at_their_last_token(build_ppo):
    built = build_ppo()
    built.held_out = replace(built.held_out, judge=last_token_scorer())
    result = built.evaluate("now")
    assert result.judged == [3.0, 2.0, 0.0] == [row["judge"] for row in result.rows]  # of IDS where DRAWN is 1
    assert result.numbers["judge_reward"] == pytest.approx(5 / 3)
    assert result.numbers["reward"] == pytest.approx(ROLLOUT["reward"]), "the judge takes no part in the reward"


@pytest.mark.parametrize(
    ("completions", "expected"),
    [
        ([[5, 5, 5, 5]], 1 / 3),
        ([[5, 6, 7]], 1.0),
        ([[5, 6], [5, 6], [6, 5], [5, 7]], 3 / 4),  # pairs do not cross completions, and have an order
        ([[5], []], 0.0),
    ],
)
def test_distinct_2_is_different_pairs_over_all_pairs(completions, expected):
    assert distinct(completions, 2) == pytest.approx(expected)


def test_evaluation_repeats_itself_and_restores_the_generator(build_ppo, monkeypatch):
    built = build_ppo()
    seen, generator = [], built.decoder.random

    def generate(decoder, model, prompt_ids, prompt_mask, sampling, copies):
        seen.append((prompt_ids.tolist(), torch.rand(3, generator=generator).tolist()))
        return Completions(IDS, DRAWN)

    monkeypatch.setattr(Decoder, "generate", generate)
    expected = torch.rand(4, generator=generator.manual_seed(5)).tolist()
    generator.manual_seed(5)
    numbers = []
    for _ in range(2):
        built.evaluate("now")
        numbers += torch.rand(2, generator=generator).tolist()
    assert seen[0] == seen[1]
    assert numbers == expected
