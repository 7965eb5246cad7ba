"""Checks of replaced layers: weights prepared for inference, and fused layers, compute what the plain ones do."""

from __future__ import annotations

import copy
import unittest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accelerators.testing.reference import assert_close, llama

if TYPE_CHECKING:
    from accelerators.accelerator import Accelerator
    from accelerators.types import Precision

WIDTH = 256
"""Columns of the weights, like those of a small model, because smaller weights may be skipped."""

ROWS = (1, 16, 300)

LENGTHS, PROMPT, STEPS = (9, 4, 1), 9, 4
"""Real tokens of each row, columns of the prompts, and decoded tokens of the Llama."""


def check_inference_weights(accelerator: Accelerator) -> None:
    """Check logits while weights are prepared, kept or not; the restored module, its gradients and changed weights."""
    prepare = accelerator.kernels.get("inference_weights")
    if prepare is None:
        raise unittest.SkipTest(accelerator.kernels.capabilities()["inference_weights"].reason)
    precision = accelerator.precision()
    network, original = _model(accelerator, precision), _model(accelerator, precision)
    for phase, keep in enumerate((True, True, False, False)):
        what = f"prepare(module, keep={keep})"
        if phase % 2:  # training in between must show
            with torch.no_grad():
                for parameter in (*network.parameters(), *original.parameters()):
                    parameter.mul_(1.5)
        before = _attributes(network)
        restore = prepare(network, keep=keep)
        for rows in ROWS:
            logits, expected = (
                _logits(accelerator, precision, network, rows),
                _logits(accelerator, precision, original, rows),
            )
            assert_close(f"{what}: logits of {rows} rows", logits, expected, precision)
        if keep:
            _check_weights(f"{what}: while it is prepared", network, original)
        restore()
        _check_attributes(what, before, network)
        _check_weights(f"{what}: restored", network, original)
        _check_gradients(what, accelerator, precision, network, original)
    _check_decoding(accelerator, precision, prepare)


