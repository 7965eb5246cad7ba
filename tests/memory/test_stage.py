"""The planned memory of stages: models on one base, reused passes, and DPO's pairs and reference."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accelerators import Accelerator, Support
from accelerators.backends.cuda.backend import CUDA
from accelerators.backends.hpu.backend import HPU
from rlhf.config.schema import Stage, build_config
from rlhf.data.toy_world import build_world_tokenizer
from rlhf.generation.decode_state import plan_windows
from rlhf.memory.advice import (
    advise,
    find_changes,
    find_largest_micro_batch,
    list_changes,
    plan_stages,
    resolve_auto,
)
from rlhf.memory.duration import compare_later_stages, count_flops
from rlhf.memory.environment import Environment, describe_environment, detect_environment
from rlhf.memory.stage import Rows, _update, build_models, count_recordings, plan_stage
from rlhf.models.loading import build_llama_on_meta
from rlhf.models.lora import _find_also_trained
from rlhf.models.shape import EMBEDDED, shape_from
from rlhf.roles.base_sharing import record_base

LORA = {"rank": 8}
HOST = Environment(2, unified_memory=True)


def shared_models(**settings: Any) -> set[str]:
    config = build_config({"model": {"path": "opt-125m"}, "lora": LORA, **settings})
    return {name for name, model in build_models(config, "ppo", Environment()).items() if model.shared}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"critic", "reward"}),  # and the reference is the actor without its adapters
        ({"lora": LORA | {"also_train": ["norms"]}}, {"critic", "reference", "reward"}),
        ({"lora": LORA | {"share_base": False}}, set()),
        ({"lora": {"rank": 0}}, set()),
        ({"engine": {"zero_stage": 3}}, set()),
        ({"roles": {"reward": {"frozen": "int8"}}}, set()),
        ({"roles": {"critic": {"lora_rank": 0}}}, {"reward"}),  # on the actor's base
        ({"roles": {"actor": {"lora_rank": 0}}}, {"reward"}),  # on the critic's
        ({"roles": {"reward": {"lora_rank": 0}}}, {"reward"}),  # merged into no base: on the critic's
        ({"reward": {"model": "opt-350m"}}, {"reward"}),
        ({"ppo": {"actor": "opt-125m"}}, {"reward"}),  # the reward model is trained on that of the sft stage
    ],
)
def test_models_on_one_base_share_it_in_the_plan(settings: dict[str, Any], expected: set[str]) -> None:
    assert shared_models(**settings) == expected


def test_shape_of_the_embedded_model_is_that_of_the_built_one() -> None:
    built = build_llama_on_meta(build_world_tokenizer())
    shape = shape_from(EMBEDDED, "the embedded model")
    assert (shape.vocabulary, shape.parameters()) == (built.config.vocab_size, built.num_parameters())


def test_named_reward_model_shares_its_recorded_base(tmp_path: Path) -> None:
    """The reward stage records the base next to its adapter."""
    reward = tmp_path / "reward" / "model"
    reward.mkdir(parents=True)
    (reward / "config.json").write_text(json.dumps(EMBEDDED))
    named: dict[str, Any] = {"ppo": {"actor": "opt-125m", "reward_model": str(reward)}}
    assert shared_models(**named) == {"reward"}
    (tmp_path / "reward" / "adapter").mkdir()
    record_base(tmp_path / "reward" / "adapter", "opt-125m")
    assert shared_models(**named) == {"critic", "reward"}


def test_gradient_bucket_has_the_size_given_to_deepspeed() -> None:
    """A device allocates all of it, however little is trained."""

    def device_bytes(**deepspeed: Any) -> int:
        values = {"model": {"path": "opt-125m"}, "lora": LORA, "engine": {"zero_stage": 2, "deepspeed": deepspeed}}
        (stage_plan,) = plan_stages(build_config(values), ["sft"], Environment(2, "bf16"))
        return stage_plan.fullest.device

    larger = device_bytes(zero_optimization={"reduce_bucket_size": 500_000_000})
    assert larger - device_bytes() == pytest.approx(2 * 500_000_000, rel=0.01)


def test_chunks_of_logits_have_the_size_of_the_accelerators() -> None:
    """3 x 512 positions of 32,000 tokens in bf16 are projected in parts: three float32 tensors of a chunk exist."""
    sections = {
        "sft": {"batch_size": 3, "micro_batch_size": 3},
        "data": {"max_prompt_length": 256, "max_completion_length": 256},
    }
    config = build_config({"model": {"path": "llama-2-7b"}, **sections})
    for chunk, elements in ((1 << 22, 1 << 22), (1 << 24, 1 << 24), (1 << 30, 3 * 512 * 32_000)):
        environment = replace(Environment(1, "bf16"), chunk_elements=chunk)
        (model,) = build_models(config, "sft", environment).values()
        between, *_ = _update(model, Rows(3, 512), 512)
        assert sum(item.size for item in between if item.kind == "logits") == 3 * 4 * elements


def test_described_devices_have_the_chunks_of_built_in_backends() -> None:
    assert describe_environment(build_config({}), 1, 2**34, None).chunk_elements == CUDA.chunk_elements
    assert CUDA.chunk_elements == HPU.chunk_elements > Accelerator.chunk_elements == Environment().chunk_elements


def test_reused_passes_exist_at_the_same_time() -> None:
    """Four micro-batches: the actor's update starts with three more of the actor's passes, and four of the critic's."""
    values = {"model": {"path": "llama-2-7b"}, "lora": LORA, "ppo": {"batch_size": 8, "micro_batch_size": 2}}
    sizes = {}
    for reuse in (True, False):
        config = build_config({**values, "ppo": {**values["ppo"], "reuse_forward": reuse}})
        (stage_plan,) = plan_stages(config, ["ppo"], Environment(1, "bf16"))
        for phase in stage_plan.phases:
            for role in ("actor", "critic"):
                activations = [item.size for item in phase.items if (item.role, item.kind) == (role, "activations")]
                sizes[reuse, phase.name, role] = sum(activations)
    actor, critic = "training of the actor", "training of the critic"
    once = sizes[False, actor, "actor"]
    assert once > 0 and sizes[False, actor, "critic"] == 0
    assert (sizes[True, actor, "actor"], sizes[True, actor, "critic"]) == (4 * once, 4 * once)
    assert (sizes[True, critic, "actor"], sizes[True, critic, "critic"]) == (0, 4 * once)


