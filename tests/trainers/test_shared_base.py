"""PPO's models on one frozen base: the numbers of four separate ones, in the memory of one, wherever the run lies."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import accelerators
from accelerators.backends.cpu import info as cpu_info
from rlhf.config.schema import ModelConfig, OptimizerConfig, build_config
from rlhf.engine import distributed
from rlhf.engine.engine import TrainingEngine
from rlhf.evaluation.models import model_folder
from rlhf.models.lora import add_adapters, find_adapted_layers
from rlhf.models.shared_base import SharedBase, build_on_base
from rlhf.roles.roles import model_placements
from rlhf.trainers import pipeline
from rlhf.trainers.oom import measure_models
from tests.helpers import llama, sets, weights
from tests.in_process import stage_context

PRECISIONS = ["fp32", "bf16"]
RANK = 4
BASE = "actor, reference, critic and reward share one frozen base"


@pytest.fixture(scope="module")
def lora_run(rlhf, tmp_path_factory) -> Path:
    """SFT and a reward model, trained with LoRA; moved since."""
    output = tmp_path_factory.mktemp("lora") / "run"
    for stage in ("sft", "reward"):
        rlhf(stage, "--output", output, "--set", f"lora.rank={RANK}", "--set", "reward.optimizer.learning_rate=0.01")
    return Path(shutil.move(output, output.with_name("moved")))


@pytest.fixture
def build(accelerator, recipe, lora_run, capsys):
    """Build PPO with a run's models, before its first step; return it with the output."""

    def made(precision="fp32", zero_stage=1, roles=None, engine=None, **lora):
        values = {
            **recipe,
            "precision": precision,
            "engine": {**recipe["engine"], "zero_stage": zero_stage, **(engine or {})},
            "lora": {"rank": RANK, **lora},
            "roles": roles or {},
        }
        context = stage_context(accelerator, lora_run, "ppo", values)
        capsys.readouterr()
        return pipeline.build_trainer(context), capsys.readouterr().out

    return made


def modules(ppo):
    return {name: getattr(model, "module", model) for name, model in ppo.context.models.items()}


def first_rollout(ppo):
    ppo.decoder.random.manual_seed(5)
    (prompts,) = ppo.batches.step(0)
    sequences = ppo.generate(ppo.accelerator.to_device(prompts))
    return sequences, ppo.score(sequences)


def frozen_base(ppo):
    """The base's tensors in each model, by their places in memory."""
    return {
        name: {
            parameter.data_ptr()
            for path, parameter in module.named_parameters()
            if not parameter.requires_grad and ".lora_" not in path and not path.endswith("score.weight")
        }
        for name, module in modules(ppo).items()
    }


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_frozen_weight_of_the_base_is_there_once(build, precision, zero_stage):
    ppo, log = build(precision, zero_stage)
    assert f"ppo: {BASE}\n" in log
    actor, critic, reward = frozen_base(ppo).values()
    assert actor == critic == reward and len(actor) == 2 * 9 + 2  # of two layers; embeddings and the last norm
    ppo.step(0)
    assert frozen_base(ppo) == {"actor": actor, "critic": actor, "reward": actor}


def test_four_models_take_one_base_their_adapters_and_two_heads(build, tokenizer):
    """Counted by hand; at ZeRO 0 and in fp32, for which DeepSpeed adds nothing."""
    ppo, _ = build(zero_stage=0)
    hidden, middle, keys = 32, 48, 16
    linear = [(hidden, hidden), (hidden, keys), (hidden, keys), (hidden, hidden)]
    linear += [(hidden, middle), (hidden, middle), (middle, hidden)]
    embeddings = ppo.actor.module.get_input_embeddings().num_embeddings * hidden
    base = embeddings + 2 * (sum(a * b for a, b in linear) + 2 * hidden) + hidden
    adapters = 2 * sum(RANK * (a + b) for a, b in linear)
    parameters = {
        parameter.data_ptr(): parameter.numel() for module in modules(ppo).values() for parameter in module.parameters()
    }
    assert sum(parameters.values()) == base + 3 * adapters + 2 * hidden
    held = measure_models(modules(ppo))
    rotary = hidden // 4 // 2  # float32 numbers of a table, and of its copy
    assert held["shared"] == 4 * (base + adapters + 2 * rotary)  # the reward model's adapters are the critic's too
    assert held["actor"] == 4 * adapters and held["reward"] == 4 * hidden