def check_fused_layers(accelerator: Accelerator) -> None:
    """Check a fused Llama and a copy of it, with and without gradients, in the precision of trainers."""
    fuse = accelerator.kernels.get("fused_layers")
    if fuse is None:
        raise unittest.SkipTest(accelerator.kernels.capabilities()["fused_layers"].reason)
    precision = accelerator.precision()
    exact, generator = llama().train(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in exact.parameters():
            if parameter.dim() == 1:
                nn.init.uniform_(parameter, 0.5, 1.5, generator=generator)
            parameter.copy_(parameter.to(precision.dtype))
    fused = copy.deepcopy(exact).to(accelerator.device(), precision.dtype)
    names = [name for name, _ in fused.named_parameters()]
    fuse(fused)
    assert [name for name, _ in fused.named_parameters()] == names, "fused_layers: it changes names of parameters"
    tokens = (torch.arange(3 * 7) * 5 % 64).view(3, 7)
    expected = exact(tokens).logits
    expected.logsumexp(-1).sum().backward()
    for what, network in {"a fused model": fused, "a copy of it": copy.deepcopy(fused)}.items():
        with torch.no_grad():
            for parameter in fused.parameters():  # a copy has separate weights
                parameter.mul_(1.0 if network is fused else 2.0)
        with precision.autocast():
            logits = network(accelerator.to_device(tokens)).logits
        logits.float().logsumexp(-1).sum().backward()
        accelerator.step_boundary("gradients")
        assert_close(f"{what}: logits", logits, expected, precision)
        for (name, weight), reference in zip(network.named_parameters(), exact.parameters()):
            assert weight.grad is not None, f"{what}: {name} has no gradient"
            assert_close(f"{what}: gradient of {name}", weight.grad, reference.grad, precision)
        with torch.no_grad(), precision.autocast():
            again = network(accelerator.to_device(tokens)).logits
        assert_close(f"{what}: logits without gradients", again, expected, precision)


class _Block(nn.Module):
    """Layers with the same input, named as in most models, and a layer after them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, 2 * WIDTH)
        self.up_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the hidden states of the next block."""
        down: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return hidden + down


def _model(accelerator: Accelerator, precision: Precision) -> nn.Module:
    """Return two blocks between an embedding and an output layer that share their weight."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = nn.Sequential(
            nn.Embedding(WIDTH, WIDTH), _Block(), nn.LayerNorm(WIDTH), _Block(), nn.Linear(WIDTH, WIDTH)
        )
        network[-1].weight = network[0].weight
    return network.to(accelerator.device(), precision.dtype).eval()


def _tokens(accelerator: Accelerator, rows: int) -> Any:
    return accelerator.to_device((torch.arange(3 * rows) * 7 % WIDTH).view(rows, 3))


@torch.no_grad()
def _logits(accelerator: Accelerator, precision: Precision, network: nn.Module, rows: int) -> Tensor:
    with precision.autocast():
        logits: Tensor = network(_tokens(accelerator, rows))
    accelerator.step_boundary("logits")
    return logits


def _attributes(network: nn.Module) -> dict[str, Any]:
    """Return the attributes in a module tree: their types, and the ids of parameters."""
    attributes: dict[str, Any] = {}
    for path, module in network.named_modules():
        attributes |= {f"{path}.{name}": type(value) for name, value in vars(module).items()}
        attributes |= {f"{path}.{name}": id(parameter) for name, parameter in module._parameters.items()}
    return attributes


def _check_attributes(what: str, before: dict[str, Any], network: nn.Module) -> None:
    after = _attributes(network)
    changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    assert not changed, f"{what}: its restore leaves {', '.join(sorted(changed))} changed, expected nothing"


def _check_weights(what: str, network: nn.Module, original: nn.Module) -> None:
    for (name, parameter), expected in zip(network.named_parameters(), original.parameters()):
        same = parameter.shape == expected.shape and torch.equal(parameter.detach().cpu(), expected.detach().cpu())
        assert same, f"{what}, {name} is not what it was, expected the same bits"


def _check_gradients(
    what: str, accelerator: Accelerator, precision: Precision, network: nn.Module, original: nn.Module
) -> None:
    for module in (network, original):
        module.zero_grad()
        with precision.autocast():
            module(_tokens(accelerator, 4)).float().logsumexp(-1).sum().backward()
        accelerator.step_boundary("gradients")
    for (name, parameter), expected in zip(network.named_parameters(), original.parameters()):
        assert parameter.grad is not None, f"{what}: restored, {name} gets no gradient"
        assert_close(f"{what}: restored, the gradient of {name}", parameter.grad, expected.grad, precision)


def _check_decoding(accelerator: Accelerator, precision: Precision, prepare: Any) -> None:
    """Check a rollout: an implementation may replace the layers of a family, and a step of decoding."""
    network = make_llama(accelerator, precision)
    expected, before = decode_llama(accelerator, precision, network), _attributes(network)
    restore = prepare(network, keep=True)
    prepared = decode_llama(accelerator, precision, network)
    restore()
    what = "prepare(module, keep=True) of a Llama, rows padded left"
    for column, (logits, reference) in enumerate(zip(prepared, expected)):
        place = f"token {column} after the prompts" if column else "the prompts' last token"
        assert_close(f"{what}: logits of {place}", logits, reference, precision)
    _check_attributes(what, before, network)


def make_llama(accelerator: Accelerator, precision: Precision) -> Any:
    """Return a Llama in evaluation mode, with the attention of trainers; sizes are multiples of 64."""
    kernels = accelerator.kernels
    network = llama(hidden_size=128, intermediate_size=192, head_dim=64, vocab_size=WIDTH)
    usable = kernels.usable("attention")
    network.set_attn_implementation(
        next(name for kernel, name in usable if not kernels.refusal(kernel, network.config))
    )
    return network.to(accelerator.device(), precision.dtype).eval()


def make_inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, mask and positions of rows of the Llama, [rows, PROMPT + STEPS] each, padded left."""
    columns, rows = PROMPT + STEPS, len(LENGTHS)
    ids = torch.arange(rows * columns).view(rows, columns) * 7 % (WIDTH - 1) + 1
    mask = (torch.arange(columns) >= PROMPT - torch.tensor(LENGTHS).unsqueeze(1)).long()
    return ids, mask, (mask.cumsum(1) - 1).clamp_min(0)


@torch.no_grad()
def decode_llama(accelerator: Accelerator, precision: Precision, network: Any) -> list[Tensor]:
    """Return logits [rows, V] of the prompts' last tokens, and of each token after them, in a static cache."""
    (ids, mask, positions), columns = make_inputs(), PROMPT + STEPS
    cache, results = _cache(network.config, columns + 3), []
    for first, last in [(0, PROMPT), *((column, column + 1) for column in range(PROMPT, columns))]:
        inputs = accelerator.to_device((ids[:, first:last], mask[:, :last], positions[:, first:last]))
        with precision.autocast():
            output = network(*inputs, cache, use_cache=True)  # transformers 5.24 renamed the keyword
        accelerator.step_boundary("logits")
        for layer in cache.layers:
            layer.cumulative_length.fill_(last)  # an implementation that writes to the cache itself does not count
        results.append(output.logits[:, -1])
    return results


def _cache(config: Any, length: int) -> Any:
    """Return a static cache with `decode_buffers`, like that of rollouts."""
    from transformers import StaticCache

    cache: Any = StaticCache(config=config, max_cache_len=length)
    tensors: list[Tensor] = []

    def decode_buffers(groups: int, size: int, dtype: Any) -> tuple[list[Tensor], int] | None:
        if not cache.layers[0].is_initialized:
            return None  # prompts make the tensors
        if not tensors:
            tensors.extend(states for layer in cache.layers for states in (layer.keys, layer.values))
        return tensors, int(cache.layers[0].cumulative_length)

    cache.decode_buffers = decode_buffers
    return cache
