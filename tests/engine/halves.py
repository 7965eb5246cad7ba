"""fp16 with loss scaling in the process of a test: DeepSpeed's CPU accelerator refuses it, and computes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from accelerators import Precision


class FP16(Precision):
    """Its loss scale begins at 2^10, with which the tiny models here do not overflow, and is halved at once."""

    def deepspeed_config(self) -> dict[str, Any]:
        return {"fp16": super().deepspeed_config()["fp16"] | {"initial_scale_power": 10, "hysteresis": 1}}


PRECISION = FP16(torch.float16, "fp16", "a test's", loss_scaling=True)


@contextmanager
def accepted() -> Iterator[Precision]:
    """In this block DeepSpeed accepts fp16 on a CPU."""
    from deepspeed.accelerator import get_accelerator

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
        yield PRECISION