def test_plan_reuses_passes_only_if_they_fit() -> None:
    config = build_config({"model": {"path": "llama-2-7b"}, "ppo": {"batch_size": 64, "micro_batch_size": 2}})
    environment = Environment(1, "bf16")
    (roomy,) = plan_stages(config, ["ppo"], environment)
    apart = config.model_copy(update={"ppo": config.ppo.model_copy(update={"reuse_forward": False})})
    (tight,) = plan_stages(apart, ["ppo"], environment)
    assert tight.fullest.device < roomy.fullest.device
    for missing, expected in ((0, roomy), (1, tight)):
        limited = replace(environment, device_limit=roomy.fullest.device - missing)
        assert plan_stages(config, ["ppo"], limited) == [expected]


@pytest.mark.parametrize("role", ["reward", "judge"])
def test_frozen_model_that_waits_on_the_host_is_on_the_device_while_it_scores(role: str) -> None:
    """Its bf16 weights, two bytes each, leave all phases but scoring."""
    values = {"model": {"path": "llama-2-7b"}, "ppo": {"batch_size": 8, "micro_batch_size": 2, "judge": "llama-2-7b"}}
    (kept,) = plan_stages(build_config(values), ["ppo"], Environment(1, "bf16"))
    (waits,) = plan_stages(
        build_config(values | {"roles": {role: {"offload": "parameters"}}}), ["ppo"], Environment(1, "bf16")
    )
    before, after = ({phase.name: phase.device for phase in plan.phases} for plan in (kept, waits))
    weights = 2 * build_models(build_config(values), "ppo", Environment(1, "bf16"))[role].parameters
    assert after["scoring"] == pytest.approx(before["scoring"], rel=0.01)
    assert before["generation"] - after["generation"] == pytest.approx(weights, rel=0.05)


# DPO

ENVIRONMENT = Environment(1, "bf16")


def dpo_config(**dpo: Any) -> Any:
    lengths = {"max_prompt_length": 256, "max_completion_length": 256}
    sections = {"sft": {"micro_batch_size": 16, "dropout": 0}, "dpo": {"micro_batch_size": 8} | dpo}
    return build_config({"model": {"path": "opt-125m"}, "data": lengths, **sections})


