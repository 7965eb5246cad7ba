"""Masks of left-padded rows: no query sees nothing, on every attention, and no gradient is NaN because of one."""

from __future__ import annotations

import pytest
import torch

from accelerators import portable
from accelerators.testing.reference import llama

IDS = torch.arange(36).view(3, 12) * 7 % 63 + 1
REAL = (torch.arange(12) >= torch.tensor([[0], [5], [11]])).long()


def strict(module, query, key, value, mask, scaling=1.0, **features):
    """Attention in which a query that sees nothing is NaN, as in fused kernels of several devices."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill(mask < 0, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2), None


def gradients(attention):
    network = llama(attention)
    logits = network(input_ids=IDS * REAL, attention_mask=REAL, use_cache=False).logits
    logits[REAL.bool()].logsumexp(-1).sum().backward()
    return logits[REAL.bool()].detach(), {name: p.grad for name, p in network.named_parameters()}


def test_kernel_that_is_nan_for_empty_rows_trains_as_eager_does():
    expected, exact = gradients("eager")
    logits, found = gradients(portable.register_attention("strict", strict))
    torch.testing.assert_close(logits, expected)
    for name, gradient in exact.items():
        torch.testing.assert_close(found[name], gradient, msg=name)


@pytest.mark.parametrize("attention", ["sdpa", "strict"])
def test_no_row_of_a_mask_is_empty_and_only_the_first_column_is_opened(accelerator, attention):
    from transformers.masking_utils import create_causal_mask

    portable.sdpa(accelerator)
    portable.register_attention("strict", strict)
    config = llama(attention).config
    mask = create_causal_mask(config, torch.empty(3, 12, 0), REAL, None)[:, 0]
    seen = mask if mask.dtype == torch.bool else mask == 0
    expected = REAL.bool().unsqueeze(1) & torch.ones(12, 12).tril().bool()
    for row in range(3):
        for query in range(12):
            columns = seen[row, query].nonzero().flatten().tolist()
            assert columns == (expected[row, query].nonzero().flatten().tolist() or [0])


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
def test_masks_of_decoding_steps_are_left_as_they_are(dtype):
    mask = torch.zeros(2, 1, 1, 4, dtype=dtype)
    assert portable.open_empty_rows(mask) is mask
