"""ZeRO++ (arXiv:2306.10209), DeepSpeed's savings between ranks at ZeRO-3, which `engine.deepspeed` may ask for.

Its settings flow in; what cannot be is refused before anything is loaded. `check` needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf.config.schema import EVERY_STAGE, Config
from rlhf.errors import ConfigError
from rlhf.reporting import verbosity
from rlhf.roles.roles import model_placements

if TYPE_CHECKING:
    from accelerators import Accelerator

PARTS = "zero_hpz_partition_size"
"""hpZ: neighbouring ranks hold all weights among them, so that backward passes gather within a machine."""

QUANTIZED = ("zero_quantized_weights", "zero_quantized_gradients")
"""qwZ and qgZ: what ranks exchange has 8 or 4 bits."""

FROZEN = "zero_quantized_nontrainable_weights"
"""MixZ++: frozen weights are kept and gathered in 8 bits."""


def check(config: Config, ranks: int) -> None:
    """Raise `ConfigError` where ZeRO++ is asked for and does nothing, or what it cannot do."""
    asked = _asked(config)
    for key, value in asked.items():
        what = f"engine.deepspeed.zero_optimization.{key}"
        if key == FROZEN:
            raise ConfigError(
                f"{what}: DeepSpeed 0.19 quantizes weights as it shards them, before adapters freeze any, and fails in "
                "bf16 and on one rank; leave it out, or set engine.frozen=int8 and engine.zero_stage=2"
            )
        if all(
            placement.zero_stage < 3 for stage in EVERY_STAGE for placement in model_placements(config, stage).values()
        ):
            raise ConfigError(
                f"{what}: is for ZeRO-3, and no model is held so; set engine.zero_stage=3, or leave it out"
            )
        if ranks == 1:
            raise ConfigError(
                f"{what}: one rank exchanges nothing with others; leave it out, or start more with --ranks"
            )
        if key == PARTS and ranks % value:
            fitting = ", ".join(str(size) for size in range(2, ranks + 1) if ranks % size == 0)
            raise ConfigError(
                f"{what}: {value} does not divide the {ranks} ranks; set one of {fitting}, or leave it out"
            )


def check_operators(config: Config, accelerator: Accelerator) -> None:
    """Raise `ConfigError` where DeepSpeed's quantizer is asked for, and cannot be built for the device."""
    for key in QUANTIZED:
        if key not in _asked(config):
            continue
        with verbosity.suppress_stdout():  # it looks for a compiler, and complains aloud
            ready = accelerator.deepspeed_operator("QuantizerBuilder")
        if not ready:
            raise ConfigError(f"engine.deepspeed.zero_optimization.{key}: {ready.reason}; leave it out")


def _asked(config: Config) -> dict[str, Any]:
    """The settings of ZeRO++ that are on."""
    own = config.engine.deepspeed.get("zero_optimization")
    found = own if isinstance(own, dict) else {}
    on = {key: found[key] for key in (PARTS, *QUANTIZED, FROZEN) if found.get(key)}
    return {key: value for key, value in on.items() if key != PARTS or (isinstance(value, int) and value > 1)}
