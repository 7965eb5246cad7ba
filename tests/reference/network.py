"""A model of transformers, one unpadded row at a time, in float64; with LoRA as two plain matrices a layer.

Nothing here is trained in place: the weights are leaf tensors beside the model, and `trained` are those that
learn. A LoRA layer computes with W + (alpha / rank) B A (arXiv:2106.09685, equation 3).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from unittest import mock

import torch
from torch import Tensor, nn
from torch.func import functional_call

Adapters = dict[str, tuple[Tensor, Tensor]]
"""By the name of the layer's weight: A [rank, inputs] and B [outputs, rank]."""


class Network:
    """A causal language model (`logits`) or one with a scalar head (`scores`)."""

    def __init__(self, model: nn.Module, adapters: Adapters | None = None, scaling: float = 1.0) -> None:
        """`adapters`: with them, only they and the scalar head are trained; `scaling` is alpha / rank."""
        self._model = _Heads(_plain(model))
        self._scaling = scaling
        self.weights = {name: tensor.detach().clone() for name, tensor in self._model.model.named_parameters()}
        self.adapters = {name: (a.double().clone(), b.double().clone()) for name, (a, b) in (adapters or {}).items()}
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

    def state(self) -> dict[str, Tensor]:
        """All weights, the adapters' as `NAME.A` and `NAME.B`."""
        return {name: tensor.detach() for name, tensor in (self.weights | self.trained).items()}

    def merged(self) -> dict[str, Tensor]:
        """All weights of a plain model that computes the same."""
        return {name: self._adapted(name).detach() for name in self.weights}

    def _run(self, head: str, ids: Sequence[int], real: int, adapted: bool) -> Tensor:
        weights = {f"model.{name}": self._adapted(name) if adapted else self.weights[name] for name in self.weights}
        inputs = (head, torch.tensor([list(ids)]), real)
        # After an engine of ZeRO 3, DeepSpeed's own linear layers stay in the place of torch's: slower, and not plain.
        with mock.patch.object(nn.functional, "linear", torch._C._nn.linear):
            return functional_call(self._model, weights, inputs)

    def _adapted(self, name: str) -> Tensor:
        if name not in self.adapters:
            return self.weights[name]
        a, b = self.adapters[name]
        change = self._scaling * b @ a
        layer = self._model.model.get_submodule(name.removesuffix(".weight"))
        # GPT-2's layers hold their weights as [inputs, outputs].
        return self.weights[name] + (change.T if type(layer).__name__ == "Conv1D" else change)


def _plain(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model).double().eval()
    model.set_attn_implementation("eager")
    return model


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
