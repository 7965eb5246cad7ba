"""Backends of the CPU with one fault each, which the conformance kit must report."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from accelerators import AcceleratorError, CaptureError, Precision, ShapePolicy
from accelerators.backends.cpu.backend import CPU
from accelerators.backends.cpu.kernels import layers, packed
from accelerators.quantized import QuantizedWeights
from tests.accelerators.fake_plugins import fast, raises

ATTENTION = "broken_attention"


def with_kernel(operation: str, made: Any, **fields: Any) -> dict[str, Any]:
    """Return the methods of a backend that has this kernel too."""
    kernel = fast(operation, made, **fields)
    return {"kernel_implementations": lambda self: (*CPU.kernel_implementations(self), kernel)}


# shapes


class Policy(ShapePolicy):
    def __init__(self, rule: Callable[[int], int]) -> None:
        super().__init__("bucketed")
        object.__setattr__(self, "rule", rule)

    def bucket(self, n: int) -> int:
        return self.rule(n)


def with_buckets(rule: Callable[[int], int]) -> dict[str, Any]:
    return {"shape_policy": lambda self: Policy(rule)}


# precision


class SilentPrecision(Precision):
    def deepspeed_config(self):
        return {}


class RoundingPrecision(Precision):
    def autocast(self):
        return torch.autocast("cpu", dtype=torch.bfloat16)


def with_precision(**wishes: Any) -> dict[str, Any]:
    """Return the method of a backend that answers these wishes with the functions' results."""

    def precision(self, wish="auto"):
        return wishes[wish](self) if wish in wishes else CPU.precision(self, wish)

    return {"precision": precision}


def any_precision(self, wish="auto"):
    return CPU.precision(self, wish if wish in ("auto", "bf16", "fp16") else "fp32")


ROUNDING = with_precision(
    auto=lambda self: RoundingPrecision(torch.float32, "fp32", "fast"),
    fp32=lambda self: RoundingPrecision(torch.float32, "fp32", "fast"),
    bf16=raises(AcceleratorError("no bf16 here")),
)

# state


