"""The numbers of whole stages, run here in one step, are what plain transformers computes from their rows.

The fixtures' accelerator counts compilations and their precision scales losses, for the keys that only such have.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlhf.data.examples import Demonstration, Pair
from rlhf.data.stage_dataset import StageData
from rlhf.engine.engine import TrainingEngine
from rlhf.generation.decoder import Completions, Decoder
from rlhf.reporting.recorder import Recorder
from rlhf.runs.directory import RunDirectory
from rlhf.trainers.distill import DistillTrainer
from rlhf.trainers.dpo import DPOTrainer
from rlhf.trainers.loop import fit
from rlhf.trainers.ppo.trainer import PPOTrainer
from rlhf.trainers.supervised import RewardTrainer, SFTTrainer
from tests.helpers import llama
from tests.in_process import OPTIMIZER, ROW, GivenModels, one_model, ppo_models, scalar_llama, stage_context
from tests.optimum import language
from tests.trainers.test_keys import RECORDS, STAGES, keys_of_records, table

EOS = 0
SIZES: dict[str, Any] = {"eos_token_id": EOS, "num_hidden_layers": 1, "initializer_range": 0.3}


PEAK = 5e12
MATRICES, WIDTH = 32 * (32 + 2 * 16 + 32) + 3 * 32 * 48, 32
"""Numbers in the matrices of the one layer of `tests.helpers.llama`, and the width of its attention."""


def forward(lengths: list[int], *, head: int) -> float:
    """Operations of a forward pass; `head`: of its output or scalar head, in all."""
    return sum(2 * MATRICES * length + 4 * WIDTH * length**2 for length in lengths) + head


def policy() -> Any:
    return llama(20, **SIZES)


def scorer() -> Any:
    return scalar_llama(20, **SIZES)


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
    """Run a stage on an accelerator that counts compilations and host calls, as if its precision scaled losses."""

    def run(stage: str, values: dict[str, Any], call: Any) -> Ran:
        folder = tmp_path_factory.mktemp(stage)
        precision = replace(accelerator.precision("fp32"), loss_scaling=True)
        data = {"max_prompt_length": 3, "max_completion_length": 5}
        with pytest.MonkeyPatch.context() as patch, Recorder(RunDirectory(folder).stage(stage)) as recorder:
            patch.setattr(accelerator, "compilations", lambda: 7)
            patch.setattr(accelerator, "host_operators", lambda: {"aten::sort": 2, "aten::unique": 3})
            info = replace(accelerator.info(), peak_flops={"fp32": PEAK})
            patch.setattr(accelerator, "info", lambda: info)
            patch.setattr(TrainingEngine, "loss_scale", lambda engine: 1.0)
            # ZeRO 1: an optimizer that can overflow
            values = {"precision": "fp32", "engine": {"zero_stage": 1}, "data": data, stage: values}
            context = stage_context(accelerator, folder, stage, values, precision=precision, recorder=recorder)
            summary = call(context)
        return Ran(folder, stage, summary)

    return run


def train(kind: Any, model: Any, data: StageData, context: Any) -> dict[str, Any]:
    return fit(kind(context, one_model(model), language.tokenizer(), data), context)


DEMONSTRATIONS = [
    Demonstration([3, 4], [5, 6, 7, EOS], ROW),
    Demonstration([8], [9, EOS], ROW),
    Demonstration([3, 9, 4], [11, EOS], ROW),
]
HELDOUT = [
    Demonstration([5, 5], [8, EOS], ROW),
    Demonstration([12], [13, 14, 15, EOS], ROW),
    Demonstration([2], [EOS], ROW),
]


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


SFT = {"batch_size": 4, "micro_batch_size": 2, "max_steps": 1, "optimizer": OPTIMIZER}


@pytest.fixture(scope="module")
def sft_ran(run_stage):
    return run_stage("sft", SFT, partial(train, SFTTrainer, policy(), StageData(DEMONSTRATIONS, HELDOUT, [])))


def test_supervised_loss_is_that_of_transformers(sft_ran):
    """Three rows in a batch of four, here and below: the one that fills it up does not count."""
    model = policy()
    loss = transformers_loss(model, DEMONSTRATIONS)
    assert sft_ran.step["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert sft_ran.step["grad_norm"] == pytest.approx(gradient_norm(model, loss), rel=1e-4)  # before clipping
    assert sft_ran.step["learning_rate"] == 0.05


def test_the_tokens_of_a_batch_are_those_of_prompts_and_replies(sft_ran):
    lengths = [len(example.prompt_ids + example.completion_ids) for example in DEMONSTRATIONS]
    assert sft_ran.step["tokens"] == sum(lengths)


def test_supervised_arithmetic_is_three_forward_passes(sft_ran):
    lengths = [len(example.prompt_ids + example.completion_ids) for example in DEMONSTRATIONS]
    step = sft_ran.step
    targets = sum(len(example.completion_ids) for example in DEMONSTRATIONS)
    expected = 3 * forward(lengths, head=2 * 20 * 32 * targets)
    assert step["tflops"] * 1e12 * step["seconds"] == pytest.approx(expected, rel=1e-6)
    assert step["peak_share"] == pytest.approx(step["tflops"] * 1e12 / PEAK)


def test_the_heldout_perplexity_is_exp_of_transformers_loss(sft_ran):
    from transformers import AutoModelForCausalLM

    before, after = sft_ran.heldout
    assert before["step"] == 0 and after["step"] == 1
    expected = [
        transformers_loss(m, HELDOUT).exp().item()
        for m in (policy(), AutoModelForCausalLM.from_pretrained(sft_ran.model))
    ]
    assert before["heldout_perplexity"] == pytest.approx(expected[0], rel=1e-5)
    assert after["heldout_perplexity"] == pytest.approx(expected[1], rel=1e-5)
    assert abs(expected[0] - expected[1]) > 0.1, "nothing changed, so the moment is not tested"
    assert sft_ran.summary["before"]["perplexity"] == before["heldout_perplexity"]
    assert sft_ran.summary["after"]["perplexity"] == after["heldout_perplexity"]


def greedy(model: Any, prompts: list[list[int]]) -> tuple[list[str], float]:
    """Return the texts of the likeliest tokens, predicted without a cache, and the share that does not end."""
    rows = []
    for prompt in prompts:
        ids = list(prompt)
        while len(ids) < len(prompt) + 5 and EOS not in ids[len(prompt) :]:
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        rows.append(ids[len(prompt) :])
    texts = [language.tokenizer().decode(row, skip_special_tokens=True).strip() for row in rows]
    return texts, sum(row[-1] != EOS for row in rows) / len(rows)


@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_greedy_completions_are_those_of_transformers(request, stage):
    from transformers import AutoModelForCausalLM

    ran, examples = request.getfixturevalue(f"{stage}_ran"), {"sft": HELDOUT, "dpo": HELDOUT_PAIRS}[stage]
    prompts = [example.prompt_ids for example in examples][:3]
    for moment, model in (("before", policy()), ("after", AutoModelForCausalLM.from_pretrained(ran.model))):
        texts, cut_off = greedy(model, prompts)
        assert [sample[moment] for sample in ran.summary["samples"]] == texts
        assert stage == "dpo" or any(texts), "nothing is compared"
        assert ran.summary[moment]["truncated_share"] == pytest.approx(cut_off)
    recorded = [record["text"] for record in ran.texts if record["tag"].startswith("heldout_") and record["step"] == 1]
    assert [text.partition("\n")[2] for text in recorded if "warning" not in text][: len(texts)] == texts


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
    return run_stage("reward", values, partial(train, RewardTrainer, scorer(), data))


def test_reward_arithmetic_is_of_both_rows_of_each_pair(reward_ran):
    lengths = [len(pair.prompt_ids + ids) for pair in PAIRS for ids in (pair.chosen_ids, pair.rejected_ids)]
    step = reward_ran.step
    assert step["tokens_per_second"] * step["seconds"] == pytest.approx(sum(lengths))
    expected = 3 * forward(lengths, head=2 * 32 * sum(lengths))
    assert step["tflops"] * 1e12 * step["seconds"] == pytest.approx(expected, rel=1e-6)


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
    assert numbers[f"{prefix}margin"] == pytest.approx((chosen - rejected).mean().item(), abs=1e-5)


def plain_pair_loss(model: Any, pair: Pair) -> Tensor:
    """The mean of -log sigmoid(chosen - rejected) from where two replies of a pair part; the shorter one is padded."""
    rows = [pair.prompt_ids + ids for ids in (pair.chosen_ids, pair.rejected_ids)]
    width = max(map(len, rows))
    ids = torch.tensor([row + [EOS] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    chosen, rejected = model.score(model.model(input_ids=ids, attention_mask=mask).last_hidden_state)[..., 0]
    first = next(column for column in range(width) if ids[0, column] != ids[1, column])
    return -(chosen - rejected)[first:].sigmoid().log().mean()


def test_reward_numbers_are_those_of_plain_transformers(reward_ran):
    agrees(reward_ran.step, plain_scores(scorer(), PAIRS))
    model = scorer()
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
        (before, scorer()),
        (after, AutoModelForSequenceClassification.from_pretrained(reward_ran.model)),
    ):
        agrees(numbers, plain_scores(model, HELDOUT_PAIRS), "heldout_")
        loss = torch.stack([plain_pair_loss(model, pair) for pair in HELDOUT_PAIRS]).mean()
        assert numbers["heldout_loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert reward_ran.summary["after"] == {
        key.removeprefix("heldout_"): value for key, value in after.items() if key.startswith("heldout_")
    }


@pytest.fixture(scope="module")
def dpo_ran(run_stage):
    values = {"batch_size": 4, "micro_batch_size": 2, "max_steps": 1, "beta": 0.3, "optimizer": OPTIMIZER}
    data = StageData(PAIRS, HELDOUT_PAIRS, [])
    return run_stage("dpo", values, partial(train, DPOTrainer, policy(), data))


def plain_log_probs(model: Any, pairs: list[Pair]) -> Tensor:
    """[2, pairs]: of the chosen and the rejected replies, each alone and without padding."""

    def log_prob(prompt: list[int], reply: list[int]) -> Tensor:
        log_probs = model(input_ids=torch.tensor([prompt + reply])).logits[0].log_softmax(-1)
        return sum(log_probs[len(prompt) - 1 + place, token] for place, token in enumerate(reply))

    return torch.stack(
        [torch.stack([log_prob(p.prompt_ids, ids) for ids in (p.chosen_ids, p.rejected_ids)]) for p in pairs]
    ).T


def test_a_step_of_dpo_begins_at_its_reference(dpo_ran):
    model = policy()
    now, then = plain_log_probs(model, PAIRS), plain_log_probs(model, PAIRS).detach()
    chosen, rejected = now - then
    loss = -F.logsigmoid(0.3 * (chosen - rejected)).mean()
    assert dpo_ran.step["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert dpo_ran.step["grad_norm"] == pytest.approx(gradient_norm(model, loss), rel=1e-3)
    assert [dpo_ran.step[key] for key in ("pairs", "accuracy", "margin", "drift")] == [3, 0.5, 0, 0]
    assert dpo_ran.step["chosen_log_prob"] == pytest.approx(then[0].mean().item(), rel=1e-5)
    assert dpo_ran.step["rejected_log_prob"] == pytest.approx(then[1].mean().item(), rel=1e-5)


def test_heldout_dpo_rewards_are_those_of_transformers(dpo_ran):
    from transformers import AutoModelForCausalLM

    before, after = dpo_ran.heldout
    assert before["step"] == 0 and after["step"] == 1
    assert before["heldout_loss"] == pytest.approx(math.log(2)) and before["heldout_accuracy"] == 0.5
    now = plain_log_probs(AutoModelForCausalLM.from_pretrained(dpo_ran.model), HELDOUT_PAIRS).detach()
    ratios = now - plain_log_probs(policy(), HELDOUT_PAIRS).detach()
    chosen, rejected = 0.3 * ratios
    wanted = {
        "loss": -(chosen - rejected).sigmoid().log().mean(),
        "accuracy": (chosen > rejected).float().mean(),
        "margin": (chosen - rejected).mean(),
        "drift": ratios.mean(),
        "chosen_reward": chosen.mean(),
        "rejected_reward": rejected.mean(),
        "chosen_log_prob": now[0].mean(),
        "rejected_log_prob": now[1].mean(),
    }
    assert abs(wanted["margin"].item()) > 0.01, "nothing changed, so the moment is not tested"
    for key, value in wanted.items():
        assert after[f"heldout_{key}"] == pytest.approx(value.item(), rel=1e-3), key
    assert dpo_ran.summary["after"] == {key: after[f"heldout_{key}"] for key in (*wanted, "truncated_share")}


class Echo:
    """Completes every prompt with itself: backwards in the first `backwards` batches, then as it is."""

    def __init__(self, backwards: int) -> None:
        self.backwards = backwards

    def __call__(self, model: Any, prompt_ids: Tensor, prompt_mask: Tensor, sampling: Any, *_: Any) -> Completions:
        ids, mask = prompt_ids.flip(1), prompt_mask.flip(1)  # padded right
        if self.backwards == 0:
            rows = [row[real.bool()] for row, real in zip(prompt_ids, prompt_mask)]
            ids = torch.stack([F.pad(row, (0, ids.shape[1] - len(row))) for row in rows])
        self.backwards = max(0, self.backwards - 1)
        return Completions(ids, mask)


@pytest.fixture(scope="module")
def ppo_ran(run_stage):
    """On the embedded data's terms: with a rule; and with a judge."""
    values = {"batch_size": 2, "steps": 1, "optimizer": OPTIMIZER, "critic_optimizer": OPTIMIZER, "ema": 0.5}
    values["judge"] = "given"
    heldout = [
        language.prompt(2, 1),
        language.prompt(3),
        language.prompt(1, 1, 2),
        language.prompt(2),
        language.prompt(3, 3),
    ]
    data = StageData([language.prompt(1), language.prompt(2)], heldout, [])

    def call(context):
        actor, reference = (llama(4, eos_token_id=EOS, num_hidden_layers=1) for _ in range(2))
        reward, judge = (language.TableOfRewards(seed=seed) for seed in (0, 1))
        models = ppo_models(actor, reference, scalar_llama(4, **SIZES), reward, judge)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Decoder, "generate", Echo(backwards=3))  # the held-out prompts, two at a time
            rule = lambda prompt, text: text.split() == prompt.split()[::-1]  # noqa: E731
            return fit(PPOTrainer(context, models, language.tokenizer(), data, rule), context)

    return run_stage("ppo", values, call)


