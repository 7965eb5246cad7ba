"""One model under DeepSpeed: the same step at every ZeRO stage, the same weights however rows are split."""

import pytest
import torch

from rlhf.config.schema import OptimizerConfig
from rlhf.engine.engine import TrainingEngine, freeze_model
from rlhf.models.forward import completion_log_probs
from tests.helpers import assert_close_weights, llama
from tests.in_process import make_placement

ROWS, PROMPT, COMPLETION = 4, 4, 8
IDS = torch.randint(2, 60, (ROWS, PROMPT + COMPLETION), generator=torch.Generator().manual_seed(0))


def build(accelerator, zero_stage, precision="fp32", accumulation=1, **engine):
    settings = {"learning_rate": 1e-2, "schedule": "constant", "warmup": 0, "weight_decay": 0.1}
    return TrainingEngine(
        "test",
        llama(60),
        accelerator=accelerator,
        precision=accelerator.precision(precision),
        placement=make_placement(zero_stage, **engine),
        optimizer=OptimizerConfig(**settings),
        total_steps=100,
        micro_batch_size=ROWS // accumulation,
        accumulation=accumulation,
    )


def loss(model, ids):
    log_probs = completion_log_probs(model, ids, torch.ones_like(ids), COMPLETION).log_probs
    return -log_probs.sum() / (ROWS * COMPLETION), {"rows": torch.tensor(float(len(ids)))}


