"""Judge fused kernels as wholes: attention and AdamW, whose parts may all be right while their sum is not.

Each is computed again in float64 on the host, from the kernel's own inputs, by its definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as hooks
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from accelerators import RealTokens
from rlhf.lockstep.places import find_line
from rlhf.lockstep.rounding import SPREAD, unit
from rlhf.lockstep.truth import HOST

Blame = Callable[[str, str, float, tuple[int, ...], float, float, str], None]
"""(kernel, line, error in bands, index, value, truth, shapes)"""


@contextmanager
def judge_kernels(names: set[str], blame: Blame) -> Iterator[None]:
    """Judge, in this block, the attention implementations of these names and every optimizer step."""
    with ExitStack() as stack:
        for name in names & set(ALL_ATTENTION_FUNCTIONS.valid_keys()):
            attend = ALL_ATTENTION_FUNCTIONS[name]
            ALL_ATTENTION_FUNCTIONS[name] = _judged_attention(name, attend, blame)
            stack.callback(ALL_ATTENTION_FUNCTIONS.__setitem__, name, attend)
        before: list[list[dict[str, Any]]] = []  # the last is of the innermost: a step may call that of its base class
        first = hooks.register_optimizer_step_pre_hook(lambda optimizer, *_: before.append(_read(optimizer)))
        stack.callback(first.remove)
        second = hooks.register_optimizer_step_post_hook(
            lambda optimizer, *_: _judge_adamw(optimizer, before.pop(), blame)
        )
        stack.callback(second.remove)
        yield


def _judged_attention(name: str, attend: Callable[..., Any], blame: Blame) -> Callable[..., Any]:
    def judged(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
        result = attend(module, query, key, value, mask, **options)
        if not options.get("dropout") and options.get("s_aux") is None:
            is_causal = options.get("is_causal")
            is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            tokens: RealTokens | None = options.get(RealTokens.ARGUMENT)
            output, real = result[0], True
            with torch.no_grad():
                if tokens is not None:  # the mask is that of padded rows
                    query, key, value = map(tokens.spread_heads, (query, key, value))
                    real = _host(tokens.spread(torch.ones_like(output[..., :1]))) > 0
                    output = tokens.spread(output)
                inputs = _host(query), _host(key), _host(value), _host(mask)
                truth, seen = attend_exactly(*inputs, is_causal, options.get("scaling"))
                _compare_attention(name, _host(output), truth, seen & real, query, blame)
        return result

    return judged


def attend_exactly(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scaling: float | None
) -> tuple[Tensor, Tensor]:
    """Return attention in float64, [B, T, H, D], and the rows that see something, [B, T, H, 1]."""
    query, key, value = query.double(), key.double(), value.double()
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    allowed = torch.ones_like(scores, dtype=torch.bool)
    if mask is not None:
        mask = mask[..., : key.shape[2]]
        allowed = allowed & (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2)
        scores = scores if mask.dtype == torch.bool else scores + mask.double()
    elif is_causal and query.shape[2] > 1:
        allowed = allowed.tril()
    weights = scores.masked_fill(~allowed, -math.inf).softmax(-1)
    seen = allowed.any(-1, keepdim=True).transpose(1, 2)
    return (weights.nan_to_num() @ value).transpose(1, 2), seen


def _compare_attention(name: str, result: Tensor, truth: Tensor, seen: Tensor, query: Tensor, blame: Blame) -> None:
    result = result.reshape(truth.shape)
    gap = torch.where(seen, (result.double() - truth).abs().nan_to_num(nan=math.inf), 0.0)
    band = SPREAD * unit(result.dtype) * float(truth.abs().max().clamp_min(1e-30))
    if (worst := float(gap.max())) > band:
        number = int(gap.flatten().argmax())
        index = tuple(int(part) for part in torch.unravel_index(torch.tensor(number), truth.shape))
        shape = f"{list(query.shape)} {str(query.dtype).removeprefix('torch.')}"
        values = float(result.flatten()[number]), float(truth.flatten()[number])
        blame(f"attention ({name})", find_line(), worst / band, index, *values, shape)


def _read(optimizer: Any) -> list[dict[str, Any]]:
    """Return what an optimizer step starts from: weights, gradients, moments and steps, on the host."""
    rows = []
    scale = getattr(optimizer, "grad_scale", None)  # by which a fused step of torch divides, such as to clip gradients
    divisor = 1.0 if scale is None else float(scale)
    for group in optimizer.param_groups:
        if not {"betas", "eps", "lr"} <= group.keys():
            continue
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.numel():
                state = optimizer.state.get(parameter, {})
                rows.append(
                    {
                        "parameter": parameter,
                        "group": {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")},
                        "weight": _host(parameter).double(),
                        "gradient": _host(parameter.grad).double() / divisor,
                        "first": _host(state["exp_avg"]).double() if "exp_avg" in state else None,
                        "second": _host(state["exp_avg_sq"]).double() if "exp_avg_sq" in state else None,
                        "step": float(state.get("step", 0)),
                    }
                )
    return rows


def _judge_adamw(optimizer: Any, rows: list[dict[str, Any]], blame: Blame) -> None:
    for row in rows:
        lowest, highest = update_exactly(**{key: row[key] for key in row if key != "parameter"})
        result = _host(row["parameter"])
        moved = torch.maximum((lowest - row["weight"]).abs(), (highest - row["weight"]).abs())
        band = SPREAD * (unit(result.dtype) * lowest.abs() + unit(torch.float32) * moved) + 1e-30
        exact = result.double()
        gap = torch.maximum(torch.minimum(lowest, highest) - exact, exact - torch.maximum(lowest, highest))
        ratio = (gap.clamp_min(0).nan_to_num(nan=math.inf) / band).flatten()
        if float(ratio.max()) > 1:
            number = int(ratio.argmax())
            index = tuple(int(part) for part in torch.unravel_index(torch.tensor(number), result.shape))
            values = float(result.flatten()[number]), float(lowest.flatten()[number])
            shape = f"{list(result.shape)} {str(result.dtype).removeprefix('torch.')}"
            blame(f"adamw ({type(optimizer).__name__})", find_line(), float(ratio.max()), index, *values, shape)
            return


def update_exactly(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    step: float,
    group: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Return the weight after a step of AdamW (arXiv:1711.05101) in float64, with eps after and before the correction.

    Backends differ in the place of eps; a result between the two is right.
    """
    (decay_first, decay_second), step = group["betas"], step + 1
    first = gradient * (1 - decay_first) + (0 if first is None else first * decay_first)
    second = gradient.square() * (1 - decay_second) + (0 if second is None else second * decay_second)
    kept = weight * (1 - group["lr"] * group["weight_decay"])
    size, correction = group["lr"] / (1 - decay_first**step), math.sqrt(1 - decay_second**step)
    after = kept - size * first / (second.sqrt() / correction + group["eps"])
    before = kept - size * first / ((second.sqrt() + group["eps"]) / correction)
    return after, before


def _host(tensor: Any) -> Any:
    return None if tensor is None else tensor.detach().to(HOST, copy=True)
