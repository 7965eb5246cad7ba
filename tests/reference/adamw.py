"""AdamW with gradient clipping (arXiv:1711.05101, algorithm 2), one parameter at a time, and the learning rate."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rlhf.config.schema import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total: int) -> float:
    """Rate of step `step` (0-based) of `total`: a linear rise, then the schedule down to `min_lr_ratio` of the peak."""
    rising = round(config.warmup if config.warmup >= 1 else config.warmup * total)
    if step < rising:
        return config.learning_rate * (step + 1) / (rising + 1)
    # The last step, `total - 1`, has the schedule's end: `min_lr_ratio` of the peak.
    passed = (step - rising) / max(1, total - 1 - rising)
    falling = round(config.decay * total)
    shape = {
        "constant": 1.0,
        "linear": 1 - passed,
        "cosine": (1 + math.cos(math.pi * passed)) / 2,
        "wsd": (total - 1 - step) / falling if total - 1 - step < falling else 1.0,
    }[config.schedule]
    if config.schedule == "constant":
        return config.learning_rate
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)


class AdamW:
    """Steps `parameters` in place."""

    def __init__(
        self, parameters: dict[str, Tensor], config: OptimizerConfig, total_steps: int, adapters: float | None = None
    ) -> None:
        """`adapters`: the peak rate of LoRA's matrices; None: ten times that of the rest."""
        self._adapters = 10 * config.learning_rate if adapters is None else adapters
        self._parameters = parameters
        self._config = config
        self._total = total_steps
        self._first = {name: torch.zeros_like(tensor) for name, tensor in parameters.items()}
        self._second = {name: torch.zeros_like(tensor) for name, tensor in parameters.items()}
        self.steps = 0
        self.place = 0  # in the schedule: of the next step

    @property
    def rate(self) -> float:
        """Learning rate of the next step."""
        return learning_rate(self._config, self.place, self._total)

    def step(self, loss: Tensor) -> float:
        """One step down the gradient of `loss`; returns the gradient's norm before clipping."""
        names = list(self._parameters)
        gradients = torch.autograd.grad(loss, [self._parameters[name] for name in names], allow_unused=True)
        gradients = [torch.zeros_like(self._parameters[n]) if g is None else g for n, g in zip(names, gradients)]
        norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients))
        shrink = self._config.max_grad_norm / norm if norm > self._config.max_grad_norm else 1.0
        rate = self.rate
        self.steps += 1
        self.place += 1
        beta1, beta2 = self._config.betas
        with torch.no_grad():
            for name, gradient in zip(names, gradients):
                parameter, first, second = self._parameters[name], self._first[name], self._second[name]
                gradient = gradient * shrink
                first.mul_(beta1).add_((1 - beta1) * gradient)
                second.mul_(beta2).add_((1 - beta2) * gradient**2)
                corrected = first / (1 - beta1**self.steps)
                spread = (second / (1 - beta2**self.steps)).sqrt()
                decay = self._config.weight_decay if parameter.dim() > 1 else 0.0
                is_adapter = name.endswith((".weight.A", ".weight.B"))
                own = rate * self._adapters / self._config.learning_rate if is_adapter else rate
                parameter -= own * (corrected / (spread + self._config.eps) + decay * parameter)
        return norm