def test_samples_belong_to_their_prompts(ppo_ran):
    prompts, backwards = ["b a", "c", "a a b"], ["a b", "c", "b a a"]
    assert ppo_ran.summary["samples"] == [
        {"prompt": text, "before": before, "after": text} for text, before in zip(prompts, backwards)
    ]
    recorded = [record["text"] for record in ppo_ran.texts if record["tag"] in ("heldout_0", "heldout_1", "heldout_2")]
    assert recorded == [
        f"{text}\n{answer}" for answers in (backwards, prompts) for text, answer in zip(prompts, answers)
    ]


def test_the_rule_sees_every_prompt_with_its_own_completion(ppo_ran):
    """It approves what says the prompt backwards."""
    assert ppo_ran.summary["before"]["approved_share"] == 1.0
    assert ppo_ran.summary["after"]["approved_share"] == pytest.approx(3 / 5)  # c, b and c c


def test_heldout_numbers_are_recorded_before_and_after(ppo_ran):
    before, after = ppo_ran.heldout
    assert before["step"] == 0 and after["step"] == 1
    assert before["heldout_kl"] == pytest.approx(0, abs=1e-6) and after["heldout_kl"] != 0
    for side, record in (("before", before), ("after", after)):
        assert {f"heldout_{key}": value for key, value in ppo_ran.summary[side].items()}.items() <= record.items()


