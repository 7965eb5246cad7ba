"""Implementations that run on any device with plain PyTorch.

They are every backend's defaults; a backend or a plugin offers something faster with a higher priority. The last choice
for attention is `eager`, which every architecture has. Functions for other implementations of attention are here too.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

from accelerators.errors import AUTHORS, AcceleratorError, PluginError
from accelerators.types import KernelImpl, Support


def adamw(accelerator: object) -> Any:
    """Return torch's AdamW over lists of tensors."""
    import torch

    return torch.optim.AdamW


def fused_adamw(accelerator: object) -> Any:
    """Return torch's AdamW in one pass over memory; a constructor like `torch.optim.AdamW`."""
    from functools import partial

    import torch

    return partial(torch.optim.AdamW, fused=True)


def clip_grad_norm(accelerator: object) -> Any:
    """Return torch's clipping by the global norm."""
    import torch

    return torch.nn.utils.clip_grad_norm_


def quantized_weights(accelerator: object) -> Any:
    """Return weights of 8 or 4 bits; see `accelerators.quantized`."""
    from accelerators.quantized import QuantizedWeights

    return QuantizedWeights()


def softcap(model: Any) -> float | None:
    """Return the bound of attention scores in a model's configuration; None if there is none."""
    return getattr(model.get_text_config(decoder=True), "attn_logit_softcapping", None)


def beyond_sdpa(model: Any) -> str:
    """Return which feature of a model torch's attention lacks, as transformers would drop it silently; "" if none."""
    return "torch's scaled_dot_product_attention has no softcap" if softcap(model) else ""


_taking_real_tokens: set[str] = set()


def takes_real_tokens(attention: str | None) -> bool:
    """Return whether this attention of transformers was registered so that it takes the `RealTokens` of a batch."""
    return attention in _taking_real_tokens


def register_attention(
    name: str, attend: Callable[..., Any], lacking: Iterable[str] = (), takes_real_tokens: bool = False
) -> str:
    """Register an implementation of attention with transformers.

    Its masks are added to scores. They are made once per forward pass without reading values on the host, and no row
    of them hides all columns (`open_empty_rows`).

    Args:
        name: its name in `attn_implementation`.
        attend: called as transformers calls attention: (module, query [B, H, T, D], key and value [B, G, S, D], mask
            [B, 1 or H, T, S] or None, with `scaling`, `dropout` and other features) -> ([B, T, H, D], None).
        lacking: features that some models pass and `attend` does not implement.
        takes_real_tokens: models may compute the distinct real tokens of a batch, and some others, as one row. `attend`
            still gets padded rows of queries, keys and values, with 0 for padding, and `needed` [B, T], True for the
            queries whose output is used. That pays if copying rows costs less than computing padding, and if a few
            dozen sizes of batches cost nothing.

    Returns:
        `name`, as the factory of an `attention` returns it. A call with a lacking feature raises `AcceleratorError`,
        and a result of another form raises `PluginError`: the model's next layer would fail without naming it.
    """
    import torch
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    from accelerators.real_tokens import RealTokens

    lacking, verified = tuple(lacking), set[Any]()

    @functools.wraps(attend)
    def checked(module: Any, query: Any, key: Any, value: Any, *args: Any, **features: Any) -> Any:
        for feature in lacking:
            if features.get(feature) is not None:
                raise AcceleratorError(f"attention {name}: it does not support {feature}; use a model without it")
        tokens = features.pop(RealTokens.ARGUMENT, None)
        if tokens is not None:
            query, key, value = map(tokens.spread_heads, (query, key, value))
            features["needed"] = tokens.mask
        result = attend(module, query, key, value, *args, **features)
        # Once for passes and once for decoding, because this is called for each layer of each step. In compiled code
        # the check costs nothing, and a set that it changes would cause a second compilation.
        case, compiling = (query.dtype, query.shape[2] == 1), torch.compiler.is_compiling()
        if compiling or case not in verified:
            if problem := _find_wrong_form(result, query, value):
                raise PluginError(f"attention {name} of {attend.__module__}: it returned {problem}; {AUTHORS}")
            if not compiling:
                verified.add(case)
        return result if tokens is None else (tokens.select(result[0]), *result[1:])

    if takes_real_tokens:
        _taking_real_tokens.add(name)
    AttentionInterface.register(name, checked)
    AttentionMaskInterface.register(name, _opened(eager_mask))
    return name


def sdpa(accelerator: object) -> str:
    """Return torch's attention; every row of its masks shows a column, and decoding repeats no key."""
    return register_sdpa("sdpa", attend_sdpa)


