"""Gaudi's fused kernels, offered if the bridge has them: AdamW, gradient clipping and attention.

Each is adapted to the form of its operation (see `OPERATIONS`).
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from accelerators import portable
from accelerators.accelerator import Accelerator
from accelerators.backends.hpu import info
from accelerators.errors import AcceleratorError, describe_error
from accelerators.types import KernelImpl, Support

ATTENTION = "gaudi_fused_sdpa"
"""FusedSDPA's name among transformers' attention implementations."""

_LACKING = ("position_bias", "softcap")
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

        ZeRO-3 passes one shard per step and leaves the other groups empty. Gaudi's class counts steps by group, so that
        the bias correction of a group with several shards would be wrong; before release 1.19 it failed on an empty
        group. It adds eps before the correction, as AdamW of transformers did: the first steps are smaller than torch's
        for gradients near eps.
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
    lacking, before_sink = find_lacking(), _defaults_before_sink(fused)

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        s_aux: torch.Tensor | None = None,
        **features: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend as transformers calls it.

        query [B, H, T, D], key and value [B, G, S, D] (the kernel itself groups the H heads over G), mask
        [B, 1 or H, T, S], s_aux [H] (logits of a column without a value) -> [B, T, H, D].

        Padding and windows are in the mask, which takes 2 T S bytes a row, and not in the kernel's `valid_seq_len` and
        `window_size`: nobody has tried yet which outputs and gradients these give to rows of padding.
        """
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            lowest = torch.finfo(query.dtype).min
            attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, lowest)
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        is_causal = is_causal and attention_mask is None and query.shape[2] > 1
        if s_aux is not None and s_aux.requires_grad and torch.is_grad_enabled():
            raise AcceleratorError(
                f"attention {ATTENTION}: Gaudi's kernel gives sinks no gradient; train adapters (lora.rank) or set "
                "engine.kernels to {attention: eager}"
            )
        sink = () if s_aux is None else (*before_sink, s_aux)
        output = fused.apply(query, key, value, attention_mask, dropout, is_causal, scaling, *sink)
        return output.transpose(1, 2).contiguous(), None

    return portable.register_attention(ATTENTION, attend, lacking)


def find_lacking() -> tuple[str, ...]:
    """Return the features that the installed FusedSDPA lacks; releases differ in its arguments."""
    try:
        has_sink = bool(_defaults_before_sink(runtime("hpex.kernels").FusedSDPA))
    except Exception:  # the operation's check says why it cannot be imported
        has_sink = False
    return _LACKING if has_sink else (*_LACKING, "s_aux")


def _defaults_before_sink(fused: Any) -> tuple[Any, ...]:
    """Return the defaults of the arguments between `scale` and `sink`; empty if there is no `sink`."""
    try:
        arguments = inspect.signature(fused.forward).parameters
    except (AttributeError, ValueError):  # an older one, or one without a signature
        return ()
    names = list(arguments)
    if not {"scale", "sink"} <= arguments.keys():
        return ()
    between = names[names.index("scale") + 1 : names.index("sink")]
    # Without recomputation the kernel ignores sinks.
    defaults = tuple(True if name == "recompute_mode" else arguments[name].default for name in between)
    return () if inspect.Parameter.empty in defaults else defaults


def _refuses(model: Any) -> str:
    return portable.missing_features(find_lacking())(model)


FUSED_SDPA = KernelImpl(
    operation="attention",
    name="habana-fused",
    factory=fused_sdpa,
    supported=_importable("hpex.kernels", "FusedSDPA", "attention in one kernel, keys and values grouped as they are"),
    priority=10,
    refuses=_refuses,
)


FUSED = (FUSED_ADAMW, FUSED_CLIP_NORM, FUSED_SDPA)
