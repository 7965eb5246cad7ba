"""What DeepSpeed is told: the user's own settings come last, and those that rlhf decides are refused."""

from __future__ import annotations

import pytest
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from rlhf.config.schema import build_config
from rlhf.engine import deepspeed_config
from rlhf.engine.deepspeed_config import MANAGED_KEYS, check_deepspeed_keys, check_nvme
from rlhf.errors import ConfigError
from rlhf.roles.roles import model_placements
from tests.engine.test_engine import build, train
from tests.in_process import make_placement


def told(accelerator, zero_stage=1, precision="fp32", **engine):
    placement = make_placement(zero_stage, **engine)
    return deepspeed_config.build_deepspeed_config(placement, accelerator, accelerator.precision(precision), 2, 1)


def refusal(own):
    with pytest.raises(ConfigError) as found:
        check_deepspeed_keys(build_config({"engine": {"deepspeed": own}}))
    return str(found.value)


def nested(path, value=1):
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def test_settings_of_the_users_own_come_last_and_others_stay(accelerator):
    own = {"zero_optimization": {"reduce_bucket_size": 1000}, "wall_clock_breakdown": True}
    found, plain = told(accelerator, 3, deepspeed=own), told(accelerator, 3)
    assert found["zero_optimization"] == plain["zero_optimization"] | own["zero_optimization"]
    assert found["wall_clock_breakdown"] is True
    assert found | {"zero_optimization": 0} == plain | {"wall_clock_breakdown": True, "zero_optimization": 0}


def test_deepspeed_takes_them(accelerator, monkeypatch):
    engine = build(accelerator, 2, deepspeed={"zero_optimization": {"reduce_bucket_size": 1234}})
    assert engine.engine.zero_reduce_bucket_size() == 1234


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_the_bucket_for_gradients_is_no_larger_than_what_is_trained(accelerator, zero_stage, precision):
    """DeepSpeed allocates all of it: 1 GB in 16 bits, by its default, to train a few adapters."""
    engine = build(accelerator, zero_stage, precision)
    trained = engine.parameter_counts["trainable"]
    assert engine.engine.zero_reduce_bucket_size() == trained
    train(engine, steps=1)
    allocated = [bucket.buffer for bucket in engine.engine.optimizer.ipg_buckets.values()]
    assert all(len(buffer) in (0, trained) for buffer in allocated)  # below ZeRO-3 it is let go of after each step


def test_a_frozen_model_has_no_bucket_and_a_large_one_deepspeeds(accelerator):
    assert "reduce_bucket_size" not in told(accelerator, 3)["zero_optimization"]
    assert make_placement(2).bucket(10**10) == DeepSpeedZeroConfig().reduce_bucket_size


def test_either_name_of_a_setting_replaces_the_one_that_is_set(accelerator):
    own = {"zero_optimization": {"max_live_parameters": 7, "stage3_max_reuse_distance": 8}}
    zero = told(accelerator, 3, deepspeed=own)["zero_optimization"]
    assert (zero["stage3_max_live_parameters"], zero["stage3_max_reuse_distance"]) == (7, 8)
    assert "max_live_parameters" not in zero


def test_buffers_of_what_is_offloaded_may_be_set_and_turn_nothing_on(accelerator):
    own = {"zero_optimization": {"offload_param": {"buffer_count": 3}, "offload_optimizer": {"buffer_count": 7}}}
    check_deepspeed_keys(build_config({"engine": {"deepspeed": own}}))
    zero = told(accelerator, 3, offload="parameters", deepspeed=own)["zero_optimization"]
    assert zero["offload_param"] == {"device": "cpu", "pin_memory": False, "buffer_count": 3}
    assert "offload_optimizer" not in zero


@pytest.mark.parametrize("path", MANAGED_KEYS)
def test_what_rlhf_decides_is_refused_with_what_to_do_instead(path):
    assert refusal(nested(path)) == f"engine.deepspeed.{path}: is decided by rlhf; {MANAGED_KEYS[path]}"


def test_the_other_name_of_what_rlhf_decides_is_refused_too():
    assert "engine.zero_persistence_threshold" in refusal({"zero_optimization": {"param_persistence_threshold": 5}})


