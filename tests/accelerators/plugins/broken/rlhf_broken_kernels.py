"""Backends of `rlhf_broken` whose kernels are wrong; each is the CPU's but for one fault."""

from copy import deepcopy
from dataclasses import replace
from functools import partial

import torch

from accelerators import KernelImpl, Support
from accelerators.backends.cpu.backend import CPU
from accelerators.backends.cpu.kernels import layers, packed
from accelerators.quantized import QuantizedWeights


def always(accelerator):
    return Support(True, "broken")


def kernel(operation, implementation):
    return KernelImpl(
        operation=operation, name="broken", factory=lambda a: implementation, supported=always, priority=99
    )


class BrokenAdamw(CPU):
    optimizer = torch.optim.AdamW

    def kernel_implementations(self):
        return (*super().kernel_implementations(), kernel("adamw", self.optimizer))


class AdamwOtherEps(BrokenAdamw):
    name = "adamw-other-eps"

    def optimizer(self, params, eps, **options):
        return torch.optim.AdamW(params, eps=0.1, **options)


class AdamwNoDecay(BrokenAdamw):
    name = "adamw-no-decay"

    def optimizer(self, params, **options):
        optimizer = torch.optim.AdamW(params, **options)
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
        return optimizer


class AdamwEmptyGroup(BrokenAdamw):
    name = "adamw-empty-group"

    def optimizer(self, params, **options):
        optimizer = torch.optim.AdamW(params, **options)
        self._first = [group["params"][0] for group in optimizer.param_groups]
        return optimizer


class OffloadRounds(CPU):
    name = "offload-rounds"

    def to_device(self, batch):
        return batch.bfloat16().to(batch.dtype) if batch.dtype == torch.float32 else batch


class OffloadNotPinned(CPU):
    """What it says would need a device that memory is page-locked for."""

    name = "offload-not-pinned"

    def pins_memory(self):
        return True


class HostAdamwInBf16(CPU):
    name = "host-adamw-in-bf16"

    def kernel_implementations(self):
        def optimizer(params, **options):
            made = torch.optim.AdamW(params, **options)

            def rounded(*arguments):
                for group in made.param_groups:
                    for parameter in group["params"]:
                        parameter.data = parameter.data.bfloat16().float()

            made.register_step_post_hook(rounded)
            return made

        return (*super().kernel_implementations(), kernel("adamw_cpu_offload", optimizer))


class ClipOtherNorm(CPU):
    name = "clip-other-norm"

    def kernel_implementations(self):
        return (
            *super().kernel_implementations(),
            kernel("clip_grad_norm", partial(torch.nn.utils.clip_grad_norm_, norm_type=1)),
        )


class ClipGivesFloat(CPU):
    name = "clip-gives-float"

    def kernel_implementations(self):
        def clip(parameters, max_norm):
            return float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))

        return (*super().kernel_implementations(), kernel("clip_grad_norm", clip))


class BrokenAttention(CPU):
    """torch's, registered with transformers, but for what `attend` does wrong."""

    def kernel_implementations(self):
        from transformers import AttentionInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import AttentionMaskInterface, eager_mask

        def attend(module, query, key, value, attention_mask, **options):
            return self.attend(sdpa_attention_forward, module, query, key, value, attention_mask, **options)

        AttentionInterface.register(self.name, attend)
        AttentionMaskInterface.register(self.name, eager_mask)
        return (*super().kernel_implementations(), kernel("attention", self.name))


class AttentionSeesPadding(BrokenAttention):
    """Causal, but deaf to the padding mask."""

    name = "attention-sees-padding"

    def attend(self, plain, module, query, key, value, mask, **options):
        return plain(module, query, key, value, None, **options)


class AttentionSeesEmptyColumns(BrokenAttention):
    """Of one query it believes that it may see all keys, as in a cache that grows."""

    name = "attention-sees-empty-columns"

    def attend(self, plain, module, query, key, value, mask, **options):
        return plain(module, query, key, value, None if query.shape[2] == 1 else mask, **options)


class AttentionOfNothing(BrokenAttention):
    """Masks with infinities: the softmax of a query of padding is 0 / 0."""

    name = "attention-of-nothing"

    def attend(self, plain, module, query, key, value, mask, **options):
        key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
        scores = options["scaling"] * query @ key.transpose(2, 3)
        return (scores.masked_fill(mask < 0, -torch.inf).softmax(-1) @ value).transpose(1, 2), None


class AttentionMixesGroups(BrokenAttention):
    """Query heads share keys with those that lie next but one."""

    name = "attention-mixes-groups"

    def attend(self, plain, module, query, key, value, mask, **options):
        key, value = (x.repeat(1, module.num_key_value_groups, 1, 1) for x in (key, value))
        return plain(torch.nn.Module(), query, key, value, mask, **options)