@pytest.mark.parametrize("precision", PRECISIONS)
def test_numbers_are_those_of_four_separate_models(build, precision):
    """In bf16 a separate reward model has its adapters rounded into weights of 8 bits, a shared one has not.

    The policy is the same in either case, to the last bit.
    """
    shared, _ = build(precision)
    apart, log = build(precision, share_base=False)
    assert "critic" not in log.partition("rows")[0]
    assert frozen_base(apart)["actor"].isdisjoint(frozen_base(apart)["critic"] | frozen_base(apart)["reward"])
    (sequences, scored), (same, expected) = first_rollout(shared), first_rollout(apart)
    assert torch.equal(sequences.input_ids, same.input_ids)
    for key in ("log_probs", "ref_log_probs"):
        assert torch.equal(getattr(scored, key), getattr(expected, key))
    unit = {"fp32": 2.0**-20, "bf16": 2.0**-7}[precision]  # of numbers below 1: a few roundings, of 24 bits or of 8
    for ours, theirs in ((scored.values, expected.values), (scored.reward, expected.reward)):
        assert theirs.abs().max() < 1
        assert (ours - theirs).abs().max() <= unit
    numbers = []
    for ppo in (shared, apart):
        ppo.decoder.random.manual_seed(5)
        numbers.append(ppo.step(0))
    for key, value in numbers[1].items():
        # Advantages are whitened, which makes as much of a small difference in values as of a large one: gradients.
        if precision == "fp32" or not (key.endswith("grad_norm") or key == "clip_fraction"):
            assert numbers[0][key] == pytest.approx(value, rel=1e-3, abs=4 * unit), key


def test_fully_trained_critic_shares_nothing(build):
    ppo, log = build(roles={"actor": {"lora_rank": 8, "lora_alpha": 24}, "critic": {"lora_rank": 0}})
    assert (
        "ppo: actor, reference and reward share one frozen base; the others do not: the critic is trained in full\n"
        in log
    )
    bases = frozen_base(ppo)
    assert bases["critic"] == set() and bases["actor"] == bases["reward"] and len(bases["actor"]) == 20
    counts = ppo.critic.parameter_counts
    assert counts["trainable"] == counts["all"]
    (factor,) = {
        parameter.shape[0] for name, parameter in ppo.actor.module.named_parameters() if ".lora_A.default" in name
    }
    assert factor == 8
    scales = {layer.scaling["default"] for layer in find_adapted_layers(ppo.actor.module).values()}
    assert scales == {24 / 8}, "of the role, not of lora.alpha"
    ppo.step(0)
    assert all(parameter.grad is None or parameter.requires_grad for parameter in ppo.critic.module.parameters())


def test_fully_trained_actor_leaves_the_others_one_base(build):
    ppo, log = build(roles={"actor": {"lora_rank": 0}})
    assert "ppo: critic and reward share one frozen base; the others do not: the actor is trained in full\n" in log
    bases = frozen_base(ppo)
    assert bases["critic"] == bases["reward"] and bases["reference"].isdisjoint(bases["critic"]) and not bases["actor"]


