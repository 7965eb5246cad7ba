"""Mistakes in how the models of a run are held, and what the error says of each; see `tests.preflight.mistakes`."""

from __future__ import annotations

from tests.preflight.bench import Bench, mistake, settings


@mistake
def an_optimizer_on_the_host_without_zero(bench: Bench) -> tuple[list[str], list[str]]:
    keys = {"engine__zero_stage": 1, "roles__critic__zero_stage": 0, "engine__offload": "optimizer"}
    return settings(**keys), [
        "engine.offload: optimizer",
        "the critic model uses ZeRO 0; set roles.critic.zero_s",
    ]


@mistake
def weights_on_the_host_below_zero_3(bench: Bench) -> tuple[list[str], list[str]]:
    return settings(roles__actor__offload="parameters"), ["roles.actor.offload: parameters", "set engine.zero_stage=3"]


@mistake
def a_setting_of_deepspeed_that_is_rlhf_s(bench: Bench) -> tuple[list[str], list[str]]:
    own = "{fp16: {enabled: true}}"
    return settings(engine__deepspeed=own), ["engine.deepspeed.fp16: is managed by rlhf", "set precision"]


@mistake
def a_setting_that_deepspeed_does_not_know(bench: Bench) -> tuple[list[str], list[str]]:
    own = "{zero_optimization: {reduce_bucket: 1}}"
    return settings(engine__deepspeed=own), ["zero_optimization.reduce_bucket'; did you mean 'reduce_bucket_size'"]


@mistake
def quantized_weights_of_a_model_that_is_trained_whole(bench: Bench) -> tuple[list[str], list[str]]:
    said = "roles.critic.frozen: int4: the critic model is trained in full"
    return settings(roles__critic__frozen="int4"), [said, "set roles.critic.lora_rank, or remove"]


@mistake
def quantized_weights_at_zero_3(bench: Bench) -> tuple[list[str], list[str]]:
    said = "engine.frozen: int8: quantized weights cannot be sharded, and the sft model"
    return settings(engine__frozen="int8", engine__zero_stage=3, lora__rank=4), [said, "set engine.zero_stage=2"]
