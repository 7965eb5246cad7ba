"""Name the plugin whose registered attention returns a result of another form."""

from __future__ import annotations

import pytest
import torch
from transformers import AttentionInterface

from accelerators import register_attention
from accelerators.errors import PluginError

OUTPUTS = torch.zeros(2, 5, 4, 8)


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (OUTPUTS, "a Tensor, expected (outputs, None)"),
        ((None, None), "a tuple, expected (outputs, None)"),
        ((OUTPUTS.transpose(1, 2), None), "outputs of shape (2, 4, 5, 8), expected (2, 5, 4, 8)"),
        ((OUTPUTS.flatten(2), None), "outputs of shape (2, 5, 32), expected (2, 5, 4, 8)"),
        ((OUTPUTS.float(), None), "outputs in torch.float32, expected torch.bfloat16"),
    ],
    ids=["no tuple", "no tensor", "heads before tokens", "heads joined", "another dtype"],
)
def test_attention_of_another_form_names_its_module(result, problem):
    """4 heads of queries over 2 of keys, 2 rows of 5 tokens, values of 8 numbers."""
    name = register_attention("of_another_form", lambda *arguments, **features: result)
    query, key, value = (torch.zeros(2, heads, 5, size).bfloat16() for heads, size in ((4, 16), (2, 16), (2, 8)))
    attend = AttentionInterface()[name]
    with pytest.raises(PluginError) as raised:
        attend(None, query, key, value, None, scaling=1.0)
    where = f"attention of_another_form of {__name__}"
    assert str(raised.value) == f"{where}: it returned {problem}; report it to the plugin's authors"


def test_attention_under_autocast_may_return_another_dtype():
    name = register_attention("for_autocast", lambda *arguments, **features: (OUTPUTS, None))
    query = torch.zeros(2, 4, 5, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert AttentionInterface()[name](None, query, query, query, None)[0] is OUTPUTS
