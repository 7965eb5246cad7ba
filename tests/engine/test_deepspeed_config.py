"""DeepSpeed's configuration: user settings replace defaults; keys that rlhf manages are rejected or ignored."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from rlhf.config.schema import build_config
from rlhf.engine.deepspeed_config import (
    _RECIPE_KEYS,
    _ZERO_KEYS,
    build_deepspeed_config,
    check_deepspeed_keys,
    check_nvme,
    check_zero_stages,
)
from rlhf.errors import ConfigError
from rlhf.roles.roles import model_placements
from tests.engine.engines import build, train
from tests.helpers import assert_same_weights
from tests.in_process import make_placement


def built(accelerator, zero_stage=1, precision="fp32", **engine):
    placement = make_placement(zero_stage, **engine)
    return build_deepspeed_config(placement, accelerator, accelerator.precision(precision), 2, 1)


def check(settings):
    check_deepspeed_keys(build_config({"engine": {"deepspeed": settings}}))


def nested(path, value=1):
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def test_config_merges_user_settings_over_defaults(accelerator):
    own = {"zero_optimization": {"reduce_bucket_size": 1000}, "wall_clock_breakdown": True}
    merged, plain = built(accelerator, 3, deepspeed=own), built(accelerator, 3)
    assert merged["zero_optimization"] == plain["zero_optimization"] | own["zero_optimization"]
    assert merged["wall_clock_breakdown"] is True
    assert merged | {"zero_optimization": 0} == plain | {"wall_clock_breakdown": True, "zero_optimization": 0}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero_stage", [2, 3])
def test_reduce_bucket_is_no_larger_than_trained_parameters(accelerator, zero_stage, precision):
    """DeepSpeed allocates all of it: 1 GB in 16 bits, by its default, to train a few adapters."""
    engine = build(accelerator, zero_stage, precision)
    trained = engine.parameter_counts["trainable"]
    assert engine.engine.zero_reduce_bucket_size() == trained
    train(engine, steps=1)
    allocated = [bucket.buffer for bucket in engine.engine.optimizer.ipg_buckets.values()]
    assert all(len(buffer) in (0, trained) for buffer in allocated)  # below ZeRO-3 it is let go of after each step


def test_reduce_bucket_of_frozen_large_and_configured_models(accelerator):
    engine = build(accelerator, 2, deepspeed={"zero_optimization": {"reduce_bucket_size": 1234}})
    assert engine.engine.zero_reduce_bucket_size() == 1234
    assert "reduce_bucket_size" not in built(accelerator, 3)["zero_optimization"]
    assert make_placement(2).bucket(10**10) == DeepSpeedZeroConfig().reduce_bucket_size


def test_both_names_of_a_zero_setting_replace_the_default(accelerator):
    own = {"zero_optimization": {"max_live_parameters": 7, "stage3_max_reuse_distance": 8}}
    zero = built(accelerator, 3, deepspeed=own)["zero_optimization"]
    assert (zero["stage3_max_live_parameters"], zero["stage3_max_reuse_distance"]) == (7, 8)
    assert "max_live_parameters" not in zero


def test_defaults_of_the_accelerator_are_below_rlhfs_and_the_users(accelerator, monkeypatch):
    defaults = {"contiguous_gradients": False, "reduce_scatter": False, "stage": 0}
    monkeypatch.setattr(type(accelerator), "deepspeed_defaults", lambda self: defaults)
    zero = built(accelerator, 2, deepspeed={"zero_optimization": {"reduce_scatter": True}})["zero_optimization"]
    assert (zero["contiguous_gradients"], zero["reduce_scatter"], zero["stage"]) == (False, True, 2)
    assert build(accelerator, 2).engine.zero_contiguous_gradients() is False


def test_zero_stage_that_the_accelerator_refuses_is_an_error(accelerator, monkeypatch):
    def check_stage(zero_stage):
        check_zero_stages([make_placement(zero_stage)], accelerator)

    check_stage(3)

    def refuse(self, stage):
        return "it forgets what is sharded; use ZeRO-2" if stage == 3 else ""

    monkeypatch.setattr(type(accelerator), "refuse_zero_stage", refuse)
    check_stage(2)
    with pytest.raises(ConfigError, match=r"^engine.zero_stage: the sft model would use ZeRO 3, but it forgets what"):
        check_stage(3)


def test_host_gathers_no_weights_ahead_unless_set(accelerator, monkeypatch):
    def find_prefetch(**deepspeed):
        settings = {"deepspeed": {"zero_optimization": deepspeed}, "zero_persistence_threshold": 100_000}
        zero = built(accelerator, 3, **settings)["zero_optimization"]
        return zero.get("stage3_prefetch_bucket_size")

    assert (find_prefetch(), find_prefetch(prefetch_bucket_size=9)) == (0, 9)
    monkeypatch.setattr(type(accelerator), "host_device", lambda self: "another device")
    assert find_prefetch() is None  # DeepSpeed's default


def test_offload_buffers_may_be_set_and_turn_nothing_on(accelerator):
    own = {"zero_optimization": {"offload_param": {"buffer_count": 3}, "offload_optimizer": {"buffer_count": 7}}}
    check(own)
    zero = built(accelerator, 3, offload="parameters", deepspeed=own)["zero_optimization"]
    assert zero["offload_param"] == {"device": "cpu", "pin_memory": False, "buffer_count": 3}
    assert "offload_optimizer" not in zero


def test_offload_buffers_of_a_model_without_offloading_are_named(accelerator, caplog):
    own = {"zero_optimization": {"offload_param": {"buffer_count": 3}, "offload_optimizer": {"device": "cpu"}}}
    placement = make_placement(3, offload="none", deepspeed=own)
    build_deepspeed_config(placement, accelerator, accelerator.precision("fp32"), 2, 1, trained=1)
    (line,) = caplog.messages  # the other section is empty without the device, which rlhf sets
    assert line.startswith("engine.deepspeed.zero_optimization.offload_param: ignored, since nothing of the sft model")


@pytest.mark.parametrize(("recipe_key", "keys"), _RECIPE_KEYS.items())
def test_managed_key_is_rejected_with_the_recipe_key(recipe_key, keys):
    for key in keys:
        with pytest.raises(
            ConfigError, match=rf"^engine\.deepspeed\.{key}: is managed by rlhf; set {recipe_key} instead$"
        ):
            check({key: 1})


@pytest.mark.parametrize("path", [*_ZERO_KEYS, "param_persistence_threshold"])
def test_managed_zero_setting_is_ignored_with_a_warning(accelerator, path, caplog):
    value = {"stage": 1, "device": "cpu", "nvme_path": "/tmp", "pin_memory": True}.get(path.rpartition(".")[2], 7)
    check({"zero_optimization": nested(path, value)})
    (record,) = caplog.records
    key = path.replace("param_persistence", "stage3_param_persistence").replace("stage3_stage3", "stage3")
    assert record.getMessage() == (
        f"engine.deepspeed.zero_optimization.{key}: is managed by rlhf and ignored; set {_ZERO_KEYS[key]}"
    )
    plain, merged = (
        built(accelerator, 3, offload="all", nvme="/nvme", deepspeed=settings)
        for settings in ({}, {"zero_optimization": nested(path, "ignored")})
    )
    assert merged == plain


def test_written_keys_are_managed_or_free(accelerator):
    """Otherwise a user's value would replace a written one that other keys of the recipe decide."""
    free = {"reduce_bucket_size", *(f"stage3_max_{name}" for name in ("live_parameters", "reuse_distance"))}
    free |= {"stage3_prefetch_bucket_size", "offload_optimizer", "offload_param"}
    zero = built(accelerator, 3, "bf16", offload="all", nvme="/tmp", zero_persistence_threshold=0)["zero_optimization"]
    keys = set(zero) | {
        f"{section}.{name}" for section in ("offload_optimizer", "offload_param") for name in zero[section]
    }
    assert keys - set(_ZERO_KEYS) - free == set()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"wall_clock_breakdwn": True}, "unknown key 'wall_clock_breakdwn'; did you mean 'wall_clock_breakdown'?"),
        ({"zero_optimization": {"reduce_bucket": 1}}, "unknown key 'zero_optimization.reduce_bucket'"),
        ({"zero_optimization": {"reduce_bucket_size": 0}}, "zero_optimization.reduce_bucket_size: "),
        ({"zero_optimization": True}, "zero_optimization: "),
        ({"aio": {"blocksize": 1}}, "unknown key 'aio.blocksize'; did you mean 'block_size'?"),
        ({"prescale_gradients": "perhaps"}, "prescale_gradients: expected true or false, got 'perhaps'"),
    ],
)
def test_invalid_setting_is_rejected_in_one_line(settings, message):
    with pytest.raises(ConfigError) as caught:
        check(settings)
    assert str(caught.value).startswith(f"engine.deepspeed: {message}") and "\n" not in str(caught.value)


