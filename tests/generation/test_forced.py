"""A decoder that is given the ids to draw has the log-probabilities that sampling them has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhf.config.schema import SamplingConfig
from rlhf.generation.decoder import Decoder
from tests.helpers import llama


@pytest.mark.parametrize("shapes", ["static", "dynamic"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7}, {"top_k": 5, "top_p": 0.9}])
def test_forced_ids_are_drawn_with_their_log_probabilities(
    accelerator: Any, shapes: str, sampling: dict[str, Any]
) -> None:
    from accelerators import ShapePolicy

    model = llama(32).eval()
    decoder = Decoder(accelerator, eos_ids=[2], pad_id=0, max_new_tokens=9, shapes=ShapePolicy(shapes))
    prompts = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10], [0, 11, 12, 13]])
    decoder.random.manual_seed(1)
    arguments = (model, prompts, (prompts > 0).long(), SamplingConfig(**sampling))
    drawn = decoder.generate(*arguments)
    following = decoder.random.get_state()
    decoder.random.manual_seed(1)
    decoder.forced = drawn.ids
    forced = decoder.generate(*arguments)
    assert torch.equal(forced.ids, drawn.ids) and torch.equal(forced.mask, drawn.mask)
    assert forced.log_probs is not None and drawn.log_probs is not None
    assert torch.allclose(forced.log_probs * drawn.mask, drawn.log_probs * drawn.mask, atol=1e-5)
    assert torch.equal(decoder.random.get_state(), following)  # the next call draws what it would have drawn
    decoder.forced = torch.full_like(drawn.ids, 3)
    assert bool((decoder.generate(*arguments).ids == 3).all())
