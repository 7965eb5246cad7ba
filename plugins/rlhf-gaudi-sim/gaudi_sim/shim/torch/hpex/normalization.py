"""FusedClipNorm: norm and scaling of all gradients."""

from collections.abc import Iterable

import torch

from gaudi_sim.accounting import accounts


class FusedClipNorm:
    """Scales gradients so that their common 2-norm is at most `max_norm`, kept in the first parameter's dtype."""

    def __init__(self, parameters: Iterable[torch.Tensor], max_norm: float) -> None:
        self.max_norm = torch.ones(1, dtype=next(iter(parameters)).dtype, device="hpu") * max_norm

    @torch.no_grad()
    def clip_norm(self, parameters: Iterable[torch.Tensor]) -> torch.Tensor:
        """Scale the gradients in place -> their norm before, [1]."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not gradients:
            return torch.zeros(1, device="hpu")
        with accounts().running_graph():  # a single kernel
            return self._clip(gradients)

    def _clip(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        norm: torch.Tensor = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])
        ).reshape(1)
        scale = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale)
        return norm