def advised(config: Any) -> list[str]:
    """Settings that are advised after training ran out of memory."""
    return advise(config, "dpo", "training", Environment(unified_memory=True), "bf16")[0]


def item_sizes(phase: Any, role: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for item in phase.items:
        if item.role == role:
            sizes[item.kind] = sizes.get(item.kind, 0) + item.size
    return sizes


def plan_phases(stage: Any, **dpo: Any) -> dict[str, Any]:
    (plan,) = plan_stages(dpo_config(**dpo), [stage], ENVIRONMENT)
    return {phase.name: phase for phase in plan.phases}


def test_dpo_update_has_twice_the_rows_and_logits_of_replies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlhf.memory.stage._LARGE", 2**40)  # so that logits are whole
    pairs, rows = item_sizes(plan_phases("dpo")["training"], "dpo"), item_sizes(plan_phases("sft")["training"], "sft")
    assert pairs["activations"] == rows["activations"]
    assert pairs["logits"] == pytest.approx(rows["logits"] / 2, rel=0.05)  # half of a row may be its prompt
    assert all(pairs[kind] == rows[kind] for kind in ("weights", "masters", "moments", "gradients"))


def test_dpo_reference_counts_only_if_kept_beside_the_policy() -> None:
    alone, beside = plan_phases("dpo"), plan_phases("dpo", reference="beside")
    assert "scoring" not in alone and not item_sizes(alone["training"], "reference")
    weights = item_sizes(beside["training"], "reference")["weights"]
    assert weights == pytest.approx(2 * 125e6, rel=0.01)
    assert beside["training"].device - alone["training"].device == pytest.approx(weights, rel=0.2)
    assert item_sizes(beside["scoring"], "reference")["logits"]


def test_precomputed_reference_is_advised_if_a_live_one_is_kept() -> None:
    beside = dpo_config(reference="beside")
    limited = replace(ENVIRONMENT, device_limit=plan_phases("dpo")["training"].device + 2**20)
    (change,) = find_changes(beside, ["dpo"], limited)
    assert change.settings == {"dpo.reference": "precomputed"}
    assert advised(beside)[2] == "dpo.reference=precomputed"
    alone = dpo_config()
    assert not any("reference" in str(change) for change in list_changes(alone, ["dpo"], ENVIRONMENT))
    assert "dpo.reference=precomputed" not in advised(alone)


def test_plan_counts_a_rounded_vocabulary() -> None:
    def actor(**model: Any) -> int:
        config = build_config({"model": {"path": "tinyllama-1.1b", **model}})
        return build_models(config, "ppo", ENVIRONMENT)["actor"].parameters

    assert actor(vocabulary_multiple=2**15) - actor() == 2 * 2048 * (2**15 - 32_000)


def test_reference_pass_counts_once_or_with_every_step() -> None:
    def passes(**dpo: Any) -> float:
        config = dpo_config(batch_size=1, micro_batch_size=1, **dpo)
        models = build_models(config, "dpo", ENVIRONMENT)
        return sum(count_flops(config, "dpo", models)) / (2 * 512 * 2 * models["dpo"].parameters)

    assert passes() == pytest.approx(4)  # forward, backward for inputs and weights, and the reference's
    assert passes(epochs=4) == pytest.approx(3.25)
    assert passes(epochs=4, reference="beside") == pytest.approx(4)


# PPO's operations


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        # (of the actor, of the critic): generation, two scorings of the actor's weights; the critic's and the reward's.
        ({}, (2 + 2 + 2 + 6, 2 + 2 + 6)),
        ({"ppo": {"ppo_epochs": 3}}, (2 + 2 + 2 + 3 * 6, 2 + 2 + 3 * 6)),
        ({"model": {"gradient_checkpointing": True}}, (2 + 2 + 2 + 8, 2 + 2 + 8)),
        ({"ppo": {"estimator": "grpo"}}, (2 + 2 + 2 + 6, 2)),  # the reward model alone
        ({"ppo": {"judge": "llama-2-7b"}}, (2 + 2 + 2 + 6, 2 + 2 + 6)),  # which only evaluations use
    ],
    ids=["once", "three epochs", "checkpointing", "no critic", "judge"],
)
def test_operations_of_ppo_are_those_counted_by_hand(settings: dict[str, Any], passes: tuple[int, int]) -> None:
    """For each number and token two operations forward and four backward; models of 7B, with and without the output."""
    values: dict[str, Any] = {"model": {"path": "llama-2-7b"}, "data": {"max_prompt_length": 24}}
    values["data"]["max_completion_length"] = 40
    ppo = {"batch_size": 8, "micro_batch_size": 2} | settings.get("ppo", {})
    config = build_config({**values, "model": values["model"] | settings.get("model", {}), "ppo": ppo})
    actor, scalar = 6_738_415_616, 6_738_415_616 - 32000 * 4096 + 4096
    operations = count_flops(config, "ppo", build_models(config, "ppo", Environment()))
    generation = 8 * 64 * 2 * actor
    assert operations == (generation, 8 * 64 * (passes[0] * actor + passes[1] * scalar) - generation)


