"""DeepSpeed's configuration of one model: its ZeRO stage, what is offloaded, and the user's own settings last.

`check_deepspeed_keys` refuses, before a run, settings of `engine.deepspeed` that rlhf decides itself, and settings that
DeepSpeed does not know.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import BaseModel, ConfigDict, ValidationError

from rlhf.config.schema import Config
from rlhf.config.validation_errors import format_validation_error
from rlhf.engine import distributed
from rlhf.errors import ConfigError
from rlhf.reporting import verbosity
from rlhf.roles.roles import ModelPlacement

if TYPE_CHECKING:
    from accelerators import Accelerator, Precision

_BATCH = "the batch is that of the stage; set batch_size and micro_batch_size of sft, reward, dpo or ppo"
_OPTIMIZER = "set the stage's own: sft.optimizer, reward.optimizer, ppo.optimizer or ppo.critic_optimizer"
_PRECISION = "the numbers to compute in are the run's; set precision"
_SUMS = "rlhf adds the gradients of bf16 up in float32; leave it out, or set precision=fp32"
_METRICS = "rlhf records a run's numbers in its own folder; leave it out, and see <stage>.log_every"
_CHECKPOINT = "rlhf writes the checkpoints; set <stage>.checkpoint_every"
_NOT_USED = "rlhf does without; leave it out"
_OFFLOAD = "set engine.offload, and engine.nvme for a disk"

MANAGED_KEYS: Mapping[str, str] = {
    "train_batch_size": _BATCH,
    "train_micro_batch_size_per_gpu": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "managed_gradient_accumulation": _BATCH,
    "optimizer": _OPTIMIZER,
    "scheduler": _OPTIMIZER,
    "gradient_clipping": f"{_OPTIMIZER}, its max_grad_norm",
    "gradient_allreduce_op": "losses arrive divided by the global batch; leave it out",
    "zero_allow_untested_optimizer": "the optimizer is the accelerator's choice; leave it out",
    "zero_force_ds_cpu_optimizer": "the optimizer is the accelerator's choice; leave it out",
    "fp16": _PRECISION,
    "bf16": _PRECISION,
    "bfloat16": _PRECISION,
    "amp": _PRECISION,
    "torch_autocast": _PRECISION,
    "data_types": _SUMS,
    "communication_data_type": _SUMS,
    "seq_parallel_communication_data_type": _SUMS,
    "steps_per_print": _METRICS,
    "tensorboard": _METRICS,
    "wandb": _METRICS,
    "comet": _METRICS,
    "csv_monitor": _METRICS,
    "monitor_config": _METRICS,
    "checkpoint": _CHECKPOINT,
    "datastates": _CHECKPOINT,
    "activation_checkpointing": "set model.gradient_checkpointing, or that of one of roles",
    "tensor_parallel": _NOT_USED,
    "expert_parallel": _NOT_USED,
    "sequence_parallel_size": _NOT_USED,
    "pipeline": _NOT_USED,
    "inference": _NOT_USED,
    "hybrid_engine": _NOT_USED,
    "autotuning": _NOT_USED,
    "elasticity": _NOT_USED,
    "compile": _NOT_USED,
    "compression_training": _NOT_USED,
    "weight_quantization": _NOT_USED,
    "data_efficiency": "rows and their order are rlhf's; leave it out",
    "dataloader_drop_last": "rows and their order are rlhf's; leave it out",
    "zero_optimization.stage": "set engine.zero_stage, or that of one of roles",
    "zero_optimization.stage3_param_persistence_threshold": "set engine.zero_persistence_threshold",
    "zero_optimization.cpu_offload": _OFFLOAD,
    "zero_optimization.cpu_offload_param": _OFFLOAD,
    "zero_optimization.cpu_offload_use_pin_memory": _OFFLOAD,
    **{
        f"zero_optimization.{section}.{key}": f"{_OFFLOAD}; of these sections, sizes and numbers of buffers may be set"
        for section, keys in {
            "offload_optimizer": ("device", "nvme_path", "pin_memory", "ratio", "super_offload", "cpuadam_cores_perc"),
            "offload_param": ("device", "nvme_path", "pin_memory"),
        }.items()
        for key in keys
    },
    "zero_optimization.zenflow": "updates that come late change what is learned; leave it out",
    "zero_optimization.compute_grad_norm": "rlhf clips by the norm and records it; leave it out",
    "zero_optimization.elastic_checkpoint": _CHECKPOINT,
    "zero_optimization.legacy_stage1": _NOT_USED,
}
"""Settings of DeepSpeed that follow from rlhf's own keys, each with what to do instead."""


class _AsyncIO(BaseModel):
    """Section `aio`, for which DeepSpeed 0.19 has no schema."""

    model_config = ConfigDict(extra="forbid")
    block_size: int = 1
    queue_depth: int = 1
    intra_op_parallelism: int = 1
    single_submit: bool = False
    overlap_events: bool = True
    use_gds: bool = False


class _Free(BaseModel):
    """The sections that the user may set; DeepSpeed 0.19 has schemas for some, and none for the whole."""

    model_config = ConfigDict(extra="forbid")
    zero_optimization: DeepSpeedZeroConfig = DeepSpeedZeroConfig()
    aio: _AsyncIO = _AsyncIO()
    comms_logger: CommsLoggerConfig = CommsLoggerConfig()
    flops_profiler: dict[str, Any] = {}
    timers: dict[str, Any] = {}
    prescale_gradients: bool = False
    gradient_predivide_factor: float = 1.0
    disable_allgather: bool = False
    disable_python_gc: bool = False
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    dump_state: bool = False
    log_level: Literal["debug", "info", "warning", "error", "critical"] = "warning"