def test_trained_norms_give_the_reference_its_own_model(build):
    ppo, log = build(also_train=["norms"])
    assert "ppo: actor, critic, reference and reward share one frozen base\n" in log
    bases = frozen_base(ppo)
    assert bases["actor"] < bases["reference"] and len(bases["reference"] - bases["actor"]) == 5
    sequences, scored = first_rollout(ppo)
    assert torch.equal(scored.log_probs, scored.ref_log_probs)
    # The reward model was trained without norms: the critic begins with the base's, and trains its own.
    norms = [modules(ppo)[name].model.model.norm.weight for name in ("critic", "reward")]
    critic, reward = (norm.detach().clone() for norm in norms)
    for index in range(2):
        ppo.step(index)
    assert not torch.equal(norms[0], critic) and torch.equal(norms[1], reward)
    after = ppo.score(sequences)
    assert torch.equal(after.ref_log_probs, scored.ref_log_probs)
    assert (after.log_probs - scored.log_probs).abs().max() > 1e-3
    assert torch.equal(after.reward, scored.reward)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"zero_stage": 3},
            "actor and reference share one frozen base; the others do not: at ZeRO-3 DeepSpeed shards each ",
        ),
        ({"engine": {"frozen": "auto"}, "share_base": False}, None),
        ({"rank": 0}, None),
    ],
)
def test_models_that_share_no_base_are_logged(build, settings, line):
    _, log = build(**settings)
    assert line in log if line else "share" not in log


def test_another_base_is_named(build, lora_run, recipe, model_folder):
    record = lora_run / "reward" / "adapter" / "base.json"
    before = record.read_text()
    record.write_text(before.replace('"fingerprint": "', '"fingerprint": "0'))
    try:
        _, log = build()
    finally:
        record.write_text(before)
    first_folder = lora_run.with_name("run") / "sft" / "model"
    line = f"{lora_run}/reward/model was trained on {first_folder}, and the actor starts from {lora_run}/sft/model"
    assert f"share one frozen base; the others do not: {line}\n" in log.replace("ppo: ", "")


TOKENS = torch.randint(2, 60, (2, 8), generator=torch.Generator().manual_seed(0))


def run_rank(folder: str, *precisions: str) -> None:
    """Save for each rank {(precision, ZeRO stage): (bases are one at first, and after steps, base unchanged)}."""
    with distributed.start_process_group(accelerators.select("cpu", environ={})) as accelerator:
        results = {
            (precision, zero_stage): step_two_engines(accelerator, precision, zero_stage)
            for precision in precisions
            for zero_stage in (0, 1, 2)
        }
        torch.save(results, Path(folder) / f"rank {distributed.world().rank}")


def step_two_engines(accelerator: Any, precision: str, zero_stage: int) -> tuple[bool, bool, bool]:
    placement = model_placements(build_config({"engine": {"zero_stage": zero_stage}, "lora": {"rank": 4}}), "sft")[
        "sft"
    ]
    model, engines = llama(60), []
    for _ in range(2):
        add_adapters(model, placement.lora, seed=0)
        base = SharedBase(model)
        engines.append(
            TrainingEngine(
                "test",
                model,
                accelerator=accelerator,
                precision=accelerator.precision(precision),
                placement=placement,
                optimizer=OptimizerConfig(warmup=0),
                total_steps=2,
                micro_batch_size=2,
                accumulation=1,
            )
        )
        model = build_on_base(base, ModelConfig(), attention="sdpa")
    first, second = (base_tensors(engine) for engine in engines)
    before = {name: tensor.clone() for name, tensor in first.items()}
    at_first = places(first) == places(second)
    for engine in engines:
        engine.step([TOKENS], lambda model, ids: (model(input_ids=ids, labels=ids).loss / 2, {}))
    first, second = (base_tensors(engine) for engine in engines)
    unchanged = all(torch.equal(tensor, before[name]) for name, tensor in second.items())
    return at_first, places(first) == places(second), unchanged


def base_tensors(engine: TrainingEngine) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in engine.module.state_dict().items() if ".lora_" not in name}