def test_operations_of_ppo_with_adapters_leave_out_gradients_of_frozen_weights() -> None:
    """The reference is the actor without adapters: generation, two scorings and 4 of the actor, then 2 + 4 and 2."""
    config = seven_billion(ppo={"batch_size": 8, "micro_batch_size": 2})
    models = build_models(config, "ppo", Environment())
    assert "reference" not in models
    actor, critic, reward = (models[name].parameters for name in ("actor", "critic", "reward"))
    tokens = 8 * config.data.max_length
    expected = (tokens * 2 * actor, tokens * ((2 + 2 + 4) * actor + (2 + 4) * critic + 2 * reward))
    assert count_flops(config, "ppo", models) == expected


@pytest.mark.parametrize("unified_memory", [True, False])
def test_later_stages_are_compared_by_their_flops(unified_memory: bool) -> None:
    """Per token: SFT 6 times its numbers; the reward model 6; PPO 2 to generate, and 4 x 2 to score and 2 x 6 to train.

    Generation has a lower speed on devices with memory of their own.
    """
    values: dict[str, Any] = {"model": {"path": "llama-2-7b"}, "sft": {"batch_size": 4}, "reward": {"batch_size": 2}}
    config = build_config({**values, "ppo": {"batch_size": 8, "micro_batch_size": 2}})
    model, scalar = 6_738_415_616, 6_738_415_616 - 32000 * 4096 + 4096
    sft, reward = 30 * 4 * 6 * model, 20 * 2 * 2 * 6 * scalar
    generation, rest = 10 * 8 * 2 * model, 10 * 8 * (2 * 2 * model + 2 * 2 * scalar + 6 * model + 6 * scalar)
    ppo = generation * (1 if unified_memory else 3.2) + rest
    later = compare_later_stages(
        config, {"sft": 30, "reward": 20, "ppo": 10}, Environment(unified_memory=unified_memory)
    )
    assert later == {"ppo": 0, "reward": pytest.approx(ppo / reward), "sft": pytest.approx((reward + ppo) / sft)}


# weights in the layout of the device, and parts that are trained next to adapters


def seven_billion(**settings: Any) -> Any:
    values: dict[str, Any] = {"model": {"path": "llama-2-7b"}, "lora": LORA}
    return build_config({**values, "ppo": {"batch_size": 2, "micro_batch_size": 2}, **settings})


def converted(config: Any, limit: int) -> tuple[int, int, bool]:
    """Return (bytes of generation, bytes of converted weights, if they are a copy)."""
    environment = Environment(converts_weights=True, device_limit=limit, device_memory=limit)
    (plan,) = plan_stages(config, ["ppo"], environment)
    (phase,) = [phase for phase in plan.phases if phase.name == "generation"]
    return phase.device, item_sizes(phase, "actor").get("converted weights", 0), plan.copies_weights


def test_copy_of_converted_weights_counts_if_nine_tenths_of_the_device_hold_it() -> None:
    """The matrices of 32 layers and of the output, and a gate with its input; in place, one matrix at a time."""
    layer = 4 * 4096 * 4096 + 3 * 4096 * 11008
    output, gates = 32000 * 4096, 2 * 4096 * 11008
    config = seven_billion()
    device, size, copies = converted(config, 64 * 2**30)
    assert (size, copies) == (2 * (32 * layer + output + gates), True)
    limit = int(device / 0.9)
    assert converted(config, limit + 10)[1:] == (size, True)
    assert converted(config, limit - 10)[1:] == (2 * output, False)
    assert device - size + 2 * output == converted(config, limit - 10)[0]


