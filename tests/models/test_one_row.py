"""A pass over the distinct tokens of a batch: each row's numbers and gradients are those of the row alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import accelerators
from accelerators import AcceleratorError, RealTokens
from rlhf.config.schema import RewardConfig
from rlhf.models import forward
from rlhf.models.compatibility import explain_missing_attention
from rlhf.models.dropout import set_dropout
from rlhf.models.forward import ScalarHead, completion_log_probs, in_one_row, model_inputs
from rlhf.trainers.supervised import pair_loss
from tests.families.table import FAMILIES, build
from tests.helpers import llama

PADDED = (7, 0), (0, 6), (3, 4), (0, 0)
"""Padding of each row before and after its tokens."""

SHARED = (2, 0), (2, 0), (2, 3), (1, 0)
"""The same, if rows share tokens; distinct are 14, 8, 3 and 15."""

COMPLETION = 8


@pytest.fixture(autouse=True, scope="module")
def attention() -> str:
    name: str = accelerators.select("cpu", environ={}).create().kernels.get("attention")
    assert accelerators.takes_real_tokens(name)
    return name


def batch(padding: Any = PADDED) -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, 60, (4, 16), generator=torch.Generator().manual_seed(1))
    if padding is SHARED:
        ids[1:3, :8] = ids[0, :8]
        ids[2, 8:10] = ids[1, 8:10]
        ids[3, 2:8] = ids[0, 2:8]  # after one token more
    mask = torch.ones_like(ids)
    for row, (left, right) in enumerate(padding):
        mask[row, :left] = mask[row, 16 - right :] = 0
    return ids * mask, mask


def of_architecture(name: str, attention: str) -> Any:
    """A tiny model of it, without attention windows."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    family = next(family for family in FAMILIES if family.architecture == name)
    windows = {"sliding_window": None} if "sliding_window" in family.values else {}
    model = build(family.configuration(**windows), MODEL_FOR_CAUSAL_LM_MAPPING).eval()
    if reason := explain_missing_attention(type(model), attention):
        assert "eager before transformers" in family.notes
        pytest.skip(f"{name} in this release of transformers: {reason}")
    model.set_attn_implementation(attention)
    return model


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def rows_seen(model: Any) -> list[int]:
    """The numbers of tokens that the embedding gets from now on."""
    seen: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda module, given, output: seen.append(given[0].numel()))
    return seen


@pytest.mark.parametrize("padding", [PADDED, SHARED], ids=["padded", "shared"])
@pytest.mark.parametrize("name", sorted(forward.TOKENWISE))
def test_log_probs_and_gradients_are_those_of_rows_alone(name: str, padding: Any, attention: str) -> None:
    model, (ids, mask) = of_architecture(name, attention), batch(padding)
    targets = mask[:, -COMPLETION:].bool() & mask[:, -COMPLETION - 1 : -1].bool()
    seen = rows_seen(model)
    result = completion_log_probs(model, ids, mask, COMPLETION, temperature=0.7, entropy=True)
    assert seen == [48]  # 44 distinct ones, or 40, and others
    assert result.entropy is not None
    assert not result.log_probs[~targets].any() and not result.entropy[~targets].any()

    model.set_attn_implementation("eager")
    total = torch.zeros(())
    for row, (left, right) in enumerate(padding):
        alone = ids[row : row + 1, left : 16 - right]
        log_probs = (model(input_ids=alone, use_cache=False).logits[0, :-1] / 0.7).log_softmax(-1)
        count = COMPLETION - right
        chosen = log_probs.gather(-1, alone[0, 1:, None])[-count:, 0]
        entropies = -(log_probs.exp() * log_probs).sum(-1)[-count:]
        torch.testing.assert_close(result.log_probs[row][targets[row]], chosen, atol=2e-5, rtol=0)
        torch.testing.assert_close(result.entropy[row][targets[row]], entropies, atol=2e-5, rtol=0)
        total = total + chosen.sum() + 0.3 * entropies.sum()
    expected = gradients(model, total)
    model.set_attn_implementation(attention)
    actual = gradients(model, result.log_probs.sum() + 0.3 * result.entropy.sum())
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("padding", [PADDED, SHARED], ids=["padded", "shared"])
def test_gradients_are_the_same_with_checkpoints(padding: Any, attention: str) -> None:
    """They call each layer again with all its arguments."""
    model, (ids, mask) = of_architecture("llama", attention), batch(padding)
    expected = gradients(model, completion_log_probs(model, ids, mask, COMPLETION).log_probs.sum())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    actual = gradients(model, completion_log_probs(model, ids, mask, COMPLETION).log_probs.sum())
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("padding", [PADDED, SHARED], ids=["padded", "shared"])
def test_scores_and_gradients_are_those_of_rows_alone(padding: Any, attention: str) -> None:
    from transformers import LlamaForSequenceClassification

    config = llama(60).config
    config.num_labels = 1
    config._attn_implementation = attention
    torch.manual_seed(0)
    head, (ids, mask) = ScalarHead(LlamaForSequenceClassification(config)).eval(), batch(padding)
    seen = rows_seen(head.model)
    scores = head(ids, mask)
    assert seen == [48] and scores.shape == ids.shape
    total = torch.zeros(())
    for row, (left, right) in enumerate(padding):
        alone = ids[row : row + 1, left : 16 - right]
        one = head(alone, torch.ones_like(alone))[0]
        torch.testing.assert_close(scores[row, left : 16 - right], one, atol=1e-5, rtol=0)
        total = total + one[-1] ** 2
    last = torch.tensor([15 - right for _, right in padding])
    actual = gradients(head, (scores[torch.arange(4), last] ** 2).sum())
    torch.testing.assert_close(actual, gradients(head, total), atol=1e-5, rtol=1e-4)


