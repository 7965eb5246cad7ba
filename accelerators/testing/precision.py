"""Checks of numbers: precisions, and kernels against torch's own operators."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accelerators.errors import AcceleratorError, PluginError
from accelerators.testing.reference import ADAMW, assert_close, batch, model
from accelerators.types import Precision

if TYPE_CHECKING:
    from accelerators.accelerator import Accelerator

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
UNKNOWN = "fp12"


def check_precision(accelerator: Accelerator) -> None:
    """Check every wish, and a forward and a backward pass in each precision."""
    supported = []
    for wish in DTYPES:
        precision = _granted(accelerator, wish)
        if precision:
            assert precision.name == wish, f"precision({wish!r}) gives {precision.name}, expected {wish} or a refusal"
            _check_values(precision)
            supported.append(precision)
    auto = accelerator.precision("auto")
    named = next((precision for precision in supported if precision.name == auto.name), None)
    assert named, f"precision('auto') gives {auto.name}, which precision({auto.name!r}) refuses"
    same = _values(auto) == _values(named)
    assert same, f"precision('auto') gives {_values(auto)}, but precision({auto.name!r}) {_values(named)}"
    assert _granted(accelerator, UNKNOWN) is None, f"precision({UNKNOWN!r}) is granted, expected an AcceleratorError"
    for precision in supported:
        _check_training(accelerator, precision)


def check_adamw(accelerator: Accelerator) -> None:
    """Check steps over a list of parameters, over groups, and over groups with an empty one."""
    kernel = accelerator.kernels.get("adamw", required=True)
    for layout, groups in LAYOUTS.items():
        expected = adamw_steps(torch.optim.AdamW, groups, torch.device("cpu"))
        try:
            results = adamw_steps(kernel, groups, accelerator.device())
        except Exception as error:
            raise AssertionError(f"adamw over {layout} failed ({type(error).__name__}: {error})") from error
        for number, (result, reference) in enumerate(zip(results, expected)):
            assert_close(f"adamw over {layout}: parameter {number} after 4 steps", result, reference)


def check_clip_grad_norm(accelerator: Accelerator) -> None:
    """Check norm and gradients, clipped and not, with a parameter that has no gradient."""
    clip = accelerator.kernels.get("clip_grad_norm", required=True)
    for max_norm in (1.0, 1e3):
        expected, expected_norm = _clipped(nn.utils.clip_grad_norm_, max_norm, torch.device("cpu"))
        gradients, norm = _clipped(clip, max_norm, accelerator.device())
        scalar = isinstance(norm, Tensor) and norm.numel() == 1
        assert scalar, f"clip_grad_norm gives {norm!r}, expected the norm as a scalar tensor"
        assert_close(f"clip_grad_norm to {max_norm:g}: the norm", norm.reshape(()), expected_norm)
        assert_close(f"clip_grad_norm to {max_norm:g}: the gradients", gradients, expected)


# precision


def _granted(accelerator: Accelerator, wish: str) -> Precision | None:
    """Return the precision; None if it is refused correctly."""
    try:
        return accelerator.precision(wish)
    except PluginError as error:
        raise AssertionError(f"precision({wish!r}) is neither granted nor refused: {error}") from error
    except AcceleratorError as error:
        refusal = str(error)
    assert wish in refusal, f"precision({wish!r}) is refused without naming it: {refusal}"
    return None


def _check_values(precision: Precision) -> None:
    what = f"precision({precision.name!r})"
    expected = DTYPES[precision.name]
    assert precision.dtype == expected, f"{what} has dtype {precision.dtype}, expected {expected}"
    assert precision.reason, f"{what} has no reason"
    config = precision.deepspeed_config()
    json.dumps(config)
    enabled = [name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled")]
    fitting = [] if precision.name == "fp32" else [precision.name]
    assert enabled == fitting, (
        f"{what}.deepspeed_config() enables {enabled or 'nothing'}, expected {fitting or 'nothing'}"
    )


def _values(precision: Precision) -> tuple[Any, ...]:
    return precision.dtype, precision.loss_scaling, precision.deepspeed_config()


def _check_training(accelerator: Accelerator, precision: Precision) -> None:
    """Compare logits and gradients with fp32 on the CPU."""
    tokens, labels = batch()
    results = []
    for device, dtype, context in (
        (torch.device("cpu"), torch.float32, Precision(torch.float32, "fp32", "reference").autocast()),
        (accelerator.device(), precision.dtype, precision.autocast()),
    ):
        network = model().to(device, dtype)
        with context:
            logits = network(tokens.to(device))
            loss = nn.functional.cross_entropy(logits.float(), labels.to(device))
        loss.backward()
        results.append((logits.detach(), next(network.parameters()).grad))
    for what, result, expected in zip(("logits", "gradient"), results[1], results[0]):
        assert torch.isfinite(result).all(), (
            f"{precision.name}: the {what} of a forward and backward pass are not finite"
        )
        assert_close(f"{precision.name}: the {what} of a forward and backward pass", result, expected, precision)


# kernels

LAYOUTS: dict[str, Callable[[Sequence[nn.Parameter]], list[Any]]] = {
    "a list of parameters": list,
    "groups": lambda p: [{"params": p[:1], "weight_decay": 0.5}, {"params": p[1:], "weight_decay": 0.0}],
    "groups, one of them empty": lambda p: [{"params": list(p), "lr": 0.05}, {"params": [], "weight_decay": 0.0}],
}


def adamw_steps(
    adamw: Callable[..., torch.optim.Optimizer],
    groups: Callable[[Sequence[nn.Parameter]], list[Any]],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Return parameters after four steps of an optimizer over `groups` of them, one of `LAYOUTS`."""
    shapes = ((16, 8), (8,), (3, 5, 2))
    values = [torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape) for shape in shapes]
    parameters = [nn.Parameter(value.to(device, dtype)) for value in values]
    optimizer = adamw(groups(parameters), lr=0.1, **ADAMW)
    for step in range(4):
        for parameter in parameters:
            parameter.grad = torch.sin(parameter.detach() * (step + 2)) + 0.1
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in parameters]


def _clipped(
    clip: Callable[[list[nn.Parameter], float], Tensor], max_norm: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    parameters = [nn.Parameter(torch.zeros(size, device=device)) for size in (10, 3, 4)]
    for parameter in parameters[:2]:
        parameter.grad = torch.linspace(-3, 4, parameter.numel(), device=device)
    norm = clip(parameters, max_norm)
    return torch.cat([parameter.grad for parameter in parameters if parameter.grad is not None]), norm