def to_meta_at_the_top(self, batch):
    return {key: value.to("meta") if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def without_named_tuples(self, batch):
    if isinstance(batch, dict):
        return {key: self.to_device(value) for key, value in batch.items()}
    return tuple(batch) if isinstance(batch, tuple) else batch


def first_memory(self):
    self.__dict__.setdefault("first", CPU.memory(self))
    return self.first


def largest_memory(self):
    memory = CPU.memory(self)
    self.largest = max(getattr(self, "largest", 0), memory.allocated)
    return replace(memory, allocated=self.largest, peak=max(self.largest, memory.peak))


def restoring_python_alone(self, state):
    random.setstate(state["python"])


# execution


def replaying_first_call(self, fn, key):
    checked, first = CPU.capture(self, fn, key), []

    def replay(x):
        first[:] = first or [x]
        return checked(first[0])

    return replay


def overwriting_results(self, fn, key):
    """Return the tensors that the next call writes into."""
    checked, results = CPU.capture(self, fn, key), {}

    def replay(x):
        for name, value in checked(x).items():
            results.setdefault(name, torch.empty_like(value)).copy_(value)
        return dict(results)

    return replay


def compiling_boundary(self, tag):
    self.compiled = getattr(self, "compiled", 0) + 1


def raising_another_error(self, fn, key):
    checked = CPU.capture(self, fn, key)

    def call(*arguments):
        with contextlib.suppress(CaptureError):
            return checked(*arguments)
        raise RuntimeError("operation not permitted when stream is capturing")

    return call


# optimizers


def adamw_with_other_eps(params, **options):
    return torch.optim.AdamW(params, **{**options, "eps": 1e-3})


def adamw_without_decay(params, **options):
    optimizer = torch.optim.AdamW(params, **options)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    return optimizer


def adamw_without_empty_groups(params, **options):
    optimizer = torch.optim.AdamW(params, **options)
    assert all(group["params"][0] is not None for group in optimizer.param_groups)
    return optimizer


def adamw_in_bf16(params, **options):
    optimizer = torch.optim.AdamW(params, **options)

    def round_parameters(*arguments):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data.bfloat16().float()

    optimizer.register_step_post_hook(round_parameters)
    return optimizer


# attention: torch's, with one fault each


def with_attention(attend: Callable[..., Any]) -> dict[str, Any]:
    def factory(accelerator):
        from transformers import AttentionInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import AttentionMaskInterface, eager_mask

        AttentionInterface.register(ATTENTION, partial(attend, sdpa_attention_forward))
        AttentionMaskInterface.register(ATTENTION, eager_mask)
        return ATTENTION

    return with_kernel("attention", None, factory=factory)


def unmasked(plain, module, query, key, value, mask, **options):
    return plain(module, query, key, value, None, **options)


def unmasked_tokens(plain, module, query, key, value, mask, **options):
    return plain(module, query, key, value, None if query.shape[2] == 1 else mask, **options)


def infinite_masks(plain, module, query, key, value, mask, **options):
    key, value = (states.repeat_interleave(module.num_key_value_groups, 1) for states in (key, value))
    scores = options["scaling"] * query @ key.transpose(2, 3)
    return (scores.masked_fill(mask < 0, -torch.inf).softmax(-1) @ value).transpose(1, 2), None


def mixed_groups(plain, module, query, key, value, mask, **options):
    key, value = (states.repeat(1, module.num_key_value_groups, 1, 1) for states in (key, value))
    return plain(torch.nn.Module(), query, key, value, mask, **options)


def frozen_keys(plain, module, query, key, value, mask, **options):
    return plain(module, query, key.detach() + 0 * key, value, mask, **options)


# weights in few bits


class Truncated(QuantizedWeights):
    def pack(self, weight, kind):
        tensors = super().pack(weight, kind)
        return tensors | {"values": tensors["values"] - 1} if kind == "int8" else tensors


class Dense(QuantizedWeights):
    def pack(self, weight, kind):
        return {"weight": weight}

    def unpack(self, tensors, dtype=torch.float32):
        return tensors["weight"].to(dtype)


class Detached(QuantizedWeights):
    def multiply(self, inputs, tensors):
        return self.product(inputs.detach(), tensors).requires_grad_()


class WithoutOffset(QuantizedWeights):
    def product(self, inputs, tensors):
        only_steps = torch.tensor([1, 0], dtype=torch.bfloat16)
        return super().product(
            inputs, {**tensors, "steps": tensors["steps"] * only_steps} if "codes" in tensors else tensors
        )


# layers prepared for inference, and fused layers


def leaving_a_forward(module, keep):
    restore = packed.prepare(module, keep)
    layer = next(layer for layer in module.modules() if "forward" in vars(layer))
    forward = vars(layer)["forward"]

    def restore_all_but_one():
        restore()
        layer.forward = forward

    return restore_all_but_one


def restoring_rounded(module, keep):
    restore = packed.prepare(module, keep)

    def restore_in_8_bits():
        restore()
        for parameter in module.parameters():
            parameter.data = parameter.data.to(torch.float8_e5m2).to(parameter.dtype)

    return restore_in_8_bits


def packed_once() -> Callable[..., Any]:
    copies: dict[int, Any] = {}

    def prepare(module, keep):
        module.forward = copies.setdefault(id(module), deepcopy(module)).forward
        return partial(delattr, module, "forward")

    return prepare


def unmasked_decoding(module, keep):
    decoder_layers = [layer for layer in module.modules() if type(layer).__name__ == "LlamaDecoderLayer"]
    for layer in decoder_layers:

        def forward(hidden, attention_mask=None, plain=layer.forward, **named):
            return plain(hidden, attention_mask=None if hidden.shape[1] == 1 else attention_mask, **named)

        layer.forward = forward
    return lambda: [delattr(layer, "forward") for layer in decoder_layers]


def norm_without_gradient(norm, hidden):
    return layers._RMSNorm.apply(hidden, norm.weight.detach(), norm.variance_epsilon) + 0 * norm.weight


def freezing_norms(module):
    for layer in module.modules():
        if layers.part(layer) == "RMSNorm":
            layer.forward = partial(norm_without_gradient, layer)


def tying_copies(module):
    for layer in module.modules():
        if layers.part(layer) == "RMSNorm":
            layer.forward = lambda hidden, norm=layer: type(norm).forward(norm, hidden)


META = {"bind": lambda self, local_rank: torch.device("meta")}
LIBRARY = raises(ImportError("libfast.so"))
DIFFERS = "parameter 0 after 4 steps: differs by"

BROKEN: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "types": [
        ("pins_memory() returns 'no', expected bool", {"pins_memory": lambda self: "no"}),
        ("dist_backend() returns 'hcll', expected one of torch's: ", {"dist_backend": lambda self: "hcll"}),
        ("absent names graph_captur, expected some of adamw, ", {"absent": {"graph_captur": "none here"}}),
    ],
    "operations": [
        (
            "adamw (fast) is reported as supported, but its factory failed (ImportError: libfast",
            with_kernel("adamw", None, factory=LIBRARY),
        )
    ],
    "shapes": [
        ("bucket(1) is 2, but bucket(2) is 3", with_buckets(lambda n: n + 1)),
        (
            "bucket(17) is 32, but bucket of a smaller number is 64",
            with_buckets(lambda n: 64 if n <= 16 or 32 < n <= 64 else 32 if n <= 32 else n),
        ),
        ("bucket(513) is 512, expected at least 513", with_buckets(lambda n: min(n, 512))),
    ],
    "precision": [
        (
            "precision('bf16').deepspeed_config() enables nothing, expected ['bf16']",
            with_precision(bf16=lambda self: SilentPrecision(torch.bfloat16, "bf16", "yes")),
        ),
        ("fp32: the logits of a forward and backward pass: differs by", ROUNDING),
        ("precision() failed (ValueError", with_precision(fp16=raises(ValueError("fp16")))),
        ("precision('fp12') is granted, expected an AcceleratorError", {"precision": any_precision}),
        (
            "precision('auto') gives (torch.float32, True",
            with_precision(auto=lambda self: replace(CPU.precision(self, "fp32"), loss_scaling=True)),
        ),
    ],
    "placement": [
        ("device() before bind() is cpu, expected an AcceleratorError", {"_device": torch.device("cpu")}),
        ("to_device leaves a tensor in a dict on cpu, not meta", META | {"to_device": to_meta_at_the_top}),
        ("to_device makes a tuple of a named tuple", {"to_device": without_named_tuples}),
    ],
    "random-numbers": [
        ("seed(7) twice: other samples of Python", {"seed": lambda self, n: torch.manual_seed(n)}),
        (
            "torch.load(weights_only=True) does not read a saved rng_state()",
            {"rng_state": lambda self: CPU.rng_state(self) | {"generator": random.Random(1)}},
        ),
        ("set_rng_state(rng_state()): other samples of torch on the CPU", {"set_rng_state": restoring_python_alone}),
    ],
    "memory": [
        ("memory().allocated grew by 0 MiB with a block of 128 MiB", {"memory": first_memory}),
        ("memory().allocated fell by 0 MiB when a block of 128 MiB was freed", {"memory": largest_memory}),
    ],
    "out-of-memory": [
        (
            "is_out_of_memory() recognizes a ValueError as out of memory",
            {"is_out_of_memory": lambda self, error: True},
        ),
        (
            "a block of 1 PiB is refused (PluginError: accelerator npu",
            META | {"step_boundary": raises(ValueError("tiles"))},
        ),
    ],
    "step-boundary": [
        (
            "step_boundary calls synchronize(); expected nothing",
            {"step_boundary": lambda self, tag: self.synchronize()},
        ),
        (
            "step_boundary runs aten.zeros.default; expected nothing",
            {"step_boundary": lambda self, tag: torch.zeros(1)},
        ),
        (
            "step_boundary changes the state of a random number generator",
            {"step_boundary": lambda self, tag: random.random()},
        ),
        (
            "step_boundary compiles a graph; expected nothing",
            {"step_boundary": compiling_boundary, "compilations": lambda self: getattr(self, "compiled", 0)},
        ),
    ],
    "capture": [
        (
            "call 2 of 5 of a captured function, a function of its input: differs by",
            {"capture": replaying_first_call},
        ),
        (
            "call 1 of 5 of a captured function, a function of its input, read after the last",
            {"capture": overwriting_results},
        ),
    ],
    "capture-refusal": [
        ("capture lets .item() through, expected CaptureError", {"capture": lambda self, fn, key: fn}),
        ("capture answers .item() with PluginError, expected CaptureError", {"capture": raising_another_error}),
    ],
    "adamw": [
        (f"adamw over a list of parameters: {DIFFERS}", with_kernel("adamw", adamw_with_other_eps)),
        (f"adamw over a list of parameters: {DIFFERS}", with_kernel("adamw", adamw_without_decay)),
        (
            "adamw over groups, one of them empty failed (PluginError: adamw kernel 'fast' of bad 2.0",
            with_kernel("adamw", adamw_without_empty_groups),
        ),
    ],
    "offload": [
        (
            "a torch.float32 that comes from cpu to cpu and back has changed",
            {
                "to_device": lambda self, batch: (
                    batch.bfloat16().to(batch.dtype) if batch.dtype == torch.float32 else batch
                )
            },
        ),
        (
            "pins_memory() is true, but a torch.float32 on cpu cannot be page-locked",
            {"pins_memory": lambda self: True},
        ),
        (
            f"adamw_cpu_offload over a list of parameters: {DIFFERS}",
            with_kernel("adamw_cpu_offload", adamw_in_bf16),
        ),
    ],
    "clip-grad-norm": [
        (
            "clip_grad_norm to 1: the norm: differs by",
            with_kernel("clip_grad_norm", partial(torch.nn.utils.clip_grad_norm_, norm_type=1)),
        ),
        (
            "clip_grad_norm gives 8.8",
            with_kernel("clip_grad_norm", lambda *given: float(torch.nn.utils.clip_grad_norm_(*given))),
        ),
    ],
    "attention": [
        ("whole rows: outputs: differs by", with_attention(unmasked)),
        ("token 1 after them, static cache of 20: outputs: differs by", with_attention(unmasked_tokens)),
        ("as many heads of keys, whole rows: outputs of padding are not finite", with_attention(infinite_masks)),
        ("grouped heads, whole rows: outputs: differs by", with_attention(mixed_groups)),
        ("whole rows: gradient of keys: differs by", with_attention(frozen_keys)),
        (
            "asked for a Llama: its check of the model failed (AttributeError: ",
            with_kernel("attention", "sdpa", refuses=lambda model: model.soft_cap),
        ),
    ],
    "quantized-weights": [
        (
            "192 x 128: a number comes back more than half a step off",
            with_kernel("quantized_weights", Truncated()),
        ),
        (
            "int8 weights of 'fast', 192 x 128 take 98304 bytes, expected at most",
            with_kernel("quantized_weights", Dense()),
        ),
        ("the product has no gradient to its inputs", with_kernel("quantized_weights", Detached())),
        (
            "int4 weights of 'fast', 192 x 128, 1 rows: the product: differs",
            with_kernel("quantized_weights", WithoutOffset()),
        ),
    ],
    "inference-weights": [
        (
            "keep=True): its restore leaves 1.gate_proj.forward changed",
            with_kernel("inference_weights", leaving_a_forward),
        ),
        (
            "keep=True): restored, 0.weight is not what it was, expected",
            with_kernel("inference_weights", restoring_rounded),
        ),
        ("keep=True): logits of 1 rows: differs by", with_kernel("inference_weights", packed_once())),
        ("logits of token 1 after the prompts: differs by", with_kernel("inference_weights", unmasked_decoding)),
    ],
    "fused-layers": [
        (
            "a fused model: gradient of model.layers.0.input_layernorm.weight: differs",
            with_kernel("fused_layers", freezing_norms),
        ),
        ("a copy of it: logits: differs by", with_kernel("fused_layers", tying_copies)),
    ],
}
"""For each check that needs no other process: part of its error, and the methods with the fault."""
