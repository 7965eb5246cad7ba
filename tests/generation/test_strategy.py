"""Impossible values of `ppo.generation_weights` and `ppo.tensor_parallel` are refused, with a possible one."""

import pytest

from rlhf.config.schema import build_config
from rlhf.errors import ConfigError
from rlhf.generation import hybrid_engine
from rlhf.generation.hybrid_engine import (
    GenerationMemory,
    _resolve_group_size,
    check_generation,
    check_generation_model,
    choose_rank_group,
)
from tests.generation.test_decoder import build
from tests.helpers import llama
from tests.trainers.test_lora import build as trained

LAYERWISE = "use layerwise, or whole if a device has memory for it"


def configuration(zero_stage=3, **ppo):
    return build_config({"engine": {"zero_stage": zero_stage}, "ppo": ppo})


def refusal(function, *arguments):
    with pytest.raises(ConfigError) as caught:
        function(*arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("zero_stage", "ranks", "ppo", "words"),
    [
        (2, 2, {"generation_weights": "layerwise"}, ["generation_weights: layerwise", "ZeRO 2", "zero_stage=3"]),
        (2, 2, {"tensor_parallel": 2}, ["ppo.tensor_parallel: 2", "whole on every rank", "zero_stage=3"]),
        (3, 2, {"tensor_parallel": 2, "generation_weights": "whole"}, ["got whole", "change one of them"]),
        (2, 1, {"generation_weights": "tensor_parallel"}, ["two ranks or more", "add --ranks N"]),
        (
            3,
            1,
            {"tensor_parallel": 2},
            ["ppo.tensor_parallel: 2 needs two ranks or more, got 1; add --ranks N, or remove it"],
        ),
        (
            3,
            2,
            {"tensor_parallel": 2, "generation_exact": True},
            ["ppo.generation_exact: split layers", "=auto without"],
        ),
        (3, 8, {"tensor_parallel": 3}, ["8 ranks cannot be split into groups of 3; use 2"]),
        (3, 2, {"tensor_parallel": 4}, ["2 ranks cannot be split into groups of 4; use 2"]),
    ],
)
def test_settings_that_do_not_go_together(zero_stage, ranks, ppo, words):
    line = refusal(check_generation, configuration(zero_stage, **ppo), ranks)
    assert [word for word in words if word not in line] == [], line


def test_error_for_quantized_weights_suggests_sharding_too():
    quantized = {"engine": {"zero_stage": 2, "frozen": "int8"}, "lora": {"rank": 4}}
    line = refusal(check_generation, build_config(quantized | {"ppo": {"generation_weights": "layerwise"}}), 2)
    assert line.endswith("; remove it, or set roles.actor.zero_stage=3")


def test_settings_that_do():
    check_generation(configuration(0, generation_weights="whole", generation_batch_size=99), 1)
    check_generation(configuration(3, generation_weights="layerwise"), 1)
    check_generation(configuration(3, generation_weights="tensor_parallel", tensor_parallel=2), 4)
    check_generation(build_config({"roles": {"actor": {"zero_stage": 3}}, "ppo": {"tensor_parallel": 2}}), 2)


@pytest.mark.parametrize(
    ("model", "ranks", "ppo", "line"),
    [
        (
            lambda: llama(60),
            4,
            {"tensor_parallel": 4},
            "ppo.tensor_parallel: 2 key heads cannot be divided among 4 ranks; use 2",
        ),
        (
            lambda: llama(60),
            3,
            {"tensor_parallel": 3},
            "ppo.tensor_parallel: 4 heads cannot be divided among 3 ranks; remove it, and set "
            "ppo.generation_weights=layerwise",
        ),
        (
            lambda: llama(60, intermediate_size=49),
            2,
            {},
            "ppo.generation_weights: model.layers.0.mlp.gate_proj has 49 features, ",
        ),
        (
            lambda: build("gpt2"),
            2,
            {},
            f"ppo.generation_weights: there is no plan for splitting the layers of gpt2; {LAYERWISE}",
        ),
    ],
)
def test_models_that_cannot_be_split(model, ranks, ppo, line):
    settings = configuration(generation_weights="tensor_parallel", **ppo).ppo
    assert refusal(check_generation_model, model(), settings, ranks).startswith(line)
    check_generation_model(model(), configuration().ppo, ranks)


def test_experts_are_not_split():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=60, num_key_value_heads=2, num_local_experts=2, **sizes))
    line = refusal(check_generation_model, model, configuration(generation_weights="tensor_parallel").ppo, 2)
    assert "mixtral has layers that rlhf cannot split (moe_tp_experts" in line


def test_plan_with_misfitting_parts_is_refused_before_the_run():
    """Its norms over each head are not in transformers' plan."""
    from transformers import CohereConfig, CohereForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    options = {"num_key_value_heads": 4, "use_qk_norm": True, "use_cache": False}
    model = CohereForCausalLM(CohereConfig(vocab_size=60, **options, **sizes))
    line = refusal(check_generation_model, model, configuration(generation_weights="tensor_parallel").ppo, 2)
    assert "the layers of cohere do not fit together when they are split; use layerwise" in line


def test_below_zero_3_each_rank_generates_alone(accelerator):
    lines = []
    assert type(choose_rank_group(trained(accelerator, 2), configuration(2), say=lines.append)).__name__ == "SingleRank"
    assert not lines


def test_split_that_is_not_needed_is_named(accelerator, monkeypatch):
    memory = GenerationMemory(weights=8, unpacked=8, cache=1, logits=1, used=3, total=100)
    monkeypatch.setattr(hybrid_engine, "_estimate_memory", lambda *_: memory)
    lines = []
    group = choose_rank_group(trained(accelerator, 3), configuration(3, tensor_parallel=2), say=lines.append)
    assert type(group).__name__ == "SingleRank"
    (line,) = lines
    assert "ppo.tensor_parallel is not used in rollouts, because whole weights fit; set ppo.generation_weights" in line


@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (4, 4), (8, 4), (6, 2)])
def test_largest_group_that_divides_ranks_and_heads_is_taken(ranks, size):
    assert _resolve_group_size(llama(60, num_key_value_heads=4), configuration().ppo, ranks) == size
    assert _resolve_group_size(llama(60), configuration().ppo, ranks) == 2  # it has two heads of keys


def test_group_needs_its_share_of_weights_and_the_logits_of_all_its_rows():
    """Two ranks: 80 / 2 + 10 + 2 x 5 next to 30 are 90, nine tenths of 100; alone 80 + 10 + 5 next to 30 are 125."""
    memory = GenerationMemory(weights=80, unpacked=80, cache=10, logits=5, used=30, total=100)
    assert memory.fits(2) and not memory.fits(1)
    assert not memory._replace(total=99).fits(2)
    assert memory._replace(total=139).fits(1) and not memory._replace(total=138).fits(1)
    needs = "whole weights of 80.0 GiB, a cache of 10.0 GiB and logits of 5.0 GiB do not fit into 90% of 100.0 GiB"
    in_gib = GenerationMemory(*(size * 2**30 for size in memory))
    assert str(in_gib) == f"{needs}, of which 30.0 GiB is in use"