JUDGE_SEED = 1


@pytest.fixture(scope="module")
def distill_ran(run_stage):
    """As `ppo_ran`, without echoes backwards; the student has as many layers as the teacher."""
    values = {"batch_size": 2, "max_steps": 1, "optimizer": OPTIMIZER, "teacher": "given", "judge": "given"}
    heldout = [language.prompt(2, 1), language.prompt(3), language.prompt(1, 1, 2)]
    data = StageData([language.prompt(1), language.prompt(2)], heldout, [])

    def call(context):
        student, teacher = (llama(4, eos_token_id=EOS, num_hidden_layers=1, seed=seed) for seed in (0, 1))
        judge = language.TableOfRewards(seed=JUDGE_SEED)
        models = GivenModels({"student": student, "teacher": teacher, "judge": judge}.__getitem__)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Decoder, "generate", Echo(backwards=0))
            rule = lambda prompt, text: text.split() == prompt.split()[::-1]  # noqa: E731
            return fit(DistillTrainer(context, models, language.tokenizer(), data, rule), context)

    return run_stage("distill", values, call)


def test_distillation_draws_with_the_student_reads_with_the_teacher_and_updates_once(distill_ran):
    """Prompts of one token, completed by themselves: generation reads the prompt only."""
    step, head = distill_ran.step, 2 * 4 * 32
    drawn, read = (2 * forward([length], head=head) for length in (1, 2))
    assert step["tflops"] * 1e12 * step["seconds"] == pytest.approx(drawn + read + 3 * read, rel=1e-6)
    assert [step[key] for key in ("tokens", "response_length", "truncated_share")] == [2, 1, 1]