def test_some_passes_keep_padding(attention: str) -> None:
    """Windows, other attention, architectures with other layers, and rows with little padding."""
    _, mask = batch()

    def is_padded(model: Any, mask: Tensor = mask) -> bool:
        ids = torch.arange(mask.numel()).view_as(mask) % 60  # rows share no token
        return in_one_row(model, model_inputs(model, ids, mask), mask)[1] is None

    model = of_architecture("llama", attention)
    assert not is_padded(model)
    little = torch.ones(4, 64, dtype=torch.long)
    little[0, :16] = 0
    assert not is_padded(model, little)
    little[0, 15] = 1
    assert is_padded(model, little) and is_padded(model, torch.ones_like(mask)) and is_padded(model, 0 * mask)
    model.set_attn_implementation("eager")
    assert is_padded(model)
    window = next(family for family in FAMILIES if family.name == "Mistral").configuration()
    window._attn_implementation = attention
    from transformers import AutoModelForCausalLM

    assert is_padded(AutoModelForCausalLM.from_config(window))
    assert is_padded(of_architecture("stablelm", attention))  # its attention is called without further arguments


@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if f.architecture not in forward.TOKENWISE], ids=lambda f: f.name
)
def test_other_architectures_would_gain_nothing_from_the_list(
    family: Any, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They keep padding, for their own attention or other layers, or attention does not get the real tokens."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    model, (ids, mask) = build(family.configuration(), MODEL_FOR_CAUSAL_LM_MAPPING).eval(), batch()
    monkeypatch.setattr(forward, "TOKENWISE", frozenset([model.config.model_type]))
    if explain_missing_attention(type(model), attention):
        assert in_one_row(model, model_inputs(model, ids, mask), mask)[1] is None
        return
    model.set_attn_implementation(attention)
    inputs, tokens = in_one_row(model, model_inputs(model, ids, mask), mask)
    if tokens is None:
        assert inputs["attention_mask"].dim() == 2  # layers with windows or states build their masks
        return
    with pytest.raises((RuntimeError, AcceleratorError)):
        model(**inputs)


def test_rows_come_from_real_tokens_and_return_to_them() -> None:
    mask = torch.tensor([[0, 1, 1], [1, 0, 0]])
    tokens = RealTokens(mask)
    numbers = torch.tensor([[[1.0], [2.0], [3.0]], [[4.0], [5.0], [6.0]]], requires_grad=True)
    row = tokens.select(numbers)
    assert row.tolist() == [[[2.0], [3.0], [4.0]]]
    assert tokens.spread(row).tolist() == [[[0.0], [2.0], [3.0]], [[4.0], [0.0], [0.0]]]
    for mapped in (row, tokens.spread(row)[mask.bool()].unsqueeze(0)):
        scaled = (mapped * torch.tensor([[[1.0], [10.0], [100.0]]])).sum()
        (gradient,) = torch.autograd.grad(scaled, numbers, retain_graph=True)
        assert gradient.flatten().tolist() == [0.0, 1.0, 10.0, 100.0, 0.0, 0.0]


def test_repeated_tokens_come_from_the_row_that_has_them_first() -> None:
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 8], [5, 6, 9, 8], [0, 5, 6, 9], [4, 6, 7, 8]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0], [0, 1, 1, 1], [1, 1, 1, 1]])
    rows = forward.first_rows(ids, mask)
    assert rows.tolist() == [[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 1, 2], [3, 3, 3, 3], [4, 4, 4, 4]]
    needed = mask.bool() & (rows == torch.arange(5).unsqueeze(1))
    tokens = RealTokens(needed, rows)
    numbers = (10.0 * ids).unsqueeze(-1).requires_grad_()
    row = tokens.select(numbers)
    assert row.flatten().tolist() == [50, 60, 70, 80, 90, 80, 50, 60, 90, 40, 60, 70, 80]
    spread = tokens.spread(row).squeeze(-1)
    assert torch.equal(spread, 10.0 * ids * mask)
    weights = torch.arange(20.0).view(5, 4)
    (gradient,) = torch.autograd.grad((spread * weights).sum(), numbers)
    assert gradient.squeeze(-1).tolist() == [
        [0 + 4 + 8, 1 + 5 + 9, 2, 3],
        [0, 0, 6 + 10, 7],
        [0, 0, 0, 0],
        [0, 13, 14, 15],
        [16, 17, 18, 19],
    ]


