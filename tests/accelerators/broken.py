"""Backends of the CPU with one fault each, which the conformance kit must report."""

# Long: one table, with a case for each assertion of the conformance kit

from __future__ import annotations

import contextlib
import json
import random
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from accelerators import AcceleratorError, CaptureError, DeviceInfo, Health, Precision, ShapePolicy
from accelerators.backends.cpu.backend import CPU
from accelerators.backends.cpu.kernels import invariant, layers, packed, sampling
from accelerators.marks import HostMark
from accelerators.quantized import QuantizedWeights
from accelerators.testing.processes import STAGES, Outcome
from tests.accelerators.fake_plugins import fast, raises

ATTENTION = "broken_attention"


def with_kernel(operation: str, made: Any, **fields: Any) -> dict[str, Any]:
    """Return the methods of a backend that has this kernel too."""
    kernel = fast(operation, made, **fields)
    return {"kernel_implementations": lambda self: (*CPU.kernel_implementations(self), kernel)}


def variable_of_caller(name: str) -> Any:
    """Return a local variable of the check that calls the backend."""
    frame = sys._getframe(1)
    while name not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals[name]


# shapes


class Policy(ShapePolicy):
    def __init__(self, rule: Callable[[int], int]) -> None:
        super().__init__("bucketed")
        object.__setattr__(self, "rule", rule)

    def bucket(self, n: int) -> int:
        return self.rule(n)


class PaddingMore(ShapePolicy):
    def __init__(self, columns: int, most: int = 10**9) -> None:
        super().__init__("bucketed")
        object.__setattr__(self, "columns", columns)
        object.__setattr__(self, "most", most)

    def length(self, longest: int, maximum: int) -> int:
        return min(super().length(longest, maximum) + self.columns, maximum + self.most)


def with_buckets(rule: Callable[[int], int]) -> dict[str, Any]:
    return {"shape_policy": lambda self: Policy(rule)}


# precision


class SilentPrecision(Precision):
    def deepspeed_config(self):
        return {}


class RoundingPrecision(Precision):
    def autocast(self):
        return torch.autocast("cpu", dtype=torch.bfloat16)