def test_judge_and_rule_see_the_students_completions(distill_ran):
    """Echoes, of which only c is the same backwards."""
    judge = language.TableOfRewards(seed=JUDGE_SEED)
    scores = []
    for prompt in ([2, 1], [3], [1, 1, 2]):
        ids = [0] * (language.PROMPT_COLUMNS - len(prompt)) + prompt + prompt
        hidden = judge.backbone(torch.tensor([ids]), torch.ones(1, len(ids))).last_hidden_state
        scores.append(judge.score(hidden)[0, -1, 0].item())
    assert distill_ran.summary["after"]["judge_reward"] == pytest.approx(sum(scores) / 3, rel=1e-5)
    assert distill_ran.summary["after"]["approved_share"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("stage", STAGES)
def test_keys_that_only_some_runs_have_are_those_of_the_table(
    sft_ran, reward_ran, dpo_ran, ppo_ran, distill_ran, stage
):
    """An accelerator that counts compilations, a precision that scales losses, a judge, a rule; without the rest."""
    ran = {"sft": sft_ran, "reward": reward_ran, "dpo": dpo_ran, "ppo": ppo_ran, "distill": distill_ran}[stage]
    only = {key for name, key, definition in table(*RECORDS) if name == stage and definition.startswith("Only ")}
    elsewhere = {key for key in only if key.endswith(("reward_model", "/<name>"))}  # tests/rewards
    elsewhere |= {key for key in only if key.startswith(("handover_", "rollout_", "correction_"))}  # tests/rollouts
    # Its table of rewards is of no known shape, and its updates are large.
    elsewhere |= {"peak_share", "direction"} if stage == "ppo" else set()
    assert ran.keys >= only - elsewhere - {"lora_learning_rate", "kl_loss", "ptx_loss", "equal_group_share"}
    assert ran.keys <= {key for name, key, _ in table(*RECORDS) if name == stage}
    assert ran.step["compilations"] == 7 and ran.step["host_operators"] == 2 + 3


def test_a_fallback_is_recorded_by_accelerators_that_count_nothing(accelerator, monkeypatch, tmp_path):
    assert accelerator.compilations() is None
    monkeypatch.setattr(accelerator, "fallbacks", [])
    accelerator.report_fallback("generation", "its steps are not captured")
    accelerator.report_fallback("generation", "its steps are not captured")
    with Recorder(RunDirectory(tmp_path).stage("sft")) as recorder:
        context = stage_context(accelerator, tmp_path, "sft", {"sft": SFT}, recorder=recorder)
        summary = train(SFTTrainer, policy(), StageData(DEMONSTRATIONS, HELDOUT, []), context)
    assert Ran(tmp_path, "sft", summary).step["fallbacks"] == 1