def places(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


@pytest.mark.slow
def test_two_ranks_keep_one_base_each(forks, tmp_path):
    precisions = ["fp32", *(["bf16"] if cpu_info.native_bf16() else [])]
    arguments = ", ".join(map(repr, [str(tmp_path), *precisions]))
    forks.ranks(2, f"from tests.trainers import test_shared_base; test_shared_base.run_rank({arguments})")
    for rank in (0, 1):
        results = torch.load(tmp_path / f"rank {rank}")
        assert set(results.values()) == {(True, True, True)} and len(results) == 3 * len(precisions)


def test_quantized_base_is_shared(build):
    ppo, log = build(engine={"frozen": "int8"})
    assert (
        BASE in log
        and "actor: rollouts apply the adapters separately from the weights: the frozen weights are quantized" in log
    )
    packed = [
        {buffer.data_ptr() for buffer in module.buffers() if buffer.dtype == torch.int8}
        for module in modules(ppo).values()
    ]
    assert len(packed[0]) == 14 and packed[0] == packed[1] == packed[2]
    _, scored = first_rollout(ppo)
    assert torch.equal(scored.log_probs, scored.ref_log_probs)
    ppo.step(0)


@pytest.fixture(scope="module")
def saved_ppo(rlhf, lora_run, tmp_path_factory) -> dict[str, Path]:
    """The folders of one step of PPO, with a moving average of its weights, for each wish of `lora.save`."""
    keys = (f"lora.rank={RANK}", "reward.optimizer.learning_rate=0.01", "ppo.steps=1", "ppo.ema=0.75")
    folders = {}
    for wish in ("both", "adapter"):
        folders[wish] = Path(shutil.copytree(lora_run, tmp_path_factory.mktemp("saved") / wish))
        rlhf("ppo", "--output", folders[wish], *sets(*keys, f"lora.save={wish}"))
    return folders


def test_ppo_saves_a_merged_model_an_adapter_or_both(saved_ppo):
    def logits(model):
        with torch.no_grad():
            return model.eval()(input_ids=torch.arange(2, 12)[None]).logits

    names, adapted = {}, {}
    for wish, output in saved_ppo.items():
        names[wish] = {path.name for path in (output / "ppo").iterdir() if path.name in ("model", "adapter")}
        base = AutoModelForCausalLM.from_pretrained(output / "sft" / "model")
        adapted[wish] = logits(PeftModel.from_pretrained(base, output / "ppo" / "adapter"))
    merged = logits(AutoModelForCausalLM.from_pretrained(saved_ppo["both"] / "ppo" / "model"))
    assert names == {"both": {"model", "adapter"}, "adapter": {"adapter"}}
    torch.testing.assert_close(adapted["both"], merged)
    assert torch.equal(adapted["both"], adapted["adapter"])
    folder = saved_ppo["adapter"]
    assert model_folder(folder) == folder / "ppo" / "adapter"
    assert model_folder(folder, "sft") == folder / "sft" / "model"


@pytest.mark.parametrize("save", ["adapter", "both"])
def test_average_of_an_adapter_is_saved_next_to_it(saved_ppo, save):
    folder = saved_ppo[save] / "ppo"
    last, average = (load_file(folder / name / "adapter_model.safetensors") for name in ("adapter", "adapter-ema"))
    assert last.keys() == average.keys()
    assert any(not torch.equal(last[name], tensor) for name, tensor in average.items())
    averages = ["adapter-ema"] + ["model-ema"] * (save == "both")
    assert json.loads((folder / "stage.json").read_text())["average"] == averages
    assert (folder / "model-ema").exists() == (save == "both")
    if save == "adapter":
        assert model_folder(saved_ppo[save], ema=True) == folder / "adapter-ema"
    else:
        base = AutoModelForCausalLM.from_pretrained(saved_ppo[save] / "sft" / "model")
        merged = PeftModel.from_pretrained(base, folder / "adapter-ema").merge_and_unload().state_dict()
        for name, tensor in weights(folder / "model-ema").items():
            torch.testing.assert_close(tensor, merged[name], rtol=1e-6, atol=1e-7)


def test_model_of_later_stages_is_saved_next_to_its_adapter(rlhf, tmp_path):
    log = rlhf("sft", "--output", tmp_path / "run", "--set", "lora.rank=4", "--set", "lora.save=adapter").stdout
    assert "sft: its model is saved next to its adapter: later stages start from it" in log
    assert all((tmp_path / "run" / "sft" / name).is_dir() for name in ("model", "adapter"))
