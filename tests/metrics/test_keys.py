"""Every number of a run is what rlhf/metrics/KEYS.md says it is: against plain transformers, and counted by hand."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rlhf
from accelerators import ShapePolicy
from rlhf.data.batches import Batches, collate_reward
from rlhf.data.rows import Message, Row
from rlhf.data.tokenization import Demonstration, Pair, Prompt, StageData
from rlhf.engine.statistics import Sums
from rlhf.engine.training import TrainingEngine
from rlhf.metrics.recorder import Recorder
from rlhf.rollout.decoder import Completions, Decoder
from rlhf.run import RunDirectory
from rlhf.stages import loop, ppo, reward, sft
from rlhf.stages.evaluation import distinct_2, evaluate
from tests.helpers import llama
from tests.optimum import language
from tests.stage_context import stage_context

KEYS = Path(rlhf.__file__).parent / "metrics" / "KEYS.md"
STAGES = ("sft", "reward", "ppo")
EOS = 0


# -- the table ----------------------------------------------------------------------------------------------------


def table(*headings: str) -> Iterator[tuple[str, str, str]]:
    """(stage, key, definition) of the rows under these headings."""
    for section in KEYS.read_text(encoding="utf-8").split("\n## ")[1:]:
        if section.startswith(headings):
            for key, stage, definition in re.findall(r"^\| `(\w+)` \| (\w+) \| (.+) \| [^|]+ \|$", section, re.M):
                yield from ((name, key, definition) for name in (STAGES if stage == "all" else (stage,)))


def keys_of_records(folder: Path, stage: str) -> set[str]:
    lines = (folder / stage / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {key for line in lines for key in json.loads(line)}


RECORDS = ("Every record", "Numbers of a training step", "Held-out numbers")


def test_every_row_of_the_table_is_read():
    rows = [line for line in KEYS.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    defined = [*table(*RECORDS), *table("stage.json")]
    assert len(defined) == sum(3 if "| all |" in line else 1 for line in rows) > 50
    assert len({row[:2] for row in table(*RECORDS)}) == len([*table(*RECORDS)]), "a key is defined twice"


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_records_the_keys_of_the_table_and_no_others(finished_run, stage):
    always = {key for name, key, definition in table(*RECORDS) if name == stage and not definition.startswith("Only ")}
    assert keys_of_records(finished_run, stage) == always


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_ends_with_the_keys_of_the_table_and_no_others(finished_run, stage):
    summary = json.loads((finished_run / stage / "stage.json").read_text())
    assert summary.keys() == {key for name, key, _ in table("stage.json") if name == stage}
    heldout = {key.removeprefix("heldout_") for key in keys_of_records(finished_run, stage) if "heldout_" in key}
    assert summary["before"].keys() == summary["after"].keys() == heldout


def test_events_have_the_names_of_the_records(finished_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for stage in STAGES:
        events = EventAccumulator(str(finished_run / stage / "tensorboard"))
        events.Reload()
        bookkeeping = {"stage", "step", "time", "tag", "text"}
        expected = {f"{stage}/{key}" for key in keys_of_records(finished_run, stage) - bookkeeping}
        assert set(events.Tags()["scalars"]) == expected


# -- whole stages of one step, by plain transformers ---------------------------------------------------------------

ROW = Row((Message("user", "a"),), "a", "b", "b", "c", "")
OPTIMIZER = {"learning_rate": 0.05, "warmup": 0, "schedule": "constant", "max_grad_norm": 1e-3}


class Ran:
    """A stage that ran in this process: its records, its summary and its model."""

    def __init__(self, folder: Path, stage: str, summary: dict[str, Any]) -> None:
        self.keys = keys_of_records(folder, stage)
        lines = (folder / stage / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        [self.step] = [record for record in records if "learning_rate" in record]
        self.heldout = [record for record in records if any(key.startswith("heldout_") for key in record)]
        self.texts = [record for record in records if "text" in record]
        self.summary = summary
        self.model = folder / stage / "model"


@pytest.fixture(scope="module")
def run_stage(accelerator, tmp_path_factory):
    """Run a stage on an accelerator that counts compilations, as if its precision scaled losses."""

    def run(stage: str, values: dict[str, Any], call: Any) -> Ran:
        folder = tmp_path_factory.mktemp(stage)
        precision = replace(accelerator.precision("fp32"), loss_scaling=True)
        data = {"max_prompt_length": 3, "max_completion_length": 5}
        with pytest.MonkeyPatch.context() as patch, Recorder(RunDirectory(folder).stage(stage)) as recorder:
            patch.setattr(accelerator, "compilations", lambda: 7)
            patch.setattr(TrainingEngine, "loss_scale", lambda engine: 1.0)
            values = {"precision": "fp32", "data": data, stage: values}
            context = stage_context(accelerator, folder, stage, values, precision=precision, recorder=recorder)
            summary = call(context)
        return Ran(folder, stage, summary)

    return run


def scalar(seed: int, vocabulary: int = 20) -> Any:
    from transformers import LlamaForSequenceClassification

    sizes = {"num_labels": 1, "num_hidden_layers": 1, "initializer_range": 0.3}
    config = llama(vocabulary, eos_token_id=EOS).config
    config.update(sizes)
    torch.manual_seed(seed)
    return LlamaForSequenceClassification(config)


def small(seed: int) -> Any:
    return llama(20, seed=seed, eos_token_id=EOS, num_hidden_layers=1, initializer_range=0.3)


def tokenizer() -> Any:
    return language.tokenizer()


DEMONSTRATIONS = [
    Demonstration([3, 4], [5, 6, 7, EOS], ROW),
    Demonstration([8], [9, EOS], ROW),
    Demonstration([3, 9, 4], [11, EOS], ROW),
]
HELDOUT = [Demonstration([5, 5], [8, EOS], ROW), Demonstration([12], [13, 14, 15, EOS], ROW)]


def transformers_loss(model: Any, examples: list[Demonstration]) -> Tensor:
    """transformers' own loss, a mean over the labels that are not -100."""
    width = max(len(example.prompt_ids + example.completion_ids) for example in examples)
    ids, labels = torch.zeros(2, len(examples), width, dtype=torch.long)
    mask = torch.zeros(len(examples), width, dtype=torch.long)
    labels[:] = -100
    for row, example in enumerate(examples):
        tokens, start = example.prompt_ids + example.completion_ids, len(example.prompt_ids)
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens)] = 1
        labels[row, start : len(tokens)] = torch.tensor(example.completion_ids)
    return model(input_ids=ids, attention_mask=mask, labels=labels).loss