@pytest.mark.parametrize("stage", ["sft", "dpo"])
@pytest.mark.parametrize("lora", [{}, LORA])
def test_samples_take_the_cache_of_three_rows_without_copies(stage: Stage, lora: dict[str, Any]) -> None:
    """Keys and values of 32 layers in bf16, for three rows of 512 tokens."""
    config = build_config({"model": {"path": "llama-2-7b"}, "lora": lora})
    (plan,) = plan_stages(config, [stage], Environment(converts_weights=True))
    (phase,) = [phase for phase in plan.phases if phase.name == "evaluation"]
    sizes = item_sizes(phase, "dpo" if stage == "dpo" else "sft")
    assert sizes["KV cache"] == 3 * config.data.max_length * 32 * 2 * 4096 * 2
    assert "converted weights" not in sizes and "merged weights" not in sizes


def test_each_recorded_step_keeps_its_logits_and_activations() -> None:
    """Three rows of Llama-2-7B in bf16: logits with copies in float32, and the widest moment of a layer."""
    logits = 3 * 32_000 * (2 + 4 + 4 + 8)
    activations = 3 * 2 * (3 * 11_008 + 2 * 4096)
    for completion, recordings in ((256, 4), (64, 2), (33, 1), (1, 1)):
        lengths = {"max_prompt_length": 64, "max_completion_length": completion}
        config = build_config({"model": {"path": "llama-2-7b"}, "data": lengths})
        sizes = {}
        for keeps in (False, True):
            (plan,) = plan_stages(config, ["sft"], replace(ENVIRONMENT, keeps_recordings=keeps))
            (phase,) = [phase for phase in plan.phases if phase.name == "evaluation"]
            sizes[keeps] = item_sizes(phase, "sft")
        assert sizes[True] == sizes[False] | {"recordings": recordings * (logits + activations)}
        assert recordings == len(plan_windows(64, max(completion - 1, 1), 4))


@pytest.mark.parametrize(
    ("settings", "ranks", "recordings"),
    [
        ({}, 2, 4),
        ({"engine": {"zero_stage": 3}, "ppo": {"generation_weights": "whole"}}, 2, 4),
        ({"engine": {"zero_stage": 3}, "ppo": {"generation_weights": "layerwise"}}, 2, 0),
        ({"engine": {"zero_stage": 3}, "ppo": {"generation_weights": "layerwise"}}, 1, 4),
        ({"engine": {"kernels": {"graph_capture": "none"}}}, 2, 0),
    ],
)
def test_steps_that_are_not_recorded_keep_nothing(settings: dict[str, Any], ranks: int, recordings: int) -> None:
    config = build_config({"model": {"path": "opt-125m"}, **settings})
    environment = describe_environment(config, ranks, 2**35, None)
    assert count_recordings(config, build_models(config, "ppo", environment)["actor"]) == recordings