def test_what_rlhf_tells_deepspeed_is_its_own(accelerator):
    """Otherwise the user could set it as well."""
    free = {"zero_optimization", *(f"stage3_{name}" for name in ("max_live_parameters", "max_reuse_distance"))}
    free |= {"stage3_prefetch_bucket_size", "offload_optimizer", "offload_param"}
    for precision in ("fp32", "bf16"):
        try:
            found = told(accelerator, 3, precision, offload="all", nvme="/tmp")
        except Exception:  # no bf16 here
            continue
        zero = found["zero_optimization"]
        keys = set(found) | {f"zero_optimization.{name}" for name in zero}
        keys |= {
            f"zero_optimization.{part}.{name}" for part in ("offload_optimizer", "offload_param") for name in zero[part]
        }
        assert {key for key in keys - set(MANAGED_KEYS) if key.rpartition(".")[2] not in free} == set()


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"wall_clock_breakdwn": True}, "unknown key 'wall_clock_breakdwn'; did you mean 'wall_clock_breakdown'?"),
        (
            {"zero_optimization": {"reduce_bucket": 1}},
            "unknown key 'zero_optimization.reduce_bucket'; did you mean 'reduce_bucket_size'?",
        ),
        (
            {"zero_optimization": {"reduce_bucket_size": "large"}},
            "zero_optimization.reduce_bucket_size: expected a whole number, got 'large'",
        ),
        (
            {"zero_optimization": {"reduce_bucket_size": 0}},
            "zero_optimization.reduce_bucket_size: expected a number above 0, got 0",
        ),
        ({"zero_optimization": True}, "zero_optimization: expected keys and values, got true"),
        ({"aio": {"blocksize": 1}}, "unknown key 'aio.blocksize'; did you mean 'block_size'?"),
        ({"prescale_gradients": "perhaps"}, "prescale_gradients: expected true or false, got 'perhaps'"),
    ],
)
def test_what_deepspeed_would_not_take_is_one_line(own, said):
    assert refusal(own) == f"engine.deepspeed: {said}"


@pytest.mark.parametrize("offload", ["none", "optimizer", "parameters", "all"])
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_sections_of_offload(accelerator, zero_stage, offload):
    zero = told(accelerator, zero_stage, offload=offload)["zero_optimization"]
    place = {"device": "cpu", "pin_memory": accelerator.pins_memory()}
    assert zero.get("offload_optimizer") == (place if offload in ("optimizer", "all") else None)
    assert zero.get("offload_param") == (place if offload in ("parameters", "all") and zero_stage == 3 else None)


# a disk


def test_every_model_has_a_folder_of_its_own_on_the_disk(accelerator, tmp_path):
    config = build_config({"engine": {"zero_stage": 3, "offload": "all", "nvme": str(tmp_path)}})
    folders = []
    for placement in model_placements(config, "ppo").values():
        made = deepspeed_config.build_deepspeed_config(placement, accelerator, accelerator.precision("fp32"), 1, 1)
        found = made["zero_optimization"]["offload_param"]
        assert found["device"] == "nvme"
        folders.append(found["nvme_path"])
    assert folders == [str(tmp_path / f"ppo-{name}") for name in ("actor", "critic", "reference", "reward")]


class Builder:
    NAME = "async_io"

    def __init__(self, compatible):
        self.compatible = compatible

    def is_compatible(self, verbose=False):
        return self.compatible


@pytest.fixture
def builder(monkeypatch):
    from deepspeed.accelerator import get_accelerator

    def answers(compatible):
        found = None if compatible is None else Builder(compatible)
        monkeypatch.setattr(get_accelerator(), "create_op_builder", lambda name: found, raising=False)

    return answers


@pytest.mark.parametrize("compatible", [None, False])
def test_without_asynchronous_io_a_disk_is_refused(accelerator, builder, tmp_path, compatible):
    builder(compatible)
    with pytest.raises(ConfigError, match=r"engine.nvme: .* want of libaio .*install them .*or leave engine.nvme out"):
        check_nvme(build_config({"engine": {"nvme": str(tmp_path)}}), accelerator)


def test_a_disk_needs_a_folder_that_is_there(accelerator, builder, tmp_path):
    builder(True)
    check_nvme(build_config({"engine": {"nvme": str(tmp_path)}}), accelerator)
    with pytest.raises(ConfigError, match=r"engine.nvme: .*absent is no folder to write to; make it"):
        check_nvme(build_config({"engine": {"nvme": str(tmp_path / "absent")}}), accelerator)


def test_without_a_disk_nothing_is_asked(accelerator, builder):
    builder(None)
    check_nvme(build_config({}), accelerator)
