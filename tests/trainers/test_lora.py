"""LoRA: only adapters and heads learn, the actor without adapters is the reference, and saved models are plain."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from rlhf.checkpoint import training_state
from rlhf.config.schema import LoraConfig, ModelConfig, OptimizerConfig
from rlhf.engine.engine import TrainingEngine
from rlhf.generation.hybrid_engine import generation_mode
from rlhf.models.forward import completion_log_probs
from rlhf.models.loading import load_causal_lm, load_scalar_head
from rlhf.models.lora import add_adapters
from rlhf.runs.directory import RunDirectory
from tests import in_process
from tests.helpers import assert_close_weights, assert_same_weights, kill_at, llama, sets, weights
from tests.in_process import make_placement, ppo_models
from tests.trainers.test_shapes import comparisons_by_step, steps_of_different_lengths

LORA = ("--set", "lora.rank=4")
STAGES = ("sft", "reward", "ppo")
IDS = torch.randint(2, 60, (4, 12), generator=torch.Generator().manual_seed(0))
PRECISIONS = ["fp32", "bf16"]


def adapted():
    model = llama(60)
    add_adapters(model, LoraConfig(rank=4), seed=0)
    return model


def build(accelerator, zero_stage, precision="fp32"):
    """An engine that trains the adapters of a tiny model."""
    return TrainingEngine(
        "test",
        adapted(),
        accelerator=accelerator,
        precision=accelerator.precision(precision),
        placement=make_placement(zero_stage),
        optimizer=OptimizerConfig(learning_rate=1e-3, schedule="constant", warmup=0, weight_decay=0.1),
        total_steps=100,
        micro_batch_size=4,
        accumulation=1,
    )


def loss(model, ids):
    return -completion_log_probs(model, ids, torch.ones_like(ids), 8).log_probs.mean(), {}


def train(engine, steps):
    for _ in range(steps):
        engine.step([IDS], loss)


def state(engine):
    with engine.whole_weights() as module:
        return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def changed(before, after):
    return {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}


@pytest.fixture(scope="module")
def plain():
    """The weights after four steps of torch's own AdamW on the adapters, at ten times the stage's rate."""
    model = adapted()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        loss(model, IDS)[0].backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_steps_are_those_of_plain_torch_at_every_zero_stage(accelerator, plain, zero_stage):
    engine = build(accelerator, zero_stage)
    train(engine, 4)
    assert_close_weights(state(engine), plain)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_generation_and_training_change_no_frozen_bit(accelerator, zero_stage, precision):
    engine = build(accelerator, zero_stage, precision)
    at_first = state(engine)
    train(engine, 2)
    before = state(engine)
    assert {".lora_" in name for name in changed(at_first, before)} == {True}
    with generation_mode(engine) as model:
        merged = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert model(input_ids=IDS).logits.isfinite().all()
    assert {name.endswith("_proj.base_layer.weight") for name in changed(before, merged)} == {True}
    assert changed(before, state(engine)) == set()
    train(engine, 1)
    assert {".lora_" in name for name in changed(before, state(engine))} == {True}


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_checkpoint_of_adapters_resumes_to_the_same_weights(accelerator, zero_stage, tmp_path):
    place = RunDirectory(tmp_path).stage("sft")
    engine = build(accelerator, zero_stage)
    train(engine, 2)
    training_state.save_checkpoint(place, 2, {"model": engine}, {})
    train(engine, 2)
    resumed = build(accelerator, zero_stage)
    assert training_state.restore_checkpoint(place, {"model": resumed})[:2] == (2, {})
    train(resumed, 2)
    assert changed(state(engine), state(resumed)) == set()


@pytest.fixture(scope="session")
def lora_run(rlhf, tmp_path_factory) -> Path:
    """The directory of a complete run of the tiny recipe with LoRA."""
    output = tmp_path_factory.mktemp("lora") / "run"
    rlhf("--output", output, *LORA, "--set", "ppo.checkpoint_every=2")
    return output


def original(folder, tokenizer):
    return load_causal_lm(ModelConfig(path=str(folder)), tokenizer, attention="sdpa")


@pytest.fixture
def build_ppo(accelerator, recipe, tokenizer, lora_run, tmp_path):
    def build(zero_stage, ppo_epochs=1):
        path = str(lora_run / "reward" / "model")
        critic, reward = (load_scalar_head(ModelConfig(), tokenizer, attention="sdpa", path=path) for _ in range(2))
        models = ppo_models(original(lora_run / "sft" / "model", tokenizer), None, critic, reward)
        changes = {"engine": {"zero_stage": zero_stage}, "lora": {"rank": 4}, "batch_size": 6}
        changes["ppo_epochs"] = ppo_epochs
        return in_process.build_ppo(accelerator, tmp_path, recipe, tokenizer, models, **changes)

    return build


def rollout(ppo):
    (prompts,) = ppo.batches.step(0)
    sequences = ppo.generate(prompts)
    return sequences, ppo.score(sequences)


@pytest.mark.parametrize("zero_stage", [0, 1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_reference_is_the_policy_that_training_began_with(build_ppo, lora_run, tokenizer, zero_stage):
    ppo = build_ppo(zero_stage)
    _, scores = rollout(ppo)
    assert torch.equal(scores.log_probs, scores.ref_log_probs)
    for index in range(2):
        ppo.step(index)
    sequences, scores = rollout(ppo)
    model = original(lora_run / "sft" / "model", tokenizer)
    with torch.no_grad():
        ids, mask, length = sequences.input_ids, sequences.attention_mask, sequences.completion_length
        expected = completion_log_probs(model, ids, mask, length).log_probs
    torch.testing.assert_close(scores.ref_log_probs, expected)
    assert (scores.log_probs - expected).abs().max() > 1e-3


def test_ppo_trains_adapters_and_the_critics_head(build_ppo):
    ppo = build_ppo(1)
    before = [state(engine) for engine in (ppo.actor, ppo.critic)]
    for index in range(2):
        ppo.step(index)
    actor, critic = (changed(old, state(engine)) for old, engine in zip(before, (ppo.actor, ppo.critic)))
    assert len(actor) == 2 * 2 * 7 and all(".lora_" in name for name in actor)
    assert {name for name in critic if ".lora_" not in name} == {"model.score.weight"}
    assert len(critic) == len(actor) + 1


@pytest.mark.parametrize("zero_stage", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_static_shapes_add_no_operator_after_the_first_step(build_ppo, zero_stage):
    first, *later = steps_of_different_lengths(build_ppo(zero_stage))
    for seen in later:
        assert sorted(map(str, seen - first)) == []


@pytest.mark.slow
def test_zero_3_settles_the_order_of_weights_in_two_steps(build_ppo, monkeypatch):
    first, _, *later = comparisons_by_step(build_ppo(3, ppo_epochs=2), 4, monkeypatch)
    assert first > 0 and later == [0, 0]


@pytest.mark.parametrize("stage", STAGES)
def test_plain_models_differ_in_adapted_layers_alone(lora_run, model_folder, stage):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    auto_class = AutoModelForSequenceClassification if stage == "reward" else AutoModelForCausalLM
    start = model_folder if stage == "sft" else lora_run / "sft" / "model"
    model, loading = auto_class.from_pretrained(lora_run / stage / "model", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and model.config.use_cache
    before, after = weights(start), weights(lora_run / stage / "model")
    different = {name for name in before if not torch.equal(before[name], after[name])}
    assert len(different) == 2 * 7 and all(name.endswith("_proj.weight") for name in different)
    assert after.keys() - before.keys() == ({"score.weight"} if stage == "reward" else set())


def test_a_run_says_what_was_trained(lora_run):
    def counts(stage):
        return json.loads((lora_run / stage / "stage.json").read_text())["parameters"]

    base = sum(tensor.numel() for tensor in weights(lora_run / "sft" / "model").values())
    sft, reward, ppo = map(counts, STAGES)
    assert sft["all"] - sft["trainable"] == reward["all"] - reward["trainable"] == base
    assert reward["trainable"] - sft["trainable"] == 32  # the scalar head
    of_reward = sft["trainable"]  # the reward model's adapters, frozen below the critic's own
    assert ppo == {"actor": sft, "critic": {**reward, "all": reward["all"] + of_reward}}
    assert json.loads((lora_run / "run.json").read_text())["config"]["lora"]["rank"] == 4


@pytest.mark.slow
def test_killed_run_resumes_to_the_same_weights(rlhf, lora_run, tmp_path):
    output = Path(shutil.copytree(lora_run, tmp_path / "run"))
    arguments = ["ppo", "--output", output, *LORA, "--overwrite", *sets("ppo.checkpoint_every=1")]
    kill_at(output / "ppo" / "checkpoints" / "step-00000001", rlhf, *arguments)
    printed = rlhf("ppo", "--output", output, *LORA, "--resume").stdout
    assert "resumed after step" in printed and "actor, reference, critic and reward share one frozen base" in printed
    assert_same_weights(output / "ppo" / "model", lora_run / "ppo" / "model")


@pytest.mark.slow
@pytest.mark.parametrize(("zero_stage", "ranks"), [(0, 1), (3, 1), (0, 2), (2, 2), (3, 2)])
def test_neither_ranks_nor_zero_change_what_is_learned(rlhf, lora_run, tmp_path, zero_stage, ranks):
    output = tmp_path / "run"
    rlhf("--output", output, *LORA, "--ranks", ranks, "--set", f"engine.zero_stage={zero_stage}")
    for stage in ("sft", "reward"):
        assert_same_weights(output / stage / "model", lora_run / stage / "model", atol=2e-5)
    assert json.loads((output / "ppo" / "stage.json").read_text())["before"]["kl"] == 0.0
