"""Eager mode on Gaudi over an imitated bridge: what is compiled, how often, and that nothing falls back silently."""

from __future__ import annotations

import copy
import re

import pytest
import torch

from accelerators import CaptureError, ShapePolicy
from accelerators.backends.hpu import compilation
from accelerators.testing.layers import check_fused_layers
from rlhf.config.schema import SamplingConfig
from rlhf.generation.decoder import Decoder
from tests.accelerators import habana
from tests.helpers import llama


@pytest.fixture(autouse=True)
def limits():
    """torch's limits, restored after the test, which begins without the graphs of earlier ones."""
    names = ("recompile_limit", "accumulated_recompile_limit", "fail_on_recompile_limit_hit")
    with torch._dynamo.config.patch({name: getattr(torch._dynamo.config, name) for name in names}):
        torch._dynamo.reset()
        yield torch._dynamo.config
    torch._dynamo.reset()


@pytest.fixture
def two_shapes(limits, monkeypatch):
    """Lets two shapes of a function be compiled."""
    monkeypatch.setattr(compilation, "COMPILED_SHAPES", 2)
    limits.recompile_limit = 2


@pytest.fixture
def compiled_here():
    """A function that returns the number of graphs compiled since its last call."""
    seen = len(habana.COMPILED)

    def count() -> int:
        nonlocal seen
        new, seen = len(habana.COMPILED) - seen, len(habana.COMPILED)
        return new

    return count


def logits(model, rows, columns):
    ids = torch.arange(rows * columns).reshape(rows, columns) % 60
    mask = torch.ones_like(ids)
    mask[0, : columns // 2] = 0
    return model(ids, attention_mask=mask, use_cache=False).logits


# decoding


def test_eager_mode_compiles_a_step_for_fixed_shapes(machine):
    captured = machine().capture(lambda x: x * 2 + 1, key="step")
    before = len(habana.COMPILED)
    for _ in range(3):
        assert torch.equal(captured(torch.ones(3)), torch.full((3,), 3.0))
    captured(torch.ones(5))
    three, five = habana.COMPILED[before:]
    assert (three.shape, three.runs) == ((3,), 2)  # the first call runs as written, under the check
    assert (five.shape, five.runs) == ((5,), 1)


@pytest.mark.slow
def test_every_window_of_every_rollout_shape_is_compiled_once(machine, accelerator, monkeypatch):
    monkeypatch.setattr(accelerator, "capture", machine().capture)
    model, shapes = llama(60).eval(), ShapePolicy("static")
    decoder = Decoder(accelerator, eos_ids=[], pad_id=0, max_new_tokens=70, shapes=shapes)  # three windows

    def compiled(rows):
        before = len(habana.COMPILED)
        ids = torch.randint(2, 60, (rows, 8))
        decoder.generate(model, ids, torch.ones_like(ids), SamplingConfig(temperature=0))
        return len(habana.COMPILED) - before

    assert [compiled(rows) for rows in (4, 6, 3, 5, 4, 6)] == [3, 3, 3, 3, 0, 0]


def test_too_many_compiled_shapes_are_an_error_instead_of_slow_steps(machine, two_shapes):
    captured = machine().capture(lambda x: x * 3 - 1, key="step")
    for size in (1, 2, 3):  # the first call runs under the check
        captured(torch.ones(size))
    with pytest.raises(CaptureError, match="step: 2 shapes are compiled already"):
        captured(torch.ones(4))


def test_step_that_is_no_single_graph_is_an_error_instead_of_slow_steps(machine):
    def step(x):
        torch._dynamo.graph_break()
        return x + 1

    captured = machine().capture(step, key="step")
    captured(torch.ones(2))  # under the check
    with pytest.raises(CaptureError, match="step: "):
        captured(torch.ones(2))


# layers


def test_compiled_layers_pass_the_kit(machine):
    check_fused_layers(machine())


def test_layers_of_a_model_share_one_graph_for_each_shape_and_mode(machine, compiled_here):
    hpu = machine()
    model = llama(60, num_hidden_layers=5, attn_implementation=hpu.kernels.get("attention")).train()
    plain = copy.deepcopy(model)
    hpu.kernels.get("fused_layers")(model)
    graphs = []
    for columns in (8, 12, 8, 12):
        found, expected = logits(model, 2, columns), logits(plain, 2, columns)
        torch.testing.assert_close(found, expected)
        found.sum().backward(), expected.sum().backward()
        with torch.no_grad():  # as in scoring
            torch.testing.assert_close(logits(model, 2, columns), expected)
        graphs.append(compiled_here())
    assert graphs == [2, 2, 0, 0]
    for own, other in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(own.grad, other.grad)


def test_a_decoding_step_is_one_graph_with_its_layers(machine, accelerator, monkeypatch, compiled_here):
    hpu = machine()
    monkeypatch.setattr(accelerator, "capture", hpu.capture)
    model, plain = llama(60).eval(), llama(60).eval()
    hpu.kernels.get("fused_layers")(model)
    ids = torch.randint(2, 60, (3, 8))

    def complete(model):
        decoder = Decoder(accelerator, eos_ids=[], pad_id=0, max_new_tokens=20, shapes=ShapePolicy("static"))
        return decoder.generate(model, ids, torch.ones_like(ids), SamplingConfig(temperature=0)).ids

    found = complete(model)
    assert compiled_here() == 1
    monkeypatch.undo()  # `capture` too
    assert torch.equal(found, complete(plain))
    assert compiled_here() == 0


class Reading(torch.nn.Module):
    """A layer that cannot be one graph."""

    def forward(self, x):
        return x * 2 if x.sum().item() > 0 else x


@pytest.mark.parametrize("cause", ["shapes", "code", "hooks"])
def test_layers_that_run_uncompiled_are_reported_once_and_right(machine, request, caplog, cause):
    hpu = machine()
    layer = Reading() if cause == "code" else torch.nn.Linear(4, 4)
    if cause == "shapes":
        request.getfixturevalue("two_shapes")
    if cause == "hooks":
        layer.register_forward_pre_hook(lambda module, args: None)
    plain, model = copy.deepcopy(layer), torch.nn.Sequential(torch.nn.ModuleList([layer]))
    hpu.kernels.get("fused_layers")(model)
    for rows in (1, 2, 3, 4):
        x = torch.ones(rows, 4)
        assert torch.equal(layer(x), plain(x))
    assert hpu.fallbacks == [type(layer).__name__]
    (record,) = (record for record in caplog.records if record.name.startswith("accelerators"))
    reasons = {
        "shapes": r"2 shapes are compiled",
        "code": r"data-dependent expression|Tensor\.item\(\)",  # torch 2.13, 2.9
        "hooks": r"hooks fetch their weights at ZeRO 3",
    }
    assert record.levelname == "WARNING" and "layers run uncompiled" in record.message
    assert re.search(reasons[cause], record.message)


def test_lazy_mode_leaves_layers_to_the_graph_compiler(machine):
    hpu = machine(lazy=True)
    assert "graph compiler fuses" in hpu.kernels.capabilities()["fused_layers"].reason
    assert hpu.kernels.get("fused_layers") is None