def test_recordings_are_counted_if_the_accelerator_keeps_them(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not detect_environment(accelerator, build_config({}), 1).keeps_recordings
    monkeypatch.setattr(type(accelerator), "recordings_keep_memory", lambda self: True)
    assert not detect_environment(accelerator, build_config({}), 1).keeps_recordings  # the CPU records nothing
    capabilities = accelerator.kernels.capabilities() | {"graph_capture": Support(True, "it records")}
    monkeypatch.setattr(accelerator.kernels, "capabilities", lambda: capabilities)
    assert detect_environment(accelerator, build_config({}), 1).keeps_recordings


@pytest.mark.parametrize(("zero_stage", "copies"), [(0, 1), (3, 3)])
def test_loading_a_quantized_base_counts_a_whole_matrix(zero_stage: int, copies: int) -> None:
    """The widest matrix in float32, and packed: at ZeRO-3 its tensors, these joined, and the joined bytes in shards."""
    shape = {"model": {"path": "llama-2-7b"}, "lora": LORA, "engine": {"zero_stage": zero_stage}}
    sizes = {}
    for frozen in ("auto", "int8"):
        (plan,) = plan_stages(build_config({**shape, "engine": {**shape["engine"], "frozen": frozen}}), ["sft"], HOST)
        (phase,) = [phase for phase in plan.phases if phase.name == "loading"]
        sizes[frozen] = item_sizes(phase, "sft").get("loading", 0)
    numbers = 4096 * 11008
    assert sizes["int8"] - sizes["auto"] == pytest.approx(4 * numbers + copies * numbers, rel=0.01)  # and scales


def test_only_a_device_counts_weights_that_are_gathered_ahead() -> None:
    """DeepSpeed gathers up to 50,000,000 weights ahead; on a host it gathers none."""
    config = build_config({"model": {"path": "llama-2-7b"}, "engine": {"zero_stage": 3}})
    sizes = []
    for unified in (True, False):
        (plan,) = plan_stages(config, ["reward"], Environment(2, unified_memory=unified))
        (phase,) = [phase for phase in plan.phases if phase.name == "training"]
        sizes.append(item_sizes(phase, "reward")["gathered layers"])
    assert sizes[1] - sizes[0] == pytest.approx(2 * 50_000_000, rel=1e-6)


def test_whole_weights_for_samples_are_added_to_the_shards() -> None:
    """At ZeRO-3, a rank of eight gathers all weights in bf16."""
    config = build_config({"model": {"path": "llama-2-7b"}, "engine": {"zero_stage": 3}})
    (plan,) = plan_stages(config, ["sft"], Environment(8, device_limit=80 * 2**30))
    (phase,) = [phase for phase in plan.phases if phase.name == "evaluation"]
    assert item_sizes(phase, "sft")["gathered layers"] == pytest.approx(2 * 6_738_415_616)  # Llama 2's


def test_devices_that_convert_no_weights_have_no_copy() -> None:
    (plan,) = plan_stages(seven_billion(), ["ppo"], Environment())
    assert not plan.copies_weights
    assert all("converted weights" not in item_sizes(phase, "actor") for phase in plan.phases)


@pytest.mark.parametrize("family", ["opt", "llama", "gpt_neox", "phi"])
@pytest.mark.parametrize("parts", [["norms"], ["biases"], ["embeddings"], ["norms", "biases", "embeddings"]])
@pytest.mark.parametrize("scalar_head", [False, True])
def test_trained_parameters_are_those_that_lora_trains(family: str, parts: list[str], scalar_head: bool) -> None:
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSequenceClassification

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    extra = {"opt": {"ffn_dim": 64, "word_embed_proj_dim": 32}}.get(family, {})
    config = CONFIG_MAPPING[family](**sizes, **extra, vocab_size=100, num_labels=1)
    kind: Any = AutoModelForSequenceClassification if scalar_head else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(config)
    lora = build_config({"model": {"path": "x"}, "lora": {"rank": 2, "also_train": parts}}).lora
    shape = shape_from(config.to_dict(), family)
    head = shape.embedding if scalar_head else 0
    expected = sum(parameter.numel() for parameter in set(_find_also_trained(model, lora)))
    assert shape.parts(lora.also_train, scalar_head=scalar_head) + head == expected


def test_initial_parts_stay_in_memory_for_models_on_the_same_base() -> None:
    """PPO trains a copy of the embeddings; the reference, the critic and the reward model share the frozen ones."""

    def weights(share: bool) -> int:
        values = {"model": {"path": "llama-2-7b"}, "lora": LORA | {"also_train": ["embeddings"], "share_base": share}}
        return build_models(build_config(values), "ppo", Environment())["actor"].weights()

    assert weights(True) - weights(False) == 2 * 2 * 32000 * 4096


def test_parts_next_to_adapters_have_masters_and_moments() -> None:
    def states(parts: list[str]) -> int:
        config = seven_billion(lora=LORA | {"also_train": parts}, engine={"zero_stage": 1})
        items = build_models(config, "sft", Environment())["sft"].resting()
        return sum(item.size for item in items if item.kind in ("masters", "moments"))

    assert states(["embeddings"]) - states([]) == (4 + 8) * 2 * 32000 * 4096


def test_plan_proposes_no_zero_stage_that_the_device_refuses() -> None:
    config = build_config({"model": {"path": "llama-2-7b"}, "engine": {"zero_stage": "auto"}})
    one = build_config({"model": {"path": "llama-2-7b"}, "engine": {"zero_stage": 1}})
    for zero_stages, last in (((0, 1, 2, 3), 3), ((0, 1, 2), 2)):
        full = Environment(2, "bf16", device_limit=0, zero_stages=zero_stages)
        assert resolve_auto(config, ["sft"], full).engine.zero_stage == last
        proposed = [change.settings.get("engine.zero_stage", 0) for change in list_changes(one, ["sft"], full)]
        assert max(proposed) == last


@pytest.mark.parametrize(
    ("ranks", "gib", "zero_stage", "expected"),
    [
        (1, 200, "auto", ("none", 0)),
        (1, 60, "auto", ("optimizer", 1)),  # 16-bit weights and float32 gradients: 6 bytes of 6.7e9 numbers, 38 GiB
        (1, 60, 2, ("optimizer", 2)),
        (8, 7, "auto", ("optimizer", 3)),
        (8, 6, "auto", ("all", 3)),
        (1, 200, 0, ("none", 0)),
    ],
)
def test_auto_offloads_as_little_as_fits(ranks: int, gib: int, zero_stage: Any, expected: tuple[str, int]) -> None:
    engine = {"zero_stage": zero_stage, "offload": "auto"}
    data = {"max_prompt_length": 16, "max_completion_length": 16}
    sft = {"batch_size": 8, "micro_batch_size": 1}
    config = build_config({"model": {"path": "llama-2-7b"}, "engine": engine, "data": data, "sft": sft})
    environment = Environment(ranks, "bf16", device_limit=gib * 2**30)
    chosen = resolve_auto(config, ["sft"], environment).engine
    assert find_changes(config, ["sft"], environment) == [], "it fits"
    assert (chosen.offload, chosen.zero_stage) == expected


def test_auto_offloads_nothing_where_the_devices_memory_is_the_hosts() -> None:
    config = build_config({"model": {"path": "llama-2-7b"}, "engine": {"zero_stage": "auto", "offload": "auto"}})
    chosen = resolve_auto(config, ["sft"], replace(HOST, device_limit=0)).engine
    assert (chosen.offload, chosen.zero_stage) == ("none", 3)


def test_offloading_is_proposed_to_a_recipe_that_leaves_it_to_the_plan() -> None:
    for engine in ({"offload": "auto"}, {"zero_stage": "auto"}):
        config = build_config({"model": {"path": "llama-2-7b"}, "engine": engine, "sft": {"micro_batch_size": 1}})
        small = Environment(1, "bf16", device_limit=60 * 2**30)
        (change,) = find_changes(config, ["sft"], small)
        assert change.settings == {"engine.offload": "optimizer", "engine.zero_stage": 1}


def test_micro_batches_that_do_not_divide_the_texts_of_pretraining_are_not_tried() -> None:
    """With 12 rows of text, 8 rows at a time are refused; the largest micro-batch is no error, nor is the advice."""
    ppo = {"batch_size": 32, "ptx_coef": 1.0, "ptx_batch_size": 12}
    config = build_config({"model": {"path": "opt-1.3b"}, "ppo": ppo, "data": {"pretraining": "texts"}})
    changes = list_changes(config, ["ppo"], Environment())
    refused = [change for change in changes if change.settings == {"ppo.micro_batch_size": 8}]
    assert refused, "the plan would try it"
    for gib in range(2, 60, 4):
        limited = Environment(device_limit=gib * 2**30)
        rows = find_largest_micro_batch(config, "ppo", limited)
        assert rows in (None, 32, 16, 4, 2, 1)
        assert all(
            change.settings.get("ppo.micro_batch_size") != 8 for change in find_changes(config, ["ppo"], limited)
        )


def test_rollouts_of_servers_take_no_cache_here() -> None:
    """Only a probe of 32 rows of at most 64 tokens is scored, however many completions are drawn elsewhere."""

    def plan(batch_size: int, **rollout: Any) -> dict[str, int]:
        ppo = {"batch_size": batch_size, "minibatch_size": 8, "rollout": rollout}
        data = {"max_prompt_length": 64, "max_completion_length": 2048}
        config = build_config({"model": {"path": "opt-125m"}, "data": data, "ppo": ppo})
        (phase,) = [phase for phase in plan_stage(config, "ppo", Environment()).phases if phase.name == "generation"]
        assert any(item.kind == "KV cache" for item in phase.items) == (not rollout)
        return {item.kind: item.size for item in phase.items if item.role == "actor" and item.kind == "logits"}

    servers = [plan(rows, where=["http://node07:8653"])["logits"] for rows in (8, 512)]
    assert servers[0] == servers[1]