class AttentionFreezesKeys(BrokenAttention):
    name = "attention-freezes-keys"

    def attend(self, plain, module, query, key, value, mask, **options):
        return plain(module, query, key.detach() + 0 * key, value, mask, **options)


class AttentionCannotBeAsked(CPU):
    """Its implementation looks for something that configurations do not have."""

    name = "attention-cannot-be-asked"

    def kernel_implementations(self):
        offered = replace(kernel("attention", "sdpa"), refuses=lambda model: model.soft_cap)
        return (*super().kernel_implementations(), offered)


# weights in few bits


class Truncated(QuantizedWeights):
    def pack(self, weight, kind):
        packed = super().pack(weight, kind)
        return packed | {"values": packed["values"] - 1} if kind == "int8" else packed


class Dense(QuantizedWeights):
    def pack(self, weight, kind):
        return {"weight": weight}

    def unpack(self, packed, dtype=torch.float32):
        return packed["weight"].to(dtype)


class Detached(QuantizedWeights):
    def multiply(self, inputs, packed):
        return self.product(inputs.detach(), packed).requires_grad_()


class WithoutOffset(QuantizedWeights):
    def product(self, inputs, packed):
        only_steps = torch.tensor([1, 0], dtype=torch.bfloat16)
        return super().product(
            inputs, {**packed, "steps": packed["steps"] * only_steps} if "codes" in packed else packed
        )


class BrokenWeights(CPU):
    def kernel_implementations(self):
        return (*super().kernel_implementations(), kernel("quantized_weights", self.made()))


class WeightsTruncated(BrokenWeights):
    name, made = "weights-truncated", Truncated


class WeightsDense(BrokenWeights):
    name, made = "weights-dense", Dense


class WeightsDetached(BrokenWeights):
    name, made = "weights-detached", Detached


class WeightsWithoutOffset(BrokenWeights):
    name, made = "weights-without-offset", WithoutOffset


# weights for reading


def left_behind(module, keep):
    restore = packed.prepare(module, keep)
    layer = next(layer for layer in module.modules() if "forward" in vars(layer))
    forward = vars(layer)["forward"]

    def restore_all_but_one():
        restore()
        layer.forward = forward

    return restore_all_but_one


def rounded(module, keep):
    restore = packed.prepare(module, keep)

    def restore_in_8_bits():
        restore()
        for parameter in module.parameters():
            parameter.data = parameter.data.to(torch.float8_e5m2).to(parameter.dtype)

    return restore_in_8_bits


class Stale:
    """Packs a module once and for all."""

    def __init__(self):
        self.copies = {}

    def __call__(self, module, keep):
        copy = self.copies.setdefault(id(module), deepcopy(module))
        module.forward = copy.forward
        return partial(delattr, module, "forward")


def unmasked(module, keep):
    """A layer's step of decoding sees every column of the cache."""
    layers = [layer for layer in module.modules() if type(layer).__name__ == "LlamaDecoderLayer"]
    for layer in layers:

        def forward(hidden, attention_mask=None, plain=layer.forward, **named):
            return plain(hidden, attention_mask=None if hidden.shape[1] == 1 else attention_mask, **named)

        layer.forward = forward

    def restore():
        for layer in layers:
            del layer.forward

    return restore


class BrokenReading(CPU):
    def kernel_implementations(self):
        return (*super().kernel_implementations(), kernel("inference_weights", self.made))


class ReadingLeavesAForward(BrokenReading):
    name, made = "reading-leaves-a-forward", staticmethod(left_behind)


class ReadingRounds(BrokenReading):
    name, made = "reading-rounds", staticmethod(rounded)


class ReadingIsStale(BrokenReading):
    name, made = "reading-is-stale", Stale()


class ReadingSeesPadding(BrokenReading):
    name, made = "reading-sees-padding", staticmethod(unmasked)


# fused layers


def without_gradient(module):
    for each in module.modules():
        if layers.part(each) == "RMSNorm":
            each.forward = partial(without_gradient_of, each)


def without_gradient_of(norm, hidden):
    return layers._RMSNorm.apply(hidden, norm.weight.detach(), norm.variance_epsilon) + 0 * norm.weight


def tied(module):
    for each in module.modules():
        if layers.part(each) == "RMSNorm":
            each.forward = lambda hidden, norm=each: type(norm).forward(norm, hidden)


class BrokenFusing(CPU):
    def kernel_implementations(self):
        return (*super().kernel_implementations(), kernel("fused_layers", self.made))


class FusingFreezesNorms(BrokenFusing):
    name, made = "fusing-freezes-norms", staticmethod(without_gradient)


class FusingTiesCopies(BrokenFusing):
    name, made = "fusing-ties-copies", staticmethod(tied)
