"""FusedAdamW. As Gaudi's own, it counts steps by group, and omits a group in which nothing has a gradient.

The step is that of gaudi-pytorch-bridge 1.19, hpex/optimizers/FusedAdamW.py.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from gaudi_sim.accounting import accounts


class FusedAdamW(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101). What changes from step to step goes to the device as tensors: the graph stays the same.

    Moments are in the dtype of their parameters; `eps` is added before the second moment's bias is corrected.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"bias_correction": bias_correction})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters."""
        loss = closure() if closure else None
        for group in self.param_groups:
            if parameters := [parameter for parameter in group["params"] if parameter.grad is not None]:
                with accounts().running_graph():  # a single kernel for the group
                    _step(parameters, group, self.state)
        return loss


def _step(parameters: list[torch.Tensor], group: dict[str, Any], states: dict[torch.Tensor, Any]) -> None:
    device = parameters[0].device
    first, second = group["betas"]
    group["step"] = group.get("step", 0) + 1
    correction = 1.0
    if group["bias_correction"]:
        correction = math.sqrt(1 - second ** group["step"]) / (1 - first ** group["step"])
    step_size = torch.tensor(-group["lr"] * correction, device=device)
    kept = torch.tensor(1 - group["lr"] * group["weight_decay"], device=device)
    for parameter in parameters:
        state = states[parameter]
        if "exp_avg" not in state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        gradient, mean, square = parameter.grad, state["exp_avg"], state["exp_avg_sq"]
        mean.mul_(first).add_(gradient, alpha=1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        parameter.mul_(kept).add_(mean / (square.sqrt() + group["eps"]) * step_size)
