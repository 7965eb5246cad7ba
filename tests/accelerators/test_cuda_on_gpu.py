"""The CUDA backend on a GPU, where there is one: `CUDA_VISIBLE_DEVICES=0 pytest` shows it to the tests."""

from __future__ import annotations

import pytest
import torch

from accelerators import CaptureError
from accelerators.backends.cuda.backend import CUDA

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and CUDA_VISIBLE_DEVICES=0")


@pytest.fixture
def gpu():
    cuda = CUDA()
    cuda.bind(0)
    return cuda


@needs_gpu
def test_cuda_graph_changes_its_state_once_a_call(gpu):
    total = torch.zeros(2, device=gpu.device())
    step = gpu.capture(lambda x: total.add_(x) * 2, key="step")
    results = [step(torch.full((2,), float(n), device=gpu.device())).tolist() for n in range(1, 6)]
    assert results == [[2.0, 2.0], [6.0, 6.0], [12.0, 12.0], [20.0, 20.0], [30.0, 30.0]]
    assert gpu.compilations() == 1


@needs_gpu
def test_a_dropped_recording_returns_its_memory(gpu):
    x = torch.ones(1 << 24, device=gpu.device())
    step = gpu.capture(lambda x: x * 2 + 1, key="step")
    step(x), step(x)
    gpu.empty_cache()
    before = torch.cuda.memory_reserved()
    del step
    gpu.empty_cache()
    assert torch.cuda.memory_reserved() < before


@needs_gpu
def test_the_generators_state_of_a_gpu_survives_a_checkpoint(gpu, tmp_path):
    torch.save(gpu.rng_state(), tmp_path / "rng.pt")
    expected = torch.rand(3, device=gpu.device())
    gpu.set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert torch.equal(torch.rand(3, device=gpu.device()), expected)


@needs_gpu
def test_random_numbers_can_be_drawn_after_a_recording_that_the_driver_ended(gpu):
    def step(x):
        torch.cuda.synchronize()
        return x * 2

    x = torch.ones(2, device=gpu.device())
    captured = gpu.capture(step, key="step")
    captured(x)
    with pytest.raises(CaptureError, match="step cannot be recorded"):
        captured(x)
    assert torch.rand(3, device=gpu.device()).isfinite().all()


@needs_gpu
@pytest.mark.parametrize("tokens", [64, 128, 192])
def test_gradients_of_left_padded_rows_are_finite(gpu, tokens):
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device=gpu.device()).tril()
    mask = (mask & (torch.arange(tokens, device=gpu.device()) >= 5)).expand(2, 1, tokens, tokens)
    inputs = [torch.randn(2, 4, tokens, 64, device=gpu.device(), dtype=torch.bfloat16) for _ in range(3)]
    query, key, value = (tensor.requires_grad_() for tensor in inputs)
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    output[:, :, 5:].sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in inputs)
