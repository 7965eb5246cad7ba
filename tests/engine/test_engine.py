"""One model under DeepSpeed: the same step at every ZeRO stage, the same weights however rows are split."""

from __future__ import annotations

import pytest
import torch
from deepspeed import get_accelerator

from rlhf.engine.engine import freeze_model, recompute_in_parts
from rlhf.models.forward import completion_log_probs
from tests.engine.engines import COMPLETION, IDS, ROWS, build, loss, masters, train, weights_of
from tests.helpers import assert_close_weights, llama
from tests.in_process import make_placement


@pytest.fixture(scope="module")
def plain(accelerator):
    """The weights after four steps of torch's own AdamW and clipping."""
    model = llama(60)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2, betas=(0.9, 0.95)
    )
    norms = []
    for _ in range(4):
        optimizer.zero_grad()
        loss(model, IDS)[0].backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
    return {name: tensor.detach() for name, tensor in model.named_parameters()}, norms


@pytest.mark.parametrize(("zero_stage", "accumulation"), [(0, 1), (1, 1), (2, 1), (3, 1), (0, 2), (2, 2), (3, 2)])
def test_steps_are_those_of_plain_torch(accelerator, plain, zero_stage, accumulation):
    engine = build(accelerator, zero_stage, accumulation=accumulation)
    norms = []
    for _ in range(4):
        assert train(engine, 1, accumulation)[0]["rows"] == ROWS
        norms.append(engine.grad_norm())
    assert engine.steps == 4
    assert_close_weights(weights_of(engine), plain[0])
    assert norms == pytest.approx(plain[1], rel=1e-3)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_bf16_follows_the_path_of_float32(accelerator, zero_stage, accumulation):
    """DeepSpeed has other optimizers if micro-batches are added up."""
    engine = build(accelerator, zero_stage, "bf16", accumulation)
    losses = [numbers["loss"] for numbers in train(engine, 8, accumulation)]
    expected = [numbers["loss"] for numbers in train(build(accelerator, 0), 8)]
    assert losses == pytest.approx(expected, abs=0.03)
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_bf16_gradients_of_many_micro_batches_lose_no_digits(accelerator, zero_stage):
    """Rows that are all alike: the gradient of 64 micro-batches is the one of a single row, whatever it is."""
    rows = 64
    ids = IDS[:1].expand(rows, -1)

    def part_of_the_mean(model, ids):
        log_probs = completion_log_probs(model, ids, torch.ones_like(ids), COMPLETION).log_probs
        return -3 * log_probs.sum() / (rows * COMPLETION), {}  # by no power of two: parts are rounded

    def norm(micro):
        engine = build(accelerator, zero_stage, "bf16", rows // micro, rows=rows)
        engine.step(ids.split(micro), part_of_the_mean)
        return engine.grad_norm()

    assert norm(1) == pytest.approx(norm(rows), rel=1.5e-3 if zero_stage > 1 else 1e-2)


@pytest.mark.parametrize("names", [[], ["input_layernorm", "q_proj"]], ids=["plain", "named for float32"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_bf16_frozen_model_computes_what_the_trained_one_does(accelerator, monkeypatch, zero_stage, names):
    """Bit for bit, at positions where a rotary frequency of 8 bits would be off by a whole turn.

    Also if the architecture names modules that transformers would keep in float32: of those, DeepSpeed and
    `freeze_model` keep only the buffers.
    """
    from transformers import LlamaPreTrainedModel

    monkeypatch.setattr(LlamaPreTrainedModel, "_keep_in_fp32_modules_strict", names)
    ids = torch.randint(2, 60, (2, 600), generator=torch.Generator().manual_seed(1))

    def log_probs(model):
        with torch.no_grad():
            return completion_log_probs(model, ids, torch.ones_like(ids), 300).log_probs

    trained = build(accelerator, zero_stage, "bf16", model=llama(60, max_position_embeddings=1024))
    frozen = freeze_model(
        llama(60, max_position_embeddings=1024),
        accelerator=accelerator,
        precision=trained.precision,
        placement=make_placement(zero_stage),
    )
    trained.engine.eval()
    assert torch.equal(log_probs(trained.engine), log_probs(frozen))
    assert {p.dtype for p in frozen.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_step_boundary_follows_the_update(accelerator, monkeypatch, zero_stage):
    """Lazy devices run at `*/step` what was recorded before it: the optimizer's step must not wait for the next one."""
    engine = build(accelerator, zero_stage)
    weights = {}
    monkeypatch.setattr(accelerator, "step_boundary", lambda tag: weights.update({tag: masters(engine)}))
    engine.step([IDS], loss)
    for name, tensor in weights["test/step"].items():
        assert not torch.equal(tensor, weights["test/backward"][name])
        assert torch.equal(tensor, masters(engine)[name])


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_no_pass_waits_for_the_device(accelerator, monkeypatch, zero_stage):
    """A wait leaves a GPU idle in each step, and ends the recording of a generation."""
    engine = build(accelerator, zero_stage)
    train(engine, steps=3)
    waits = []
    monkeypatch.setattr(get_accelerator(), "synchronize", lambda *device: waits.append(device))
    train(engine, steps=1)
    with torch.no_grad(), engine.whole_weights() as module:
        module(input_ids=IDS)
    assert not waits


def test_whole_weights_are_sharded_again_after_the_block(accelerator):
    engine = build(accelerator, 3)
    with engine.whole_weights() as module:
        module(input_ids=IDS)
        assert module.model.embed_tokens.weight.shape == (60, 32), "a forward pass released the weights"
    assert module.model.embed_tokens.weight.numel() == 0
    train(engine, steps=1)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_frozen_model_scores_and_keeps_no_gradients(accelerator, zero_stage):
    precision, placement = accelerator.precision("fp32"), make_placement(zero_stage)
    frozen = freeze_model(llama(60), accelerator=accelerator, precision=precision, placement=placement)
    with torch.no_grad():
        torch.testing.assert_close(frozen(input_ids=IDS).logits, llama(60)(input_ids=IDS).logits)
    assert not any(p.requires_grad for p in frozen.parameters())


def test_layers_are_computed_again_after_a_boundary_if_operators_wait(accelerator, monkeypatch):
    tags, gradients = [], []
    assert recompute_in_parts(accelerator) == {}
    monkeypatch.setattr(accelerator, "step_boundary", tags.append)
    for lazy in (False, True):
        monkeypatch.setattr(accelerator, "is_lazy", lambda lazy=lazy: lazy)
        model = llama(60).train()
        options = {"use_reentrant": False, **recompute_in_parts(accelerator)}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        loss(model, IDS)[0].backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        assert tags == ["recompute"] * model.config.num_hidden_layers * lazy
    assert all(torch.equal(*pair) for pair in zip(*gradients))
