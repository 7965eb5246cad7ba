"""A model of transformers, one unpadded row at a time, in float64; with LoRA as two plain matrices a layer.

Nothing here is trained in place: the weights are leaf tensors beside the model, and `trained` are those that
learn. A LoRA layer computes with W + (alpha / rank) B A (arXiv:2106.09685, equation 3).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

Adapters = dict[str, tuple[Tensor, Tensor]]
"""By the name of the layer's weight: A [rank, inputs] and B [outputs, rank]."""


class Network:
    """A causal language model (`logits`) or one with a scalar head (`scores`)."""

    def __init__(self, model: nn.Module, adapters: Adapters | None = None, scaling: float = 1.0) -> None:
        """`adapters`: with them, only they and the scalar head are trained; `scaling` is alpha / rank."""
        self._model = _Heads(copy.deepcopy(model).double().eval())
        self._scaling = scaling
        self.weights = {name: tensor.detach().clone() for name, tensor in self._model.model.named_parameters()}
        self.adapters = {
            name: (a.detach().double().clone(), b.detach().double().clone()) for name, (a, b) in (adapters or {}).items()
        }
        self.trained: dict[str, Tensor] = {}
        for name, (a, b) in self.adapters.items():
            self.trained |= {f"{name}.A": a, f"{name}.B": b}
        for name, weight in self.weights.items():
            if not self.adapters or name.startswith("score."):
                self.trained[name] = weight
        for tensor in self.trained.values():
            tensor.requires_grad_(True)

    def logits(self, ids: Sequence[int], *, adapted: bool = True) -> Tensor:
        """[T, V]: row t is the distribution of the token after ids[t]. `adapted`: with the adapters."""
        return self._run("logits", ids, len(ids), adapted)

    def scores(self, ids: Sequence[int], *, real: int | None = None) -> Tensor:
        """[T]: the scalar head at each token.

        Args:
            real: the row's real tokens; those after it are padding, which sees the real tokens but not
                itself, and stands where the last real token does.
        """
        return self._run("scores", ids, len(ids) if real is None else real, True)

    def _run(self, head: str, ids: Sequence[int], real: int, adapted: bool) -> Tensor:
        weights = {f"model.{name}": weight for name, weight in self.weights.items()}
        if adapted:
            for name, (a, b) in self.adapters.items():
                change = self._scaling * b @ a
                weights[f"model.{name}"] = self.weights[name] + (change.T if self._transposed(name) else change)
        return functional_call(self._model, weights, (head, torch.tensor([list(ids)]), real))

    def _transposed(self, name: str) -> bool:
        """GPT-2's layers hold their weights as [inputs, outputs]."""
        return type(self._model.model.get_submodule(name.removesuffix(".weight"))).__name__ == "Conv1D"


class _Heads(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, head: str, ids: Tensor, real: int) -> Tensor:
        positions = torch.arange(ids.shape[1]).clamp(max=real - 1)[None]
        mask = (torch.arange(ids.shape[1]) < real).long()[None]
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "use_cache": False}
        if head == "logits":
            return self.model(**inputs).logits[0]
        return self.model.score(self.model.base_model(**inputs).last_hidden_state)[0, :, 0]
