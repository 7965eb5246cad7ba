"""torch's attention in decoding: no key is repeated, and numbers are those of a plain softmax."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from accelerators import ShapePolicy, portable
from accelerators.testing.reference import llama
from rlhf.config.schema import SamplingConfig
from rlhf.generation.decoder import Decoder

HEADS, TOKENS = 4, 12


@pytest.fixture
def calls(monkeypatch):
    """Return the shapes (query, key) and the key's stride over heads of every call of torch's attention."""
    seen = []
    attend = functional.scaled_dot_product_attention

    def spy(query, key, value, **options):
        seen.append((tuple(query.shape), tuple(key.shape), key.stride(1), value.stride(1)))
        return attend(query, key, value, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    return seen


def plain(query, key, value, mask, bias, scaling):
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, 1).double(), value.repeat_interleave(shared, 1).double()
    scores = query.double() @ key.transpose(2, 3) * scaling + (0 if bias is None else bias)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return (scores.softmax(-1) @ value).transpose(1, 2).float()


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kind", ["none", "shared", "by head", "additive", "biased"])
def test_single_query_attends_as_a_plain_softmax_does_at_any_length(calls, groups, kind):
    module = llama("sdpa", num_key_value_heads=groups).model.layers[0].self_attn
    for columns in range(1, 133):
        torch.manual_seed(columns)
        query, key = torch.randn(3, HEADS, 1, 8), torch.randn(3, groups, columns, 8)
        value = torch.randn(3, groups, columns, 6)
        seen = torch.rand(3, HEADS if kind == "by head" else 1, 1, columns) < 0.7
        seen[..., -1] = True
        mask = {"none": None, "additive": torch.randn(3, 1, 1, columns)}.get(kind, seen)
        bias = torch.randn(1, HEADS, 1, columns) if kind == "biased" else None
        features = {"position_bias": bias} if kind == "biased" else {}
        output, weights = portable.attend_sdpa(module, query, key, value, mask, scaling=0.3, **features)
        assert weights is None
        torch.testing.assert_close(output, plain(query, key, value, mask, bias, 0.3))
    assert len(calls) == 132
    # The memory-efficient kernel of torch's wheels is wrong for one query of heads that all read one key.
    assert all(query[2] == HEADS // groups and key[1] == groups for query, key, _, _ in calls)
    assert all(0 not in strides for _, key, *strides in calls if key[1] > 1)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_no_key_of_a_pass_has_stride_0_at_lengths_of_1_mod_32(calls, groups):
    module = llama("sdpa", num_key_value_heads=groups).model.layers[0].self_attn
    for columns in (32, 33, 64, 65, 257):
        torch.manual_seed(columns)
        query, key, value = (torch.randn(2, heads, columns, 8) for heads in (HEADS, groups, groups))
        mask = torch.ones(columns, columns, dtype=torch.bool).tril().expand(2, 1, -1, -1)
        output = portable.attend_sdpa(module, query, key, value, mask, scaling=0.3)[0]
        torch.testing.assert_close(output, plain(query, key, value, mask, None, 0.3))
    assert all(0 not in strides for _, key, *strides in calls if key[2] % 32 == 1)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_decoding_repeats_no_key_and_draws_the_tokens_of_eager_attention(accelerator, calls, monkeypatch, groups):
    from transformers.integrations import sdpa_attention

    def refused(states, count):
        assert states.shape[2] == 5, "keys of the cache were repeated"  # those of the prompt are
        return states.repeat_interleave(count, 1)

    portable.sdpa(accelerator)
    monkeypatch.setattr(sdpa_attention, "repeat_kv", refused)
    ids = torch.tensor([[0, 0, 5, 6, 7], [9, 8, 7, 6, 5]])
    drawn = {}
    for attention in ("eager", "sdpa"):
        decode = Decoder(accelerator, eos_ids=(), pad_id=0, max_new_tokens=TOKENS, shapes=ShapePolicy("static"))
        model = llama(attention, num_key_value_heads=groups).eval()
        drawn[attention] = decode.generate(model, ids, (ids != 0).long(), SamplingConfig(temperature=0)).ids
    assert torch.equal(drawn["sdpa"], drawn["eager"])
    steps = [(query, key) for query, key, *_ in calls if key[2] != 5]
    assert len(steps) == 2 * (TOKENS - 1)
    assert all(query[1:3] == (groups, HEADS // groups) and key[1] == groups for query, key in steps)