def test_gradients_of_repeated_tokens_are_added_up_in_float32() -> None:
    """By torch, on a CPU; in bfloat16, 1 + 1/512 is 1."""
    rows = torch.zeros(9, 1, dtype=torch.long)
    tokens = RealTokens(torch.eye(9, 1), rows)
    token = torch.zeros(1, 1, 2, dtype=torch.bfloat16, requires_grad=True)
    parts = torch.tensor([1.0] + 8 * [2**-9], dtype=torch.bfloat16).view(9, 1, 1)
    (gradient,) = torch.autograd.grad((tokens.spread(token) * parts).sum(), token)
    assert gradient.tolist() == [[[1 + 2**-6, 1 + 2**-6]]]


def test_tokens_that_are_drawn_differently_are_not_shared(attention: str) -> None:
    """With dropout, each row has its own activations in training."""
    model, (ids, mask) = of_architecture("gpt2", attention), batch(SHARED)

    def count() -> int:
        tokens = in_one_row(model, model_inputs(model, ids, mask), mask)[1]
        return mask.numel() if tokens is None else len(tokens.places)

    assert model.config.resid_pdrop > 0
    assert count() == 48
    model.train()
    assert count() == 64
    set_dropout(model, 0)
    assert count() == 48


def test_models_that_see_later_tokens_share_none(attention: str) -> None:
    model, (ids, mask) = of_architecture("llama", attention), batch(SHARED)
    assert in_one_row(model, model_inputs(model, ids, mask), mask)[1] is not None
    model.config.is_causal = False
    assert in_one_row(model, model_inputs(model, ids, mask), mask)[1] is None


def test_batches_have_few_numbers_of_tokens() -> None:
    """Numbers of 16 tokens or a thirty-second part apart, and those of full batches."""
    counts = [forward.round_count(real) for real in range(1, 8193)]
    assert all(0 <= count - real < max(16, real / 32) for real, count in enumerate(counts, 1))
    assert len(set(counts)) == 64 + 3 * 32  # to 1,024 in steps of 16; 32 more for each doubling
    assert all(forward.round_count(rows * length) == rows * length for rows in range(1, 33) for length in (256, 512))


@pytest.mark.parametrize(("loss", "computed"), [("last", 48), ("token", 64)])
def test_pair_loss_computes_the_tokens_that_it_reads(attention: str, loss: Any, computed: int) -> None:
    """The loss of all tokens reads padding of the shorter reply too."""
    from transformers import LlamaForSequenceClassification

    lengths = torch.tensor([16, 5, 7, 9])[[0, 2, 1, 3]]  # chosen, chosen, rejected, rejected
    mask = (torch.arange(16) < lengths[:, None]).long()
    ids = torch.randint(3, 60, (4, 16), generator=torch.Generator().manual_seed(1)) * mask
    batch = {"input_ids": ids, "attention_mask": mask, "margins": torch.zeros(2), "pair_mask": torch.ones(2)}
    config = llama(60).config
    config.num_labels = 1
    torch.manual_seed(0)
    head = ScalarHead(LlamaForSequenceClassification(config)).eval()
    expected = pair_loss(head, batch, RewardConfig(loss=loss))
    correct = gradients(head, expected.loss)
    head.model.set_attn_implementation(attention)
    seen = rows_seen(head.model)
    result = pair_loss(head, batch, RewardConfig(loss=loss))
    assert seen == [computed]
    torch.testing.assert_close(result.losses, expected.losses)
    torch.testing.assert_close(gradients(head, result.loss), correct, atol=1e-6, rtol=1e-4)