def train(engine, steps=4, accumulation=1):
    return [engine.step(IDS.split(ROWS // accumulation), loss).read() for _ in range(steps)]


def weights_of(engine):
    with engine.whole_weights() as module:
        return {name: tensor.detach().float().clone() for name, tensor in module.state_dict().items()}


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
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}, norms


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_steps_are_those_of_plain_torch_at_every_zero_stage(accelerator, plain, zero_stage):
    engine = build(accelerator, zero_stage)
    norms = []
    for _ in range(4):
        train(engine, steps=1)
        norms.append(engine.grad_norm())
    found = weights_of(engine)
    assert_close_weights(found, plain[0])
    assert norms == pytest.approx(plain[1], rel=1e-3)


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_micro_batches_add_up_to_the_whole_batch(accelerator, zero_stage):
    whole, parts = build(accelerator, zero_stage), build(accelerator, zero_stage, accumulation=2)
    assert train(parts, accumulation=2)[-1]["rows"] == ROWS
    train(whole)
    assert whole.steps == parts.steps == 4
    assert_close_weights(weights_of(parts), weights_of(whole))


@pytest.mark.skipif("not __import__('accelerators.backends.cpu.info', fromlist=['']).native_bf16()")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_no_step_is_taken_with_gradients_that_are_not_finite(accelerator, bad):
    engine = build(accelerator, 0, "bf16")
    before = weights_of(engine)

    def broken(model, ids):
        value, found = loss(model, ids)
        first = next(model.parameters())
        return value + (first * torch.zeros_like(first).index_fill(0, torch.tensor([1]), bad)).sum(), found

    engine.step([IDS], broken)
    assert engine.grad_norm() == float("inf")
    train(engine, steps=1)
    after = weights_of(engine)
    assert all(tensor.isfinite().all() for tensor in after.values())
    assert not torch.equal(after["lm_head.weight"], before["lm_head.weight"])


@pytest.mark.skipif("not __import__('accelerators.backends.cpu.info', fromlist=['']).native_bf16()")
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_bf16_follows_the_path_of_float32_at_every_zero_stage(accelerator, zero_stage, accumulation):
    """DeepSpeed has other optimizers where micro-batches are added up."""
    engine = build(accelerator, zero_stage, "bf16", accumulation)
    found = [numbers["loss"] for numbers in train(engine, steps=8, accumulation=accumulation)]
    expected = [numbers["loss"] for numbers in train(build(accelerator, zero_stage), steps=8)]
    assert found == pytest.approx(expected, abs=0.03)
    assert found[-1] < found[0] - 0.5


@pytest.mark.skipif("not __import__('accelerators.backends.cpu.info', fromlist=['']).native_bf16()")
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_bf16_gradients_do_not_lose_digits_to_the_number_of_micro_batches(accelerator, zero_stage):
    """Rows that are all alike: the gradient of 64 micro-batches is the one of a single row, whatever it is."""
    rows = 64
    ids = IDS[:1].expand(rows, -1)

    def part_of_the_mean(model, ids):
        log_probs = completion_log_probs(model, ids, torch.ones_like(ids), COMPLETION).log_probs
        return -3 * log_probs.sum() / (rows * COMPLETION), {}  # by no power of two: parts are rounded

    def norm(micro):
        engine = TrainingEngine(
            "test",
            llama(60),
            accelerator=accelerator,
            precision=accelerator.precision("bf16"),
            placement=make_placement(zero_stage),
            optimizer=OptimizerConfig(),
            total_steps=1,
            micro_batch_size=micro,
            accumulation=rows // micro,
        )
        engine.step(ids.split(micro), part_of_the_mean)
        return engine.grad_norm()

    whole, parts = norm(rows), norm(1)
    assert parts == pytest.approx(whole, rel=1.5e-3 if zero_stage > 1 else 1e-2)


@pytest.mark.skipif("not __import__('accelerators.backends.cpu.info', fromlist=['']).native_bf16()")
@pytest.mark.parametrize("kept", [[], ["input_layernorm", "q_proj"]], ids=["plain", "named for float32"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_in_bf16_a_frozen_model_computes_what_the_trained_one_does_before_its_first_step(
    accelerator, monkeypatch, zero_stage, kept
):
    """Bit for bit, at positions where a rotary frequency of 8 bits would be off by a whole turn.

    Also if the architecture names modules that transformers would keep in float32: of those, DeepSpeed and
    `freeze_model` keep only the buffers.
    """
    from transformers import LlamaPreTrainedModel

    monkeypatch.setattr(LlamaPreTrainedModel, "_keep_in_fp32_modules_strict", kept)
    ids = torch.randint(2, 60, (2, 600), generator=torch.Generator().manual_seed(1))
    placement = make_placement(zero_stage)
    precision = accelerator.precision("bf16")

    def log_probs(model):
        with torch.no_grad():
            return completion_log_probs(model, ids, torch.ones_like(ids), 300).log_probs

    trained = TrainingEngine(
        "test",
        llama(60, max_position_embeddings=1024),
        accelerator=accelerator,
        precision=precision,
        placement=placement,
        optimizer=OptimizerConfig(),
        total_steps=1,
        micro_batch_size=2,
        accumulation=1,
    )
    frozen = freeze_model(
        llama(60, max_position_embeddings=1024), accelerator=accelerator, precision=precision, placement=placement
    )
    trained.engine.eval()
    assert torch.equal(log_probs(trained.engine), log_probs(frozen))
    assert {p.dtype for p in frozen.parameters()} == {torch.bfloat16}


def test_whole_weights_are_sharded_again_when_the_block_ends(accelerator):
    engine = build(accelerator, 3)
    with engine.whole_weights() as module:
        assert module.model.embed_tokens.weight.shape == (60, 32)
        module(input_ids=IDS)
        assert module.model.embed_tokens.weight.shape == (60, 32), "a forward pass released the weights"
    assert module.model.embed_tokens.weight.numel() == 0
    train(engine, steps=1)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_a_frozen_model_scores_and_keeps_no_gradients(accelerator, zero_stage):
    frozen = freeze_model(
        llama(60),
        accelerator=accelerator,
        precision=accelerator.precision("fp32"),
        placement=make_placement(zero_stage),
    )
    with torch.no_grad():
        expected = completion_log_probs(llama(60), IDS, torch.ones_like(IDS), COMPLETION).log_probs
        found = completion_log_probs(frozen, IDS, torch.ones_like(IDS), COMPLETION).log_probs
    torch.testing.assert_close(found, expected)
    assert not any(p.requires_grad for p in frozen.parameters())