@pytest.mark.parametrize("offload", ["none", "optimizer", "parameters", "all"])
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_offload_sections_follow_engine_offload(accelerator, zero_stage, offload):
    zero = built(accelerator, zero_stage, offload=offload)["zero_optimization"]
    place = {"device": "cpu", "pin_memory": accelerator.pins_memory()}
    assert zero.get("offload_optimizer") == (place if offload in ("optimizer", "all") else None)
    assert zero.get("offload_param") == (place if offload in ("parameters", "all") and zero_stage == 3 else None)


def test_each_model_has_a_separate_nvme_folder(accelerator, tmp_path):
    config = build_config({"engine": {"zero_stage": 3, "offload": "all", "nvme": str(tmp_path)}})
    folders = []
    for placement in model_placements(config, "ppo").values():
        built_config = build_deepspeed_config(placement, accelerator, accelerator.precision("fp32"), 1, 1)
        offload = built_config["zero_optimization"]["offload_param"]
        assert offload["device"] == "nvme"
        folders.append(offload["nvme_path"])
    assert folders == [str(tmp_path / f"ppo-{name}") for name in ("actor", "critic", "reference", "reward")]


def test_nvme_needs_asynchronous_io(accelerator, monkeypatch, tmp_path):
    from deepspeed.accelerator import get_accelerator

    def set_builder(builder):
        monkeypatch.setattr(get_accelerator(), "create_op_builder", lambda name: builder, raising=False)

    nvme = build_config({"engine": {"nvme": str(tmp_path)}})
    for builder in (None, SimpleNamespace(NAME="async_io", is_compatible=lambda verbose=False: False)):
        set_builder(builder)
        check_nvme(build_config({}), accelerator)
        with pytest.raises(ConfigError, match=r"^engine.nvme: .*install libaio-dev, or remove engine.nvme"):
            check_nvme(nvme, accelerator)
    set_builder(SimpleNamespace(NAME="async_io", is_compatible=lambda verbose=False: True))
    check_nvme(nvme, accelerator)


# ZeRO++ (arXiv:2306.10209), through `engine.deepspeed`


@pytest.mark.slow
def test_weights_kept_twice_by_neighbours_change_no_result(rlhf, finished_run, tmp_path):
    zero = ("engine.zero_stage=3", "engine.deepspeed={zero_optimization: {zero_hpz_partition_size: 2}}")
    rlhf("--output", tmp_path / "run", "--ranks", 2, *(part for key in zero for part in ("--set", key)))
    for stage in ("sft", "reward"):
        assert_same_weights(tmp_path / "run" / stage / "model", finished_run / stage / "model", atol=2e-5)
