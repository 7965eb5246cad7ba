"""Gaudi's fused kernels, offered if the bridge has them: AdamW, gradient clipping and attention.

Each is adapted to the form of its operation (see `OPERATIONS`).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from accelerators import portable
from accelerators.accelerator import Accelerator
from accelerators.backends.hpu import info
from accelerators.errors import describe_error
from accelerators.types import KernelImpl, Support

ATTENTION = "gaudi_fused_sdpa"
"""FusedSDPA's name among transformers' attention implementations."""

_LACKING = ("position_bias", "s_aux", "softcap")
"""Features that transformers may pass to an attention implementation and FusedSDPA lacks."""


def runtime(module: str) -> Any:
    """Import a module of Gaudi's PyTorch bridge."""
    return importlib.import_module(f"{info.RUNTIME}.torch.{module}")


def _importable(module: str, name: str, reason: str) -> Callable[[Accelerator], Support]:
    def supported(accelerator: Accelerator) -> Support:
        try:
            getattr(runtime(module), name)
        except Exception as error:
            return Support(False, f"{info.RUNTIME}.torch.{module}.{name} cannot be imported ({describe_error(error)})")
        return Support(True, reason)

    return supported


# optimizer


def fused_adamw(accelerator: Accelerator) -> Any:
    """Return Gaudi's FusedAdamW, adapted to DeepSpeed's parameter groups; a constructor like torch's AdamW."""
    fused: Any = runtime("hpex.optimizers").FusedAdamW

    class FusedAdamW(fused):
        """Steps one group at a time, with a step count for each parameter as in torch's AdamW.

        ZeRO-3 passes one shard per step and leaves the other groups empty. Gaudi's class fails on an empty group and
        counts steps by group, so that the bias correction of a group with several shards would be wrong.
        """

        param_groups: list[dict[str, Any]]

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            """Update the parameters."""
            loss = closure() if closure else None
            groups = self.param_groups
            try:
                for group in groups:
                    with_gradients = [parameter for parameter in group["params"] if parameter.grad is not None]
                    if with_gradients:
                        group["step"] = int(self.state[with_gradients[0]].get("step", 0))
                        self.param_groups = [group]
                        super().step()
                        for parameter in with_gradients:
                            self.state[parameter]["step"] = torch.tensor(float(group["step"]))
            finally:
                self.param_groups = groups
            return loss

    return FusedAdamW


FUSED_ADAMW = KernelImpl(
    operation="adamw",
    name="habana-fused",
    factory=fused_adamw,
    supported=_importable("hpex.optimizers", "FusedAdamW", "one kernel for all parameters of a group"),
    priority=10,
)


# gradient clipping


def fused_clip_norm(accelerator: Accelerator) -> Any:
    """Return Gaudi's FusedClipNorm as a function like torch's `clip_grad_norm_`."""

    def clip(parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
        parameters = list(parameters)
        if not parameters:
            return torch.zeros(())
        clipper = _clipper(runtime("hpex.normalization").FusedClipNorm, float(max_norm), parameters[0].dtype)
        total: torch.Tensor = clipper.clip_norm(parameters)
        return total.reshape(())

    return clip


@functools.cache
def _clipper(fused: Any, max_norm: float, dtype: torch.dtype) -> Any:
    """Return one object for all steps: its construction copies `max_norm` to the device, in the parameter's dtype."""
    return fused([torch.empty(0, dtype=dtype)], max_norm)


FUSED_CLIP_NORM = KernelImpl(
    operation="clip_grad_norm",
    name="habana-fused",
    factory=fused_clip_norm,
    supported=_importable("hpex.normalization", "FusedClipNorm", "norm and scaling of all gradients in one kernel"),
    priority=10,
)


# attention


def fused_sdpa(accelerator: Accelerator) -> str:
    """Register Gaudi's FusedSDPA with transformers and return its name."""
    fused = runtime("hpex.kernels").FusedSDPA

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **features: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend as transformers calls it.

        query [B, H, T, D], key and value [B, G, S, D] (the kernel itself groups the H heads over G), mask
        [B, 1 or H, T, S] -> [B, T, H, D].
        """
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            lowest = torch.finfo(query.dtype).min
            attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, lowest)
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        is_causal = is_causal and attention_mask is None and query.shape[2] > 1
        output = fused.apply(query, key, value, attention_mask, dropout, is_causal, scaling)
        return output.transpose(1, 2).contiguous(), None

    return portable.register_attention(ATTENTION, attend, _LACKING)


FUSED_SDPA = KernelImpl(
    operation="attention",
    name="habana-fused",
    factory=fused_sdpa,
    supported=_importable("hpex.kernels", "FusedSDPA", "attention in one kernel, keys and values grouped as they are"),
    priority=10,
    refuses=portable.missing_features(_LACKING),
)


FUSED = (FUSED_ADAMW, FUSED_CLIP_NORM, FUSED_SDPA)