def register_sdpa(name: str, attend: Callable[..., Any]) -> str:
    """Register a form of `attend_sdpa` with transformers under a name, and return the name."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, _opened(sdpa_mask))
    return name


def attend_sdpa(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *, position_bias: Any = None, **features: Any
) -> tuple[Any, None]:
    """Attend with torch's scaled_dot_product_attention, as transformers calls it.

    The heads that share a key become the queries of one head if each has a single query. Before 5.23, transformers
    repeats the keys and values of the whole cache in each decoding step instead.

    If all heads share one key, the repetition of transformers has stride 0, for which torch's memory-efficient kernel
    reads wrong masks if the columns are 1 mod 32 (pytorch #191937, corrected after 2.13). Such keys are copied.

    Args:
        module: the layer.
        query: [B, H, T, D].
        key, value: [B, G, S, D].
        attention_mask: [B, 1 or H, T, S], or None.
        position_bias: [1 or B, 1 or H, T, S], added to the scores, or None.
        **features: further arguments of the model.

    Returns:
        [B, T, H, D], and no weights.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    heads, shared = query.shape[1], query.shape[1] // key.shape[1]
    if query.shape[2] > 1 or shared == 1:
        if shared == heads > 1 and key.shape[2] % 32 == 1:
            key, value, module = key.repeat(1, heads, 1, 1), value.repeat(1, heads, 1, 1), None
        features["position_bias"] = position_bias
        output: Any = sdpa_attention_forward(module, query, key, value, attention_mask, **features)[0]
        return output, None

    def join_heads(states: Any) -> Any:
        by_head = states is not None and states.shape[1] == heads
        return states.reshape(len(states), -1, shared, states.shape[-1]) if by_head else states

    # Without the module, which would say that keys are to be repeated. A single query sees all that its mask shows.
    features |= {"position_bias": join_heads(position_bias), "is_causal": False}
    output = sdpa_attention_forward(None, join_heads(query), key, value, join_heads(attention_mask), **features)[0]
    return output.transpose(1, 2).reshape(len(output), 1, heads, -1), None


def open_empty_rows(mask: Any) -> Any:
    """Let a query that sees nothing see the first column, because its softmax has no value.

    Padding on the left makes such queries. Their outputs are not used, but some kernels give them NaN, in outputs or in
    gradients, and 0 times NaN is NaN.

    Args:
        mask: [B, 1 or H, T, S], True or 0 where a query sees a column, else False or the lowest number.
    """
    import torch

    if mask.shape[2] == 1:  # a decoding step: every token sees itself
        return mask
    is_bool = mask.dtype == torch.bool
    empty = ~mask.any(-1, keepdim=True) if is_bool else mask.amax(-1, keepdim=True) < 0
    opened = True if is_bool else 0.0
    first = torch.arange(mask.shape[-1], device=mask.device) == 0
    return mask.masked_fill(empty & first, opened)


def _opened(make_mask: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of transformers that makes masks, with `open_empty_rows` after it."""

    @functools.wraps(make_mask)
    def make(*args: Any, **options: Any) -> Any:
        mask = make_mask(*args, **options)
        return None if mask is None else open_empty_rows(mask)

    return make


def _find_wrong_form(result: Any, query: Any, value: Any) -> str:
    """Return what is wrong with a result of attention, and what is expected; "" if nothing is."""
    import torch

    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], torch.Tensor)):
        return f"a {type(result).__name__}, expected (outputs, None)"
    output, (rows, heads, tokens, _) = result[0], query.shape
    expected = (rows, tokens, heads, value.shape[-1])
    if tuple(output.shape) != expected:
        return f"outputs of shape {tuple(output.shape)}, expected {expected}"
    # Under autocast, and after rotations in float32, another dtype is right.
    if output.dtype not in (query.dtype, value.dtype) and not torch.is_autocast_enabled(query.device.type):
        return f"outputs in {output.dtype}, expected {query.dtype}"
    return ""


def missing_features(lacking: Iterable[str]) -> Callable[[Any], str]:
    """Return a check (`KernelImpl.refuses`) that names those of the `lacking` features that a model's attention uses.

    The model's code and configuration tell which features it passes.
    """
    lacking = tuple(lacking)

    def refuses(model: Any) -> str:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        architecture = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model), None)
        code = inspect.getsource(sys.modules[architecture.__module__]) if architecture else ""
        used = [name for name in lacking if (softcap(model) if name == "softcap" else f" {name}=" in code)]
        return f"it does not support {', '.join(used)}" if used else ""

    return refuses


def always(reason: str) -> Callable[[Any], Support]:
    """Return a check (`KernelImpl.supported`) that every device passes."""
    return lambda accelerator: Support(True, reason)


def _plain(operation: str, name: str, factory: Callable[[Any], Any], reason: str, **fields: Any) -> KernelImpl:
    return KernelImpl(operation=operation, name=name, factory=factory, supported=always(reason), **fields)


_TORCH = "plain torch operators"
_HOST = "torch's fused AdamW also runs on the host, with nothing to compile"
_SDPA = "torch's scaled_dot_product_attention picks its own kernel"
_EAGER = "every architecture's own operators"
_UNPACKED = f"{_TORCH}: the weight of one layer at a time is unpacked, then multiplied"

KERNELS = (
    _plain("adamw", "torch-foreach", adamw, _TORCH),
    _plain("adamw_cpu_offload", "torch-fused", fused_adamw, _HOST),
    _plain("clip_grad_norm", "torch", clip_grad_norm, _TORCH),
    _plain("attention", "sdpa", sdpa, _SDPA, refuses=beyond_sdpa),
    _plain("attention", "eager", lambda accelerator: "eager", _EAGER, priority=-1000),
    _plain("quantized_weights", "torch", quantized_weights, _UNPACKED),
)

FUSED_ADAMW = _plain("adamw", "torch-fused", fused_adamw, "one pass over memory, in few launches", priority=10)
"""For backends whose build of torch has the operator; a constructor like `torch.optim.AdamW`."""


def stream_graphs(name: str, supported: Callable[[Any], Support]) -> KernelImpl:
    """Return the implementation of `graph_capture` by the backend's `graphs`, a `StreamGraphs`."""
    return KernelImpl(
        operation="graph_capture",
        name=name,
        factory=lambda accelerator: accelerator.graphs.capture,
        supported=supported,
        priority=10,
    )


def portable_kernels(sdpa: str) -> tuple[KernelImpl, ...]:
    """Return the portable implementations, with the reason for torch's attention: the kernels it has on a device."""
    return tuple(
        dataclasses.replace(kernel, supported=always(sdpa)) if kernel.name == "sdpa" else kernel for kernel in KERNELS
    )