def check_deepspeed_keys(config: Config) -> None:
    """Raise `ConfigError` where `engine.deepspeed` says what rlhf decides, or what DeepSpeed does not know."""
    own = config.engine.deepspeed
    for path in _paths(_named_as_deepspeed_writes(own)):
        if reason := MANAGED_KEYS.get(path):
            raise ConfigError(f"engine.deepspeed.{path}: is decided by rlhf; {reason}")
    try:
        _Free.model_validate(own)
    except ValidationError as error:
        raise ConfigError(format_validation_error(error, _Free, own, "engine.deepspeed")) from error


def check_nvme(config: Config, accelerator: Accelerator) -> None:
    """Raise `ConfigError` where `engine.nvme` cannot be used: DeepSpeed's asynchronous I/O or the folder is missing."""
    folder = config.engine.nvme
    if folder is None:
        return
    with verbosity.suppress_stdout():  # it compiles a program, and its compiler complains aloud
        ready = accelerator.deepspeed_operator("AsyncIOBuilder")
    if not ready:
        raise ConfigError(
            "engine.nvme: DeepSpeed's asynchronous I/O cannot be built here, for want of libaio and its headers; "
            "install them (libaio-dev), or leave engine.nvme out, and what is offloaded stays in the host's memory"
        )
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise ConfigError(f"engine.nvme: {folder} is no folder to write to; make it, or name one on a fast disk")


def build_deepspeed_config(
    placement: ModelPlacement,
    accelerator: Accelerator,
    precision: Precision,
    micro_batch_size: int,
    accumulation: int,
    max_grad_norm: float | None = None,
    trained: int = 0,
) -> dict[str, Any]:
    """DeepSpeed's configuration for one model.

    Args:
        trained: how many numbers of it; 0: it is frozen.
    """
    ours = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": _zero(placement, accelerator, trained),
        # AdamW of the accelerator's choice, on the host too.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        **({"gradient_clipping": max_grad_norm} if max_grad_norm else {}),
        **_float32_sums(placement, precision, accumulation),
        **_numbers(placement, precision),
    }
    own = _named_as_deepspeed_writes(placement.engine.deepspeed)
    for section in ("offload_optimizer", "offload_param"):  # a section alone would turn it on
        if section not in ours["zero_optimization"]:
            own.get("zero_optimization", {}).pop(section, None)
    return _merged(ours, own)


def _zero(placement: ModelPlacement, accelerator: Accelerator, trained: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": placement.zero_stage}
    if trained:
        zero["reduce_bucket_size"] = placement.bucket(trained)
    place: dict[str, Any] = {"device": str(accelerator.host_device()), "pin_memory": accelerator.pins_memory()}
    if placement.zero_stage == 3 and placement.engine.nvme is not None:
        # DeepSpeed numbers a model's files anew for each model.
        folder = placement.engine.nvme / f"{placement.stage}-{placement.role.name}"
        place |= {"device": "nvme", "nvme_path": str(folder)}
    if placement.offloads_optimizer:
        zero["offload_optimizer"] = place
    if placement.zero_stage < 3:
        return zero
    if placement.offloads_parameters:
        zero["offload_param"] = dict(place)
    threshold = zero["stage3_param_persistence_threshold"] = placement.engine.zero_persistence_threshold
    if threshold == 0:  # shard all of a small model: keep nothing gathered
        names = ("max_live_parameters", "max_reuse_distance", "prefetch_bucket_size")
        zero |= {f"stage3_{name}": 0 for name in names}
    return zero


def _numbers(placement: ModelPlacement, precision: Precision) -> dict[str, Any]:
    """What to compute in, and how the loss is scaled where gradients could vanish."""
    found, window = precision.deepspeed_config(), placement.engine.loss_scale_window
    if precision.loss_scaling and window is not None:
        found[precision.name] = {**found[precision.name], "loss_scale_window": window}
    return found


def _float32_sums(placement: ModelPlacement, precision: Precision, accumulation: int) -> dict[str, Any]:
    """Add bf16 gradients of ranks in float32, and those of micro-batches too where gradients are sharded (ZeRO 2, 3).

    With 8 bits, every part that is added costs digits. Below ZeRO 2, DeepSpeed 0.19 adds micro-batches up in the
    weights' own type (0), or holds float32 gradients of the whole model on every rank (1).
    """
    if precision.name != "bf16":
        return {}
    over_ranks = {"communication_data_type": "fp32"} if distributed.world().size > 1 else {}
    if accumulation == 1 or placement.zero_stage < 2:
        return over_ranks
    return over_ranks | {"data_types": {"grad_accum_dtype": "fp32"}}


def _named_as_deepspeed_writes(own: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which ZeRO's settings have those of their two names that are used here (`stage3_...`)."""
    named = copy.deepcopy(dict(own))
    zero = named.get("zero_optimization")
    if isinstance(zero, Mapping):
        aliases = {name: field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()}
        named["zero_optimization"] = {aliases.get(name, name): value for name, value in zero.items()}
    return named


def _paths(values: Mapping[str, Any], before: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield before + name
        if isinstance(value, Mapping):
            yield from _paths(value, f"{before}{name}.")


def _merged(ours: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in own.items():
        below = ours.get(name)
        ours[name] = _merged(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
    return ours