class PrecisionWithMode(Precision):
    """A precision whose autocast replaces the result or the inputs of linear layers."""

    linear: Callable[..., Any]

    def autocast(self):
        replacement = self.linear

        class Mode(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                return (replacement if func is torch.nn.functional.linear else func)(*args, **(kwargs or {}))

        return Mode()


class InfinitePrecision(PrecisionWithMode):
    def linear(self, inputs, weight, bias):
        return torch.nn.functional.linear(inputs, weight, bias) * torch.inf


class DoubledBackward(PrecisionWithMode):
    def linear(self, inputs, weight, bias):
        return torch.nn.functional.linear(2 * inputs - inputs.detach(), weight, bias)


def alone(kind: type[Precision]) -> dict[str, Any]:
    """Return the method of a backend with this fp32 and no other precision."""

    def fp32(self):
        return kind(torch.float32, "fp32", "fast")

    return with_precision(auto=fp32, fp32=fp32, bf16=raises(AcceleratorError("no bf16 here")))


def with_precision(**wishes: Any) -> dict[str, Any]:
    """Return the method of a backend that answers these wishes with the functions' results."""

    def precision(self, wish="auto"):
        return wishes[wish](self) if wish in wishes else CPU.precision(self, wish)

    return {"precision": precision}


def any_precision(self, wish="auto"):
    return CPU.precision(self, wish if wish in ("auto", "bf16", "fp16") else "fp32")


# state


def to_meta_at_the_top(self, batch):
    return {key: value.to("meta") if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def without_named_tuples(self, batch):
    if isinstance(batch, dict):
        return {key: self.to_device(value) for key, value in batch.items()}
    return tuple(batch) if isinstance(batch, tuple) else batch


def rounded_whole_numbers(self, batch):
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor // 2, batch)


def without_numbers(self, batch):
    return torch.utils._pytree.tree_map_only(float, lambda number: 0.0, batch)


def first_memory(self):
    self.__dict__.setdefault("first", CPU.memory(self))
    return self.first


def largest_memory(self):
    memory = CPU.memory(self)
    self.largest = max(getattr(self, "largest", 0), memory.allocated)
    return replace(memory, allocated=self.largest, peak=max(self.largest, memory.peak))


def with_memory(change: Callable[[Any, int], Any]) -> dict[str, Any]:
    """Return the method of a backend that changes its figures, given them and the number of earlier calls."""

    def memory(self):
        self.calls = getattr(self, "calls", -1) + 1
        return change(CPU.memory(self), self.calls)

    return {"memory": memory}


def restoring_python_alone(self, state):
    random.setstate(state["python"])


def seed_without_number(self, n):
    CPU.seed(self, 7)


def remember_state(self):
    self.state = CPU.rng_state(self)
    return self.state


def restore_remembered_state(self, state):
    if state is self.state:
        CPU.set_rng_state(self, state)


class MillisecondMark(HostMark):
    def seconds_since(self, earlier):
        return 1000 * super().seconds_since(earlier)


def slow_health(self):
    time.sleep(2.1)
    return Health()


def forgetful_health(self):
    self.left = getattr(self, "left", 2) - 1
    return Health(errors={"errors": self.left})


def lost_after_teardown(self, batch):
    self.batches = getattr(self, "batches", 0) + 1
    return CPU.to_device(self, batch) * (self.batches == 1)


class NoisyPrecision(PrecisionWithMode):
    def linear(self, inputs, weight, bias):
        return torch.nn.functional.linear(inputs * (1 + torch.rand(()) / 8), weight, bias)


RANDOM_GRADIENTS = {"precision": lambda self, wish="auto": NoisyPrecision(torch.float32, "fp32", "fast")}

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


def warming_up(self, fn, key):
    """Return the function after a first call, whose changes of its state stay."""
    checked = CPU.capture(self, fn, key)
    checked(torch.ones(8))
    return checked


def changing_results(change: Callable[[Any], Any]) -> dict[str, Any]:
    def capture(self, fn, key):
        checked = CPU.capture(self, fn, key)
        return lambda x: {name: change(value) for name, value in checked(x).items()}

    return {"capture": capture}


def running_backward_twice(self, tag):
    if tag == "check/backward":
        for parameter in variable_of_caller("network").parameters():
            parameter.grad.mul_(2)


def compiling_boundary(self, tag):
    self.compiled = getattr(self, "compiled", 0) + 1


def refusing_without_place(self, fn, key):
    return raises(CaptureError("a host read"))


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


def adamw_with_one_decay(params, weight_decay, **options):
    optimizer = torch.optim.AdamW(params, weight_decay=weight_decay, **options)
    for group in optimizer.param_groups:
        group["weight_decay"] = weight_decay
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


def adamw_that_moves_parameters(params, **options):
    """Leave the parameters on another device after the last step."""
    optimizer = torch.optim.AdamW(params, **options)

    def move_parameters(*arguments):
        for parameter, state in optimizer.state.items():
            if state["step"] == 4:
                torch.utils.swap_tensors(parameter, torch.nn.Parameter(torch.empty_like(parameter, device="meta")))

    optimizer.register_step_post_hook(move_parameters)
    return optimizer


def measuring_alone(parameters, max_norm):
    """Return the norm, and scale nothing."""
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def pins_nothing(self):
    mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor).start()
    return True


# attention: torch's, with one fault each


def with_attention(attend: Callable[..., Any], mask: Callable[..., Any] | None = None) -> dict[str, Any]:
    def factory(accelerator):
        from transformers import AttentionInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import AttentionMaskInterface, eager_mask

        AttentionInterface.register(ATTENTION, partial(attend, sdpa_attention_forward))
        AttentionMaskInterface.register(ATTENTION, partial(mask, eager_mask) if mask else eager_mask)
        return ATTENTION

    return with_kernel("attention", None, factory=factory)


def unmasked(plain, module, query, key, value, mask, **options):
    return plain(module, query, key, value, None, **options)


def nan_gradients_of_64_columns(plain, module, query, key, value, mask, **options):
    """As cuDNN 9.19 on an H200: queries that see nothing have NaN gradients, if there are 64 columns mod 128."""
    if query.requires_grad and query.shape[2] % 128 == 64:
        empty = mask.amax(-1).unsqueeze(-1) < 0
        query = query.clone()
        query.register_hook(lambda gradient: gradient.masked_fill(empty, torch.nan))
    return plain(module, query, key, value, mask, **options)


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


def keys_without_gradient(plain, module, query, key, value, mask, **options):
    return plain(module, query, key.detach(), value, mask, **options)


def keys_with_infinite_gradient(plain, module, query, key, value, mask, **options):
    return plain(module, query, key + (0 * key).sqrt(), value, mask, **options)


def infinite_masks_in_rollouts(plain, *arguments, **options):
    return (plain if torch.is_grad_enabled() else partial(infinite_masks, plain))(*arguments, **options)


def without_dropout(plain, *arguments, **options):
    return plain(*arguments, **options | {"dropout": 0.0})


def heads_before_tokens(plain, *arguments, **options):
    output, weights = plain(*arguments, **options)
    return output.transpose(1, 2), weights


def frozen_keys_in_later_layers(plain, module, *arguments, **options):
    return (partial(frozen_keys, plain) if module.layer_idx else plain)(module, *arguments, **options)


def right(plain, *arguments, **options):
    return plain(*arguments, **options)


def mask_without_padding(plain, *arguments, config, attention_mask=None, **options):
    """Leave out the padding in a model of several layers."""
    return plain(
        *arguments, config=config, attention_mask=attention_mask if config.num_hidden_layers == 1 else None, **options
    )


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


class UnpackingAs(QuantizedWeights):
    def __init__(self, change: Callable[[Any], Any]) -> None:
        self.change = change

    def unpack(self, tensors, dtype=torch.float32):
        return self.change(super().unpack(tensors, dtype))


class DoublePrecision(QuantizedWeights):
    def product(self, inputs, tensors):
        return super().product(inputs, tensors).double()


class BackwardOfAnother(QuantizedWeights):
    def multiply(self, inputs, tensors):
        change = inputs - inputs.detach()
        return self.product(inputs.detach(), tensors) + change @ self.unpack(tensors, inputs.dtype).flip(0).T


class DoubledWithoutGradient(QuantizedWeights):
    def multiply(self, inputs, tensors):
        return super().multiply(inputs, tensors) * (1 if torch.is_grad_enabled() else 2)


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


def with_restore(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a `prepare` whose restore changes the first parameter of the module too."""

    def prepare(module, keep):
        restore = packed.prepare(module, keep)

        def restore_and_change():
            restore()
            change(next(module.parameters()))

        return restore_and_change

    return prepare


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


def norm_with_frozen_weight(norm, hidden):
    return layers._RMSNorm.apply(hidden, norm.weight.detach(), norm.variance_epsilon)


def norm_doubled_without_gradient(norm, hidden):
    return type(norm).forward(norm, hidden) * (1 if torch.is_grad_enabled() else 2)


def drawn_but(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """The CPU's `sampling`, but other tokens."""

    def draw(logits: Any, uniform: Any, temperature: float) -> Any:
        tokens, log_probs = sampling.draw(logits, uniform, temperature)
        return change(tokens), log_probs

    return draw


def scored_at_temperature_1(logits: Any, uniform: Any, temperature: float) -> Any:
    tokens, _ = sampling.draw(logits, uniform, temperature)
    return tokens, logits.float().log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def nan_scored_as_0(logits: Any, uniform: Any, temperature: float) -> Any:
    tokens, log_probs = sampling.draw(logits, uniform, temperature)
    return tokens, log_probs.nan_to_num()


def invariant_but(change: Callable[[Any], Any], leaves: bool = False) -> Callable[[], Any]:
    """The CPU's `batch_invariant`, but a change of the gates of layers, which stays after the block if it `leaves`."""
    plain = torch.nn.functional.silu

    def silu(numbers: Any, inplace: bool = False) -> Any:
        return change(plain(numbers)) if numbers.dim() == 3 else plain(numbers)

    @contextlib.contextmanager
    def context() -> Any:
        patch = mock.patch.object(torch.nn.functional, "silu", silu)
        with invariant.batch_invariant(), contextlib.nullcontext() if leaves else patch:
            yield
        if leaves:
            patch.start()

    return context


def double_the_gradient(output: Any) -> Any:
    if output.requires_grad:
        output.register_hook(lambda gradient: 2 * gradient)
    return output


def replacing_norms(forward: Callable[..., Any]) -> Callable[[Any], None]:
    def fuse(module):
        for layer in module.modules():
            if layers.part(layer) == "RMSNorm":
                layer.forward = MethodType(forward, layer)

    return fuse


def adding_parameters(module):
    module.scale = torch.nn.Parameter(torch.ones(1))


def tying_copies(module):
    for layer in module.modules():
        if layers.part(layer) == "RMSNorm":
            layer.forward = lambda hidden, norm=layer: type(norm).forward(norm, hidden)


META = {"bind": lambda self, local_rank: torch.device("meta")}
LIBRARY = raises(ImportError("libfast.so"))
DIFFERS = "parameter 0 after 4 steps: differs by"

BROKEN: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "interface": [
        ("rlhf calls step_boundary(tag), which it does not take: too many", {"step_boundary": lambda self: None}),
    ],
    "types": [
        ("pins_memory() returns 'no', expected bool", {"pins_memory": lambda self: "no"}),
        ("dist_backend() returns 'hcll', expected one of torch's: ", {"dist_backend": lambda self: "hcll"}),
        ("absent names graph_captur, expected some of adamw, ", {"absent": {"graph_captur": "none here"}}),
        ("deepspeed_name is 7, not a str", {"deepspeed_name": 7}),
        (
            "allocator_setting is 'CONF', expected the name of a variable and a value",
            {"allocator_setting": "CONF"},
        ),
        (
            "refuse_capture() returns None, expected a reason or an empty text",
            {"refuse_capture": lambda self, key: None},
        ),
        (
            "info() has the uuids ('A', 'A'), expected none, or a different one for each of 2",
            {"info": lambda self: DeviceInfo("NPU", 2, "none", uuids=("A", "A"))},
        ),
        ("chunk_elements is 0, expected an int above 0", {"chunk_elements": 0}),
        (
            "kernel_implementations() contains 'adamw', expected only KernelImpl",
            {"kernel_implementations": lambda self: (*CPU.kernel_implementations(self), "adamw")},
        ),
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
        ("length(1, maximum=1) is 2, expected 1 to 1", {"shape_policy": lambda self: PaddingMore(1)}),
        (
            "length(1, maximum=48) is 33, expected the bucket, 32, or the maximum",
            {"shape_policy": lambda self: PaddingMore(1, most=0)},
        ),
    ],
    "precision": [
        (
            "precision('bf16').deepspeed_config() enables nothing, expected ['bf16']",
            with_precision(bf16=lambda self: SilentPrecision(torch.bfloat16, "bf16", "yes")),
        ),
        ("fp32: the logits of a forward and backward pass: differs by", alone(RoundingPrecision)),
        ("fp32: the gradient of a forward and backward pass: differs by", alone(DoubledBackward)),
        ("fp32: the logits of a forward and backward pass are not finite", alone(InfinitePrecision)),
        (
            "precision('fp16') is neither granted nor refused: ",
            with_precision(fp16=raises(ValueError("fp16"))),
        ),
        (
            "precision('fp16') is refused without naming it: no",
            with_precision(fp16=raises(AcceleratorError("no"))),
        ),
        (
            "precision('fp16') gives fp32, expected fp16 or a refusal",
            with_precision(fp16=lambda self: CPU.precision(self, "fp32")),
        ),
        ("precision('fp32') has no reason", with_precision(fp32=lambda self: Precision(torch.float32, "fp32", ""))),
        (
            "precision('auto') gives bf16, which precision('bf16') refuses",
            with_precision(
                auto=lambda self: Precision(torch.bfloat16, "bf16", "yes"),
                bf16=raises(AcceleratorError("no bf16 here")),
            ),
        ),
        ("precision('fp12') is granted, expected an AcceleratorError", {"precision": any_precision}),
        (
            "precision('auto') gives (torch.float32, True, {}), but precision('fp32') (torch.float32, False",
            with_precision(auto=lambda self: replace(CPU.precision(self, "fp32"), loss_scaling=True)),
        ),
    ],
    "timing": [
        ("marks around ", {"mark": lambda self: MillisecondMark()}),
        ("named_range('conformance/range') shows as no range", {"named_range": lambda self, name: nullcontext()}),
    ],
    "deterministic": [
        ("deterministic(True) returns ('',), expected a tuple of reasons", {"deterministic": lambda self, on: ("",)}),
        ("deterministic(True) names nothing, but the gradient of", RANDOM_GRADIENTS),
        (
            "after deterministic(False), torch still refuses",
            {"deterministic": lambda self, on: CPU.deterministic(self, True)},
        ),
    ],
    "health": [
        ("health() took 2.1 s, expected at most 2 s", {"health": slow_health}),
        ("health() has 7, expected words", {"health": lambda self: Health({"clock": 7})}),
        ("health() counts 0 errors after 1: expected that counts never fall", {"health": forgetful_health}),
    ],
    "teardown": [
        ("device() after teardown() is cpu, expected an AcceleratorError", {"teardown": lambda self: None}),
        ("after teardown() and bind(0), the sum of 8 ones is 0.0", {"to_device": lost_after_teardown}),
    ],
    "placement": [
        ("device() before bind() is cpu, expected an AcceleratorError", {"_device": torch.device("cpu")}),
        ("to_device leaves a tensor in a dict on cpu, not meta", META | {"to_device": to_meta_at_the_top}),
        ("to_device makes a tuple of a named tuple", {"to_device": without_named_tuples}),
        ("to_device changes a tensor in a dict: found ", {"to_device": rounded_whole_numbers}),
        ("to_device changes what is no tensor: (1, None, 0.0)", {"to_device": without_numbers}),
        (
            "bind(0) returns cpu, but device() is meta: expected the same",
            {"device": lambda self: torch.device("meta") if CPU.device(self) else None},
        ),
    ],
    "random-numbers": [
        ("seed(7) twice: other samples of Python", {"seed": lambda self, n: torch.manual_seed(n)}),
        (
            "torch.load(weights_only=True) does not read a saved rng_state()",
            {"rng_state": lambda self: CPU.rng_state(self) | {"generator": random.Random(1)}},
        ),
        ("seed(7) and seed(8) give the same samples of Python, torch on", {"seed": seed_without_number}),
        ("set_rng_state(rng_state()): other samples of torch on the CPU", {"set_rng_state": restoring_python_alone}),
        (
            "set_rng_state of a saved state: other samples of Python",
            {"rng_state": remember_state, "set_rng_state": restore_remembered_state},
        ),
    ],
    "memory": [
        ("memory().allocated grew by 0 MiB with a block of 128 MiB", {"memory": first_memory}),
        ("memory().allocated fell by 0 MiB when a block of 128 MiB was freed", {"memory": largest_memory}),
        (
            "before the block, expected allocated <= peak <= total",
            with_memory(lambda memory, calls: replace(memory, peak=memory.allocated - 1)),
        ),
        (
            "memory().peak shows ",
            with_memory(lambda memory, calls: replace(memory, peak=memory.allocated)),
        ),
        (
            "memory().total changed from ",
            with_memory(lambda memory, calls: replace(memory, total=memory.total + calls)),
        ),
        (
            "empty_cache() changed a tensor that is in use",
            {"empty_cache": lambda self: variable_of_caller("kept").zero_()},
        ),
        ("the peak fell by 0 MiB with reset_peak() after ", {"reset_peak": lambda self: None}),
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
        ("losses of three steps with step boundaries: differs by", {"step_boundary": running_backward_twice}),
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
        ("call 1 of 5 of a captured function, its state: differs by", {"capture": warming_up}),
        (
            "call 1 of 5 of a captured function, a function of its input: there is no tensor",
            changing_results(lambda value: None),
        ),
        (
            "call 1 of 5 of a captured function, a function of its input: found shape (1, 8), expected (8,)",
            changing_results(lambda value: value.unsqueeze(0)),
        ),
    ],
    "capture-refusal": [
        ("capture lets .item() through, expected CaptureError", {"capture": lambda self, fn, key: fn}),
        ("capture refuses .item() without naming capture.py:", {"capture": refusing_without_place}),
        ("capture answers .item() with PluginError, expected CaptureError", {"capture": raising_another_error}),
    ],
    "adamw": [
        (f"adamw over a list of parameters: {DIFFERS}", with_kernel("adamw", adamw_with_other_eps)),
        (f"adamw over groups: {DIFFERS}", with_kernel("adamw", adamw_with_one_decay)),
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
            "pin_memory() of a torch.float32 on cpu gives a tensor that is not page-locked",
            {"pins_memory": pins_nothing},
        ),
        (
            "adamw_cpu_offload over groups, one of them empty failed (PluginError: ",
            with_kernel("adamw_cpu_offload", adamw_without_empty_groups),
        ),
        (
            "adamw_cpu_offload over a list of parameters: parameter 0 is on meta after 4 steps, not on cpu",
            with_kernel("adamw_cpu_offload", adamw_that_moves_parameters),
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
        ("clip_grad_norm to 1: the gradients: differs by", with_kernel("clip_grad_norm", measuring_alone)),
        (
            "clip_grad_norm gives 8.8",
            with_kernel("clip_grad_norm", lambda *given: float(torch.nn.utils.clip_grad_norm_(*given))),
        ),
    ],
    "attention": [
        ("whole rows: outputs: differs by", with_attention(unmasked)),
        ("token 1 after them, static cache of 72: outputs: differs by", with_attention(unmasked_tokens)),
        ("as many heads of keys, whole rows: outputs of padding are not finite", with_attention(infinite_masks)),
        ("grouped heads, whole rows: outputs: differs by", with_attention(mixed_groups)),
        ("whole rows: gradient of keys: differs by", with_attention(frozen_keys)),
        ("whole rows: keys have no gradient", with_attention(keys_without_gradient)),
        ("whole rows: gradients of keys are not finite", with_attention(keys_with_infinite_gradient)),
        ("whole rows: gradients of queries are not finite", with_attention(nan_gradients_of_64_columns)),
        ("prompts, static cache of 72: outputs are not finite", with_attention(infinite_masks_in_rollouts)),
        (": gives (3, 4, 64, 16), expected (3, 64, 4, 16)", with_attention(heads_before_tokens)),
        ("dropout of 0.5: multiplies a lone value by 1.00, expected 0 or 2", with_attention(without_dropout)),
        (
            "attention 'broken_attention' of transformers against 'eager', rows padded left: logits: differs by",
            with_attention(right, mask_without_padding),
        ),
        (
            "attention 'broken_attention' of transformers against 'eager', rows padded left: "
            "gradient of the embedding: differs by",
            with_attention(frozen_keys_in_later_layers),
        ),
        (
            "attention 'sdpa', asked for a Llama: its check of the model failed (AttributeError: ",
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
            "192 x 128: unpacked as torch.bfloat16, expected torch.float32",
            with_kernel("quantized_weights", UnpackingAs(torch.Tensor.bfloat16)),
        ),
        (
            "192 x 128: unpacked as (128, 192), expected (192, 128)",
            with_kernel("quantized_weights", UnpackingAs(torch.Tensor.t)),
        ),
        ("the product is torch.float64, expected torch.", with_kernel("quantized_weights", DoublePrecision())),
        ("the inputs' gradient: differs by", with_kernel("quantized_weights", BackwardOfAnother())),
        (
            "the product without a gradient: differs by",
            with_kernel("quantized_weights", DoubledWithoutGradient()),
        ),
        (
            "int4 weights of 'fast', 192 x 128, 1 rows: the product: differs",
            with_kernel("quantized_weights", WithoutOffset()),
        ),
    ],
    "inference-weights": [
        (
            "prepare(module, keep=True): its restore leaves 1.gate_proj.forward changed",
            with_kernel("inference_weights", leaving_a_forward),
        ),
        (
            "prepare(module, keep=True): restored, 0.weight is not what it was, expected",
            with_kernel("inference_weights", restoring_rounded),
        ),
        (
            "prepare(module, keep=True): restored, 0.weight gets no gradient",
            with_kernel("inference_weights", with_restore(lambda parameter: parameter.requires_grad_(False))),
        ),
        (
            "prepare(module, keep=True): restored, the gradient of 0.weight: differs by",
            with_kernel(
                "inference_weights",
                with_restore(lambda parameter: parameter.register_hook(lambda gradient: 2 * gradient)),
            ),
        ),
        ("prepare(module, keep=True): logits of 1 rows: differs by", with_kernel("inference_weights", packed_once())),
        ("logits of token 1 after the prompts: differs by", with_kernel("inference_weights", unmasked_decoding)),
    ],
    "fused-layers": [
        (
            "a fused model: gradient of model.layers.0.input_layernorm.weight: differs",
            with_kernel("fused_layers", replacing_norms(norm_without_gradient)),
        ),
        ("a copy of it: logits: differs by", with_kernel("fused_layers", tying_copies)),
        (
            "a fused model: model.layers.0.input_layernorm.weight has no gradient",
            with_kernel("fused_layers", replacing_norms(norm_with_frozen_weight)),
        ),
        (
            "a fused model: logits without gradients: differs by",
            with_kernel("fused_layers", replacing_norms(norm_doubled_without_gradient)),
        ),
        ("fused_layers: it changes names of parameters", with_kernel("fused_layers", adding_parameters)),
    ],
    "sampling": [
        (f"sampling at temperature 1.0: {fault}", with_kernel("sampling", drawn_but(change)))
        for fault, change in (
            ("draws tokens outside of the vocabulary of 5003", lambda tokens: tokens + 5003),
            ("draws tokens whose cumulative probability is off by", torch.ones_like),
            ("draws tokens of probability 0", torch.zeros_like),
        )
    ]
    + [
        (
            "sampling at temperature 0.7: log-probabilities differ by",
            with_kernel("sampling", scored_at_temperature_1),
        ),
        ("sampling: the log-probability of NaN is 0.0, expected NaN", with_kernel("sampling", nan_scored_as_0)),
    ],
    "batch-invariant": [
        ("batch_invariant: its", with_kernel("batch_invariant", contextlib.nullcontext)),
        (
            "batch_invariant: logits of a Llama: differs by",
            with_kernel("batch_invariant", invariant_but(lambda output: 1.5 * output)),
        ),
        (
            "batch_invariant: decoded logits of token 1 after the prompts differ",
            with_kernel("batch_invariant", invariant_but(lambda output: output * (1 + 1e-6 * (output.shape[1] == 1)))),
        ),
        (
            "batch_invariant: logits of row 0 alone",
            with_kernel("batch_invariant", invariant_but(lambda output: output * (1 + 1e-6 * (len(output) == 1)))),
        ),
        (
            "batch_invariant: gradient of model.embed_tokens.weight: differs",
            with_kernel("batch_invariant", invariant_but(double_the_gradient)),
        ),
        (
            "batch_invariant: numbers after the block differ",
            with_kernel("batch_invariant", invariant_but(lambda output: output * (1 + 1e-6), leaves=True)),
        ),
    ],
}
"""For each check that needs no other process: part of its error, and the methods with the fault."""

# ends of processes


def with_records(*records: dict[str, Any]) -> Callable[..., list[Outcome]]:
    """Return a run that writes these records for each stage."""

    def run(commands, environments, folders):
        for stage in STAGES:
            path = Path(commands[0][commands[0].index("--output") + 1], stage, "metrics.jsonl")
            path.parent.mkdir(parents=True)
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return [Outcome()]

    return run


COLLECTIVES = {
    "all_reduce": [3.0] * 4,
    "all_gather": [1.0, 1.0, 2.0, 2.0],
    "broadcast": [10.0] * 3,
    "all_gather_object": [{"rank": 0}, {"rank": 1}],
}
DEEPSPEED = {"device": "npu", "expected": "npu", "precision": "fp32", "errors": {}, "losses": {}}
STEPS = [{"step": step, "learning_rate": 1e-3, "loss": 1.0} for step in range(1, 5)]


def loss_of(updates: int) -> float:
    from accelerators.testing import reference

    return reference.losses()[updates]


OUTCOMES: list[tuple[str, str, Any]] = [
    ("discovery", "the check's process failed: ImportError: libfast.so", [Outcome(error="ImportError: libfast.so")]),
    (
        "collectives",
        "broadcast: rank 1 got [0.0, 0.0, 0.0], expected [10.0, 10.0, 10.0]",
        [Outcome(COLLECTIVES), Outcome(COLLECTIVES | {"broadcast": [0.0] * 3})],
    ),
    ("deepspeed", "prepare_deepspeed() failed: ImportError: mpi4py", [Outcome(error="ImportError: mpi4py")]),
    (
        "deepspeed",
        "after prepare_deepspeed(), DeepSpeed's device is 'cpu', expected 'npu'",
        [Outcome(DEEPSPEED | {"device": "cpu"})],
    ),
    (
        "deepspeed-step",
        "ZeRO 0 in fp32: loss 0.0000 at step 2, expected ",
        [Outcome(DEEPSPEED | {"losses": {"0": [(0, loss_of(0)), (1, 0.0)]}})],
    ),
    (
        "deepspeed-step",
        "ZeRO 0: RuntimeError: no such operator",
        [Outcome(DEEPSPEED | {"errors": {"0": "RuntimeError: no such operator"}})],
    ),
    (
        "deepspeed-step",
        "ZeRO 0: no step was taken in 2, loss scaling skipped them all",
        [Outcome(DEEPSPEED | {"losses": {"0": [(0, loss_of(0)), (0, loss_of(0))]}})],
    ),
    (
        "deepspeed-step",
        "DeepSpeed's process failed at its end: SIGSEGV",
        [Outcome(DEEPSPEED | {"losses": {"0": [(0, loss_of(0)), (1, loss_of(1))]}}, "SIGSEGV")],
    ),
    ("run", "rlhf --accelerator cpu: SIGSEGV", lambda *arguments: [Outcome(error="SIGSEGV")]),
    ("run", "sft: metrics.jsonl has 3 steps, expected 4", with_records(*STEPS[1:])),
    (
        "run",
        "sft: compilations rose from 3 to 4 after step 3, expected no late compilation",
        with_records(*(step | {"compilations": step["step"]} for step in STEPS)),
    ),
    ("run", "sft: loss is not finite at step 4", with_records(*STEPS[:3], STEPS[3] | {"loss": None})),
]
"""For checks in other processes: part of the error, and the ends of these processes."""
