"""The matrix as data: ZeRO 2 and 3, rollouts recorded or not, all offloaded or nothing, LoRA or all weights.

DeepSpeed-Chat tests the same sixteen, with its hybrid engine in the place of recorded rollouts; here none is left out.
Each has one precision, so chosen that any four of the five settings meet in every way.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

STEPS = 5


@dataclass(frozen=True)
class Point:
    """One run of PPO: how its models are held, and how its rollouts are made."""

    zero_stage: int
    recorded: bool
    offloaded: bool
    lora: bool
    precision: str

    @property
    def name(self) -> str:
        """`z3_recorded_offload_lora_fp32`, without what is off."""
        flags = {"recorded": self.recorded, "offload": self.offloaded, "lora": self.lora}
        return "_".join([f"z{self.zero_stage}", *(flag for flag, on in flags.items() if on), self.precision])

    @property
    def plain(self) -> Point:
        """What it is to begin as: the same weights learning in the same precision, and nothing else of all this."""
        return Point(0, recorded=False, offloaded=False, lora=self.lora, precision=self.precision)

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "precision": self.precision,
            "engine.zero_stage": self.zero_stage,
            "engine.kernels.graph_capture": "auto" if self.recorded else "none",
            "engine.kernels.inference_weights": "none",  # of a CPU; layers in C could not be recorded
            "engine.offload": "all" if self.offloaded else "none",
            "lora.rank": 4 if self.lora else 0,
        }


POINTS = [
    Point(3 if third else 2, *flags, precision="fp32" if (third + sum(flags)) % 2 else "fp16")
    for third, *flags in product((False, True), repeat=4)
]
OFTEN = ("z2_recorded_offload_fp16",)
"""What the default suite runs; DeepSpeed-Chat leaves this one out."""