def gradient_norm(model: nn.Module, loss: Tensor) -> float:
    loss.backward()
    return math.sqrt(sum((p.grad**2).sum().item() for p in model.parameters() if p.grad is not None))


@pytest.fixture(scope="module")
def sft_ran(run_stage):
    values = {"batch_size": 4, "micro_batch_size": 2, "max_steps": 1, "optimizer": OPTIMIZER}
    data = StageData(DEMONSTRATIONS, HELDOUT, [])
    return run_stage("sft", values, lambda context: sft.run(context, small(1), tokenizer(), data))


def test_the_supervised_loss_is_that_of_transformers_before_the_update(sft_ran):
    """Three rows in a batch of four: the one that fills it up does not count."""
    model = small(1)
    loss = transformers_loss(model, DEMONSTRATIONS)
    assert sft_ran.step["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert sft_ran.step["grad_norm"] == pytest.approx(gradient_norm(model, loss), rel=1e-4)  # before clipping
    assert sft_ran.step["learning_rate"] == 0.05


def test_the_tokens_of_a_batch_are_those_of_prompts_and_replies(sft_ran):
    lengths = [len(example.prompt_ids + example.completion_ids) for example in DEMONSTRATIONS]
    assert sft_ran.step["tokens"] in {sum(lengths) + filler for filler in lengths}


def test_the_heldout_perplexity_is_exp_of_transformers_loss(sft_ran):
    from transformers import AutoModelForCausalLM

    before, after = sft_ran.heldout
    assert before["step"] == 0 and after["step"] == 1
    expected = [
        transformers_loss(m, HELDOUT).exp().item()
        for m in (small(1), AutoModelForCausalLM.from_pretrained(sft_ran.model))
    ]
    assert before["heldout_perplexity"] == pytest.approx(expected[0], rel=1e-5)
    assert after["heldout_perplexity"] == pytest.approx(expected[1], rel=1e-5)
    assert abs(expected[0] - expected[1]) > 0.1, "nothing changed, so the moment is not tested"
    assert sft_ran.summary["before"] == {"perplexity": before["heldout_perplexity"]}
    assert sft_ran.summary["after"] == {"perplexity": after["heldout_perplexity"]}


PAIRS = [
    Pair([3, 4], [5, 6, 7, EOS], [5, 8, EOS], ROW),
    Pair([9], [10, EOS], [11, 12, 13, EOS], ROW),
    Pair([6, 3], [7, EOS], [8, EOS], ROW),
]
HELDOUT_PAIRS = [
    Pair([4], [14, EOS], [15, EOS], ROW),
    Pair([5, 6], [16, 17, EOS], [18, EOS], ROW),
    Pair([7], [9], [2], ROW),
]


@pytest.fixture(scope="module")
def reward_ran(run_stage):
    values = {"batch_size": 4, "micro_batch_size": 2, "max_steps": 1, "optimizer": OPTIMIZER}
    data = StageData(PAIRS, HELDOUT_PAIRS, [])
    return run_stage("reward", values, lambda context: reward.run(context, scalar(1), tokenizer(), data))


def plain_scores(model: Any, pairs: list[Pair]) -> tuple[Tensor, Tensor]:
    """[pairs] each: what transformers says of every reply alone, without padding."""
    return tuple(
        torch.cat(
            [
                model.score(model.model(input_ids=torch.tensor([p.prompt_ids + ids(p)])).last_hidden_state)[:, -1, 0]
                for p in pairs
            ]
        )
        for ids in (lambda p: p.chosen_ids, lambda p: p.rejected_ids)
    )


def agrees(numbers: dict[str, float], scores: tuple[Tensor, Tensor], prefix: str = "") -> None:
    chosen, rejected = scores
    assert numbers[f"{prefix}accuracy"] == pytest.approx((chosen > rejected).float().mean().item())
    assert numbers[f"{prefix}chosen_score"] == pytest.approx(chosen.mean().item(), abs=1e-5)
    assert numbers[f"{prefix}rejected_score"] == pytest.approx(rejected.mean().item(), abs=1e-5)


def plain_pair_loss(model: Any, pair: Pair) -> Tensor:
    """The mean of -log sigmoid(chosen - rejected) from where two replies of a pair part; the shorter one is padded."""
    rows = [pair.prompt_ids + ids for ids in (pair.chosen_ids, pair.rejected_ids)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [EOS] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    chosen, rejected = model.score(model.model(input_ids=ids, attention_mask=mask).last_hidden_state)[..., 0]
    first = next(column for column in range(width) if ids[0, column] != ids[1, column])
    return -(chosen - rejected)[first:].sigmoid().log().mean()


def test_the_reward_models_numbers_are_those_of_plain_transformers(reward_ran):
    agrees(reward_ran.step, plain_scores(scalar(1), PAIRS))
    model = scalar(1)
    loss = torch.stack([plain_pair_loss(model, pair) for pair in PAIRS]).mean()
    assert reward_ran.step["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert reward_ran.step["grad_norm"] == pytest.approx(gradient_norm(model, loss), rel=1e-3)
    assert reward_ran.step["pairs"] == 3
    assert reward_ran.step["learning_rate"] == 0.05


def test_the_heldout_scores_are_those_of_plain_transformers(reward_ran):
    from transformers import AutoModelForSequenceClassification

    before, after = reward_ran.heldout
    assert before["step"] == 0 and after["step"] == 1
    for numbers, model in (
        (before, scalar(1)),
        (after, AutoModelForSequenceClassification.from_pretrained(reward_ran.model)),
    ):
        agrees(numbers, plain_scores(model, HELDOUT_PAIRS), "heldout_")
    assert reward_ran.summary["after"] == {
        key.removeprefix("heldout_"): value for key, value in after.items() if key.startswith("heldout_")
    }


# -- the reward model's numbers, counted by hand -------------------------------------------------------------------


class LastToken(nn.Module):
    """Scores every token with its own id."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return input_ids.float()


COUNTED = [
    Pair([1], [9], [5], ROW),
    Pair([1], [3], [6], ROW),
    Pair([1, 2], [8, 4], [7, 4], ROW),
    Pair([1], [7], [2, 5], ROW),
]
"""Scores 9 > 5, 3 < 6, 4 = 4, 7 > 5."""


def collate(pairs, real=None):
    return collate_reward(pairs, real, policy=ShapePolicy("dynamic"), maximum=8, pad_token_id=19)


def test_accuracy_counts_pairs_with_the_higher_chosen_score_and_a_tie_is_not_one():
    batch = collate(COUNTED)
    result = reward.pair_loss(LastToken(), batch)
    numbers = reward.averages({key: value.item() for key, value in reward.pair_statistics(result, batch).items()})
    # accuracy 2 of 4; chosen (9 + 3 + 4 + 7) / 4; rejected (5 + 6 + 4 + 5) / 4
    assert numbers == {"pairs": 4, "accuracy": 0.5, "chosen_score": 5.75, "rejected_score": 5.0}


def test_the_pairwise_loss_is_a_mean_over_tokens_then_pairs():
    batch = collate([COUNTED[0], COUNTED[3], COUNTED[1]], 2)
    loss = reward.pair_loss(LastToken(), batch).loss.item()
    first = math.log(1 + math.exp(-(9 - 5)))
    # the reply of two tokens: 7 against 2, then the padding, 19, against 5
    second = (math.log(1 + math.exp(-(7 - 2))) + math.log(1 + math.exp(-(19 - 5)))) / 2
    assert loss == pytest.approx((first + second) / 2, rel=1e-5)


def test_heldout_pairs_that_fill_up_a_batch_do_not_count(accelerator, tmp_path):
    context = stage_context(accelerator, tmp_path, "reward", {})
    # five in batches of four: the last one fills its batch up with three copies of itself
    pairs = [*COUNTED, Pair([1], [8], [2], ROW)]
    held_out = Batches(pairs, collate, batch_size=4, micro_batch_size=2, rank=0, world_size=1, seed=0, shuffle=False)
    found = reward.evaluate(context, SimpleNamespace(engine=LastToken()), held_out, "now")
    # accuracy 3 of 5; chosen (9 + 3 + 4 + 7 + 8) / 5; rejected (5 + 6 + 4 + 5 + 2) / 5
    assert found == {
        "accuracy": pytest.approx(0.6),
        "chosen_score": pytest.approx(6.2),
        "rejected_score": pytest.approx(4.4),
    }


# -- PPO's numbers, counted by hand --------------------------------------------------------------------------------

JUNK = 50.0
"""Stands where nothing must be counted."""
FOUR = math.log(4)  # the models below know four words

# Three rows of 3, 2 and 1 tokens, and one that only fills up the batch.
IDS = torch.tensor([[1, 2, 3], [1, 2, EOS], [3, EOS, EOS], [2, 2, 2]])
DRAWN = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]])
# policy now / policy that drew, in the first update, where the policy gives every word 1/4
RATIO = torch.tensor([[1, 1.5, 1], [0.5, 1, JUNK], [1, JUNK, JUNK], [JUNK] * 3])
LOG_RATIO = torch.tensor([[1, 0, 1], [1, 0, JUNK], [0, JUNK, JUNK], [JUNK] * 3])  # policy / reference
LOG_PROBS = -FOUR - RATIO.log()
SCORED = {
    "log_probs": LOG_PROBS,
    "ref_log_probs": LOG_PROBS - LOG_RATIO,
    "entropy": torch.tensor([[1, 2, 3], [1, 3, JUNK], [2, JUNK, JUNK], [JUNK] * 3]),
    "values": torch.tensor([[0, 0, 0], [0, 0, JUNK], [0, JUNK, JUNK], [JUNK] * 3]),
    "scores": torch.tensor([1.0, 4, 7, JUNK]),
}
ROLLOUT = {
    "reward": 4.0,  # (1 + 4 + 7) / 3, not clipped to 5
    "reward_std": math.sqrt(6),  # ((1 - 4)^2 + (4 - 4)^2 + (7 - 4)^2) / 3 = 6
    "kl": 1.0,  # (2 + 1 + 0) / 3 sequences
    "entropy": 2.0,  # (6 + 4 + 2) / 6 tokens
    "response_length": 2.0,  # 6 tokens / 3 sequences
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
    """PPO whose decoder draws `IDS` and whose models find `SCORED`, on three prompts in batches of four."""

    def build(**settings: Any) -> ppo.PPO:
        values = {
            "precision": "fp32",
            "data": {"max_prompt_length": 3, "max_completion_length": 3},
            "ppo": {"batch_size": 4, "optimizer": OPTIMIZER, "critic_optimizer": OPTIMIZER, **settings},
        }
        context = stage_context(accelerator, tmp_path, "ppo", values)
        actor, reference = (llama(4, eos_token_id=EOS, num_hidden_layers=1) for _ in range(2))
        models = ppo.Models(actor, reference, scalar(1, 4), language.TableOfRewards(seed=0))
        built = ppo.PPO(context, models, tokenizer(), StageData(PROMPTS, PROMPTS, []))
        monkeypatch.setattr(Decoder, "generate", lambda *_: Completions(IDS, DRAWN))
        built.score = lambda sequences: SCORED
        return built

    return build


def prompt(*ids: int) -> Prompt:
    text = " ".join(language.WORDS[token] for token in ids)
    return Prompt(list(ids), Row((Message("user", text),), text, None, None, None, ""))


PROMPTS = [prompt(1), prompt(2, 3), prompt(3, 1, 2)]


def step_of(models: list[Any]) -> Any:
    """An engine's step that computes the loss with the next of `models`, and updates nothing."""

    def step(parts: list[Any], loss: Any) -> Sums:
        sums = Sums()
        model = models.pop(0)
        for part in parts:
            value, statistics = loss(model, part)
            sums.add(loss=value, **statistics)
        return sums

    return step


def test_the_numbers_of_a_ppo_step_are_those_counted_by_hand(build_ppo):
    built = build_ppo(ppo_epochs=2, kl_coef=0.5, lam=1.0, whiten_advantages=False, micro_batch_size=2)
    built.actor.step = step_of([KnownLogits(0.25, 0.25, 0.25, 0.25), KnownLogits(1 / 6, 1 / 2, 1 / 6, 1 / 6)])
    built.critic.step = step_of([lambda ids, mask: torch.ones(ids.shape)] * 2)
    built.actor.grad_norm, built.critic.grad_norm = (lambda: 3.0), (lambda: 4.0)
    # Rewards: -0.5 of the log-ratio, and the score, clipped to 5, on the last token. With gamma = lambda = 1 a return
    # is the sum of the rewards from its token on: [0, .5, .5], [3.5, 4], [5]; the values are 0, so is the advantage.
    # Policy, first update, ratios [1, 1.5, 1], [.5, 1], [1]; the lesser of ratio and clipped ratio times advantage:
    #   0 + 1.2 * .5 + .5 + .5 * 3.5 + 4 + 5 = 11.85
    # second update, where word 1 has become twice as likely and the others 2/3 times: [2, 1, 2/3], [1, 2/3], [2/3]
    #   0 + .5 + 1/3 + 3.5 + 8/3 + 10/3 = 31/3
    # Critic: the value is 1, clipped to .2; the greater of (1 - R)^2 and (.2 - R)^2:
    #   1 + .25 + .25 + 10.89 + 14.44 + 23.04 = 49.87
    assert built.step(0) == {
        **{key: pytest.approx(value, rel=1e-5) for key, value in ROLLOUT.items()},
        "tokens": 6,
        "returns": pytest.approx(13.5 / 6),
        "policy_loss": pytest.approx(-(11.85 + 31 / 3) / 6 / 2, rel=1e-5),
        "value_loss": pytest.approx(49.87 / 6 / 2, rel=1e-5),
        "clip_fraction": pytest.approx((2 / 6 + 4 / 6) / 2),  # 1.5 and .5; then 2 and three of 2/3
        "kl_coef": 0.5,
        "learning_rate": 0.05,
        "grad_norm": 3.0,
        "critic_grad_norm": 4.0,
    }


def test_heldout_numbers_are_those_counted_by_hand(build_ppo):
    built = build_ppo()
    found = evaluate(built.context, built, PROMPTS, "now", lambda prompt, completion: completion.endswith("c"))
    assert found["numbers"] == {
        **{key: pytest.approx(value, rel=1e-5) for key, value in ROLLOUT.items()},
        "distinct_2": pytest.approx(2 / 3),  # (1, 2), (2, 3) and (1, 2) again
        "approved_share": pytest.approx(2 / 3),  # "a b c", "a b", "c"
    }


def test_without_a_judge_no_share_is_approved_or_not(build_ppo):
    built = build_ppo()
    assert "approved_share" not in evaluate(built.context, built, PROMPTS, "now", None)["numbers"]


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
    assert distinct_2(completions) == pytest.approx(expected)


def test_evaluation_repeats_its_prompts_and_random_numbers_and_leaves_the_generator_as_it_was(build_ppo, monkeypatch):
    built = build_ppo()
    seen = []

    def generate(decoder, model, prompt_ids, prompt_mask, sampling):
        seen.append((prompt_ids.tolist(), torch.rand(3).tolist()))
        return Completions(IDS, DRAWN)

    monkeypatch.setattr(Decoder, "generate", generate)
    torch.manual_seed(5)
    expected = torch.rand(4).tolist()
    torch.manual_seed(5)
    found = []
    for _ in range(2):
        evaluate(built.context, built, PROMPTS, "now", None)
        found += torch.rand(2).tolist()
    assert seen[0] == seen[1]
    assert found == expected


# -- a whole PPO stage ---------------------------------------------------------------------------------------------


class Echo:
    """Completes every prompt with itself: backwards in the first `backwards` batches, then as it is."""

    def __init__(self, backwards: int) -> None:
        self.backwards = backwards

    def __call__(self, model: Any, prompt_ids: Tensor, prompt_mask: Tensor, sampling: Any) -> Completions:
        ids, mask = prompt_ids.flip(1), prompt_mask.flip(1)  # padded right
        if self.backwards == 0:
            rows = [row[real.bool()] for row, real in zip(prompt_ids, prompt_mask)]
            ids = torch.stack([F.pad(row, (0, ids.shape[1] - len(row))) for row in rows])
        self.backwards = max(0, self.backwards - 1)
        return Completions(ids, mask)


@pytest.fixture(scope="module")
def ppo_ran(run_stage):
    """On the embedded data's terms: with a judge."""
    values = {"batch_size": 2, "steps": 1, "optimizer": OPTIMIZER, "critic_optimizer": OPTIMIZER}
    heldout = [prompt(2, 1), prompt(3), prompt(1, 1, 2), prompt(2), prompt(3, 3)]
    data = StageData([prompt(1), prompt(2)], heldout, [])

    def call(context):
        actor, reference = (llama(4, eos_token_id=EOS, num_hidden_layers=1) for _ in range(2))
        models = ppo.Models(actor, reference, scalar(1, 4), language.TableOfRewards(seed=0))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Decoder, "generate", Echo(backwards=3))  # the held-out prompts, two at a time
            return ppo.run(
                context, models, tokenizer(), data, lambda prompt, text: text.split() == prompt.split()[::-1]
            )

    return run_stage("ppo", values, call)


def test_samples_belong_to_their_prompts(ppo_ran):
    prompts, backwards = ["b a", "c", "a a b"], ["a b", "c", "b a a"]
    assert ppo_ran.summary["samples"] == [
        {"prompt": text, "before": before, "after": text} for text, before in zip(prompts, backwards)
    ]
    recorded = [record["text"] for record in ppo_ran.texts if record["tag"].startswith("heldout_")]
    assert recorded == [
        f"{text}\n{answer}" for answers in (backwards, prompts) for text, answer in zip(prompts, answers)
    ]


def test_the_judge_sees_every_prompt_with_its_own_completion(ppo_ran):
    """It approves what says the prompt backwards."""
    assert ppo_ran.summary["before"]["approved_share"] == 1.0
    assert ppo_ran.summary["after"]["approved_share"] == pytest.approx(3 / 5)  # c, b and c c


def test_heldout_numbers_are_recorded_before_the_first_step_and_after_the_last(ppo_ran):
    before, after = ppo_ran.heldout
    assert before["step"] == 0 and after["step"] == 1
    assert before["heldout_kl"] == pytest.approx(0, abs=1e-6) and after["heldout_kl"] != 0
    for side, record in (("before", before), ("after", after)):
        assert {f"heldout_{key}": value for key, value in ppo_ran.summary[side].items()}.items() <= record.items()


@pytest.mark.parametrize("stage", STAGES)
def test_keys_that_only_some_runs_have_are_those_of_the_table(sft_ran, reward_ran, ppo_ran, stage):
    """Of an accelerator that counts compilations, a precision that scales losses, and data with a judge."""
    ran = {"sft": sft_ran, "reward": reward_ran, "ppo": ppo_ran}[stage]
    assert ran.keys >= {
        key for name, key, definition in table(*RECORDS) if name == stage and definition.startswith("Only ")
    }
    assert ran.keys <= {key for name, key, _ in table(*RECORDS) if name == stage}
    assert ran.step["compilations"] == 7


def test_a_rate_is_the_steps_own_count_over_its_own_seconds(accelerator, tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    context = stage_context(accelerator, tmp_path, "sft", {"sft": {"log_every": 2}})
    logged = []
    monkeypatch.setattr(context.recorder, "log", lambda step, numbers: logged.append((step, numbers)))

    def step(index: int) -> dict[str, float]:
        now[0] += 4.0
        return {"tokens": 10.0 * (index + 1)}

    settings = context.config.sft
    loop.run_steps(context, total_steps=3, step=step, engines={}, settings=settings, unit="tokens", shown=())
    assert logged == [(2, {"tokens": 20.0, "tokens_per_second": 5.0}), (3, {"tokens": 30.0, "tokens_per_second": 7.5})]
