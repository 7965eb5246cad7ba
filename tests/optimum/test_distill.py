"""The student ends where theory says: at its teacher, or, if it cannot, at the known mean of what the teacher writes.

A student that sees only the last word has one distribution for all beginnings with that word. The expected gradient is
0 where that distribution is a mean of the teacher's in these beginnings, each weighted by how often the student meets
it: for KL(teacher || student) the arithmetic mean, for KL(student || teacher) the geometric one. Both follow from the
derivative of sum_s d(s) KL, d being given (arXiv:2306.13649, section 3: it is not differentiated).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from accelerators import Accelerator
from rlhf.data.stage_dataset import StageData
from rlhf.trainers import distill
from rlhf.trainers.distill import DistillTrainer
from rlhf.trainers.loop import fit, take_step
from tests.helpers import llama
from tests.in_process import GivenModels, stage_context
from tests.optimum.language import (
    BEGINNINGS,
    LENGTH,
    PROMPT,
    PROMPT_COLUMNS,
    SIZES,
    WORDS,
    log_probabilities,
    table,
    tokenizer,
)

LAST = torch.tensor([words[-1] if words else PROMPT.prompt_ids[-1] for words in BEGINNINGS])
"""[beginnings]: the word before the one that is chosen."""
DIVERGENCES = pytest.mark.parametrize("divergence", ["reverse", "forward"])


class PlainTeacher:
    """Scores completions as servers would."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @torch.no_grad()
    def score(self, rollout: Any) -> Tensor:
        ids, mask, length = rollout.input_ids, rollout.attention_mask, rollout.completion_length
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        logits = self.model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
        scores = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return scores[:, -length:]


def distilled(accelerator: Accelerator, folder: Path, student: Any, known: Any, **changes: Any) -> list[float]:
    """Train the student; the losses of its steps."""
    settings = {
        "teacher": "given",
        "batch_size": 256,
        "epochs": 120,
        "eval_rows": 1,
        "checkpoint_every": 0,
        "optimizer": {"learning_rate": 1e-2, "warmup": 0.02, "min_lr_ratio": 0.0},
        **changes,
    }
    data = {"max_prompt_length": PROMPT_COLUMNS, "max_completion_length": LENGTH}
    context = stage_context(accelerator, folder, "distill", {"data": data, "distill": settings})
    prompts = [PROMPT] * context.config.distill.batch_size
    models = GivenModels({"student": student, "teacher": known}.__getitem__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distill, "TeacherServers", lambda *_: PlainTeacher(known))
        trainer = DistillTrainer(context, models, tokenizer(), StageData(prompts, prompts[:1], []))
    losses, step = [], trainer.step

    def watched(index: int) -> dict[str, float]:
        metrics = step(index)
        losses.append(metrics["loss"])
        return metrics

    trainer.step = watched  # type: ignore[method-assign]
    fit(trainer, context)
    return losses


def teacher_of(seed: int) -> Any:
    """A teacher whose distributions depend on all words."""
    return llama(len(WORDS), seed=seed, **SIZES | {"initializer_range": 0.25})


def divergences(policy: Tensor, other: Tensor) -> Tensor:
    """KL(policy || other), of each row of two tables or of all completions."""
    return (policy.exp() * (policy - other)).sum(-1)


@pytest.mark.parametrize("learns", ["reverse", "forward", "from servers", "by three updates"])
def test_student_that_can_becomes_its_teacher(accelerator: Accelerator, tmp_path: Path, learns: str) -> None:
    """Over all completions, in both directions, whichever is trained."""
    student, teacher = llama(len(WORDS), seed=3, **SIZES), teacher_of(4)
    known, before = log_probabilities(teacher), log_probabilities(student)
    assert min(divergences(before, known), divergences(known, before)) > 0.3, "there is nothing to learn"
    changes = {
        "reverse": {},
        "forward": {"divergence": "forward"},
        "from servers": {"teacher": None, "teacher_servers": "http://a:1"},
        "by three updates": {"updates": 3, "epochs": 40},
    }[learns]
    losses = distilled(accelerator, tmp_path, student, teacher, **changes)
    after = log_probabilities(student)
    assert max(divergences(after, known), divergences(known, after)) < 5e-3
    assert losses[-1] < 2e-3 < 0.2 < losses[0]


def forgetful(seed: int) -> Any:
    """A student without attention: what it writes next depends on the last word alone."""
    model = llama(len(WORDS), seed=seed, **SIZES | {"num_hidden_layers": 1})
    with torch.no_grad():  # neither gets a gradient while both are 0
        for layer in (model.model.layers[0].self_attn.v_proj, model.model.layers[0].self_attn.o_proj):
            layer.weight.zero_()
    return model


def visits(policy: Tensor) -> Tensor:
    """[beginnings]: how often a policy, a table, meets each in a completion."""
    log_probs = [
        sum(policy[BEGINNINGS.index(words[:place]), word] for place, word in enumerate(words)) for words in BEGINNINGS
    ]
    return torch.tensor(log_probs).double().exp()


def best_forgetful(teacher: Tensor, divergence: str) -> Tensor:
    """The table at which the expected update of a forgetful student is 0: found by repeated weighting."""
    policy = torch.full_like(teacher, 1 / len(WORDS)).log()
    for _ in range(500):
        weights, means = visits(policy), torch.empty_like(teacher)
        for word in LAST.unique():
            here = word == LAST
            share = (weights[here] / weights[here].sum())[:, None]
            mean = share * teacher[here] if divergence == "reverse" else share * teacher[here].exp()
            summed = mean.sum(0) if divergence == "reverse" else mean.sum(0).log()
            means[here] = summed.log_softmax(-1)
        if (means - policy).abs().max() < 1e-12:
            return policy
        policy = means
    raise AssertionError("the weighting does not settle")


@DIVERGENCES
def test_student_that_cannot_ends_at_the_known_mean(accelerator: Accelerator, tmp_path: Path, divergence: str) -> None:
    student, teacher = forgetful(3), teacher_of(4)
    wanted = {kind: best_forgetful(table(teacher), kind) for kind in ("reverse", "forward")}
    assert divergences(wanted["reverse"], wanted["forward"]).max() > 0.05, "the two ends cannot be told apart"
    distilled(accelerator, tmp_path, student, teacher, divergence=divergence)
    assert student.model.layers[0].self_attn.o_proj.weight.eq(0).all()
    ended = table(student)
    assert divergences(ended, wanted[divergence]).max() < 5e-3, (ended.exp(), wanted[divergence].exp())
    other = wanted["forward" if divergence == "reverse" else "reverse"]
    assert divergences(ended, other).max() > 0.03


def test_learning_rate_follows_the_steps_also_after_one_that_was_left_out(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    """Of three updates a step, the first of step 2 fails, so its others are not made. It alone counts for nothing.

    The rate falls in equal parts from 1, in the first of twelve updates, to 0 in the last.
    """
    optimizer = {"learning_rate": 1.0, "schedule": "linear", "warmup": 0, "min_lr_ratio": 0.0}
    settings = {"batch_size": 2, "eval_rows": 1, "max_steps": 4, "epochs": 4, "updates": 3, "optimizer": optimizer}
    data = {"max_prompt_length": PROMPT_COLUMNS, "max_completion_length": LENGTH}
    values = {"data": data, "distill": {"teacher": "given", **settings}, "alarms": {"skip_not_finite": 1}}
    context = stage_context(accelerator, tmp_path, "distill", values)
    student, teacher = llama(len(WORDS), seed=3, **SIZES), teacher_of(4)
    models = GivenModels({"student": student, "teacher": teacher}.__getitem__)
    trainer = DistillTrainer(context, models, tokenizer(), StageData([PROMPT] * 2, [PROMPT], []))
    real, rates = trainer._divergences, []
    for index in range(4):
        factor = float("nan") if index == 1 else 1.0
        trainer._divergences = lambda *part, factor=factor: real(*part) * factor  # type: ignore[method-assign,misc]
        rates.append(take_step(trainer, context, index).get("learning_rate"))
    assert rates == [pytest.approx(1 - done / 11) if done is not None else None for done in (0, None, 5, 8)]
