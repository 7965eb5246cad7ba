"""The backends of `rlhf_broken`: the CPU's, each but for one fault."""

import contextlib
import os
import random
from dataclasses import replace
from functools import partial

import rlhf_broken
import torch

from accelerators import AcceleratorError, CaptureError, DeepSpeedView, KernelImpl, Precision, ShapePolicy, Support
from accelerators.cpu import CPU
from accelerators.quantized import QuantizedWeights

BF16 = Precision(torch.bfloat16, "bf16", "emulated")


def always(accelerator):
    return Support(True, "broken")


def kernel(operation, implementation):
    return KernelImpl(
        operation=operation, name="broken", factory=lambda a: implementation, supported=always, priority=99
    )


# discovery


class ProbeImportsTorch(CPU):
    name = "probe-imports-torch"


class ProbeOpensDevice(CPU):
    name = "probe-opens-device"

    def bind(self, local_rank):
        if rlhf_broken.OPENED_BY not in (None, os.getpid()):
            raise RuntimeError("the device cannot be used in a forked process")
        return super().bind(local_rank)


class ProbeNumbersDevices(CPU):
    name = "probe-numbers-devices"


# memory that is lacking


class AnyErrorIsLack(CPU):
    name = "any-error-is-lack"

    def is_out_of_memory(self, error):
        return True


class LackNotTold(CPU):
    """Its runtime has words of its own."""

    name = "lack-not-told"

    def bind(self, local_rank):
        return torch.device("meta")

    def step_boundary(self, tag):
        raise ValueError("tiles")


# operations


class OperationMissing(CPU):
    name = "operation-missing"

    def capabilities(self):
        return {name: support for name, support in super().capabilities().items() if name != "graph_capture"}


class RefusalWithoutReason(CPU):
    name = "refusal-without-reason"

    def capabilities(self):
        refusal = object.__new__(Support)
        for field, value in (("ok", False), ("reason", ""), ("implementation", "")):
            object.__setattr__(refusal, field, value)
        return super().capabilities() | {"quantized_weights": refusal}


class RefusedButThere(CPU):
    name = "refused-but-there"

    def capabilities(self):
        return super().capabilities() | {"adamw_cpu_offload": Support(False, "not tested yet")}


class FactoryRaises(CPU):
    name = "factory-raises"

    def kernels(self):
        def factory(accelerator):
            raise ImportError("libfast.so: no such file")

        return (
            *super().kernels(),
            KernelImpl(operation="adamw", name="fast", factory=factory, supported=always, priority=99),
        )


# shapes


class Policy(ShapePolicy):
    def __init__(self, rule):
        super().__init__("bucketed")
        object.__setattr__(self, "rule", rule)

    def bucket(self, n):
        return self.rule(n)


class BucketNotIdempotent(CPU):
    name = "bucket-not-idempotent"

    def shape_policy(self):
        return Policy(lambda n: n + 1)


class BucketNotMonotone(CPU):
    name = "bucket-not-monotone"

    def shape_policy(self):
        return Policy(lambda n: 64 if n <= 16 or 32 < n <= 64 else 32 if n <= 32 else n)


class BucketTooShort(CPU):
    name = "bucket-too-short"

    def shape_policy(self):
        return Policy(lambda n: min(n, 512))


# precision


class Bf16InFp32(CPU):
    name = "bf16-in-fp32"

    def precision(self, wish="auto"):
        return Precision(torch.float32, "bf16", "nearly") if wish == "bf16" else super().precision(wish)


class SilentPrecision(Precision):
    def deepspeed_config(self):
        return {}


class Bf16NotTold(CPU):
    name = "bf16-not-told"

    def precision(self, wish="auto"):
        return SilentPrecision(torch.bfloat16, "bf16", "yes") if wish == "bf16" else super().precision(wish)


class RoundingPrecision(Precision):
    def autocast(self):
        return torch.autocast("cpu", dtype=torch.bfloat16)


class Fp32ThatRounds(CPU):
    name = "fp32-that-rounds"

    def precision(self, wish="auto"):
        if wish == "bf16":
            raise AcceleratorError("no bf16 here")
        return RoundingPrecision(torch.float32, "fp32", "fast") if wish in ("auto", "fp32") else super().precision(wish)


class PrecisionRaisesValueerror(CPU):
    name = "precision-raises-valueerror"

    def precision(self, wish="auto"):
        if wish == "fp16":
            raise ValueError("fp16")
        return super().precision(wish)


class PrecisionTakesAnything(CPU):
    name = "precision-takes-anything"

    def precision(self, wish="auto"):
        return super().precision(wish if wish in ("auto", "bf16", "fp16") else "fp32")


class AutoDiffers(CPU):
    name = "auto-differs"

    def precision(self, wish="auto"):
        return replace(super().precision("fp32"), loss_scaling=True) if wish == "auto" else super().precision(wish)


# state


class DeviceBeforeBind(CPU):
    name = "device-before-bind"
    _device = torch.device("cpu")


class NestedTensorForgotten(CPU):
    """On a device other than the CPU, where it shows."""

    name = "nested-tensor-forgotten"

    def bind(self, local_rank):
        return torch.device("meta")

    def to_device(self, batch):
        return {key: value.to("meta") if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


class NamedTupleLost(CPU):
    name = "named-tuple-lost"

    def to_device(self, batch):
        if isinstance(batch, dict):
            return {key: self.to_device(value) for key, value in batch.items()}
        return tuple(batch) if isinstance(batch, tuple) else batch


class SeedForgetsPython(CPU):
    name = "seed-forgets-python"

    def seed(self, n):
        torch.manual_seed(n)


class StateNotRestored(CPU):
    name = "state-not-restored"

    def set_rng_state(self, state):
        random.setstate(state["python"])


class StateNotLoadable(CPU):
    name = "state-not-loadable"

    def rng_state(self):
        return super().rng_state() | {"generator": random.Random(1)}


class MemoryStandsStill(CPU):
    name = "memory-stands-still"
    _first = None

    def memory(self):
        self._first = self._first or super().memory()
        return self._first


class MemoryNeverFalls(CPU):
    name = "memory-never-falls"
    _largest = 0

    def memory(self):
        memory = super().memory()
        self._largest = max(self._largest, memory.allocated)
        return replace(memory, allocated=self._largest, peak=max(self._largest, memory.peak))


# execution


class BoundaryWaits(CPU):
    name = "boundary-waits"

    def step_boundary(self, tag):
        self.synchronize()


class BoundaryComputes(CPU):
    name = "boundary-computes"

    def step_boundary(self, tag):
        torch.zeros(1)


class BoundaryDraws(CPU):
    name = "boundary-draws"

    def step_boundary(self, tag):
        random.random()


class BoundaryCompiles(CPU):
    name = "boundary-compiles"
    _compiled = 0

    def step_boundary(self, tag):
        self._compiled += 1

    def compilations(self):
        return self._compiled


class LazyBoundary(BoundaryWaits):
    """Not broken: a lazy backend has work to do at its boundaries."""

    name = "lazy-boundary"

    def is_lazy(self):
        return True


class CaptureStale(CPU):
    """Replays the first call, whatever the input."""

    name = "capture-stale"

    def capture(self, fn, key):
        fn, first = super().capture(fn, key), []

        def replay(x):
            first[:] = first or [x]
            return fn(first[0])

        return replay


class CaptureOverwrites(CPU):
    """Gives out the tensors that the next replay writes into."""

    name = "capture-overwrites"

    def capture(self, fn, key):
        fn, held = super().capture(fn, key), {}

        def replay(x):
            for name, value in fn(x).items():
                held.setdefault(name, torch.empty_like(value)).copy_(value)
            return dict(held)

        return replay


class CaptureLetsItemThrough(CPU):
    name = "capture-lets-item-through"

    def capture(self, fn, key):
        return fn


class CaptureOtherError(CPU):
    name = "capture-other-error"

    def capture(self, fn, key):
        checked = super().capture(fn, key)

        def call(*arguments):
            with contextlib.suppress(CaptureError):
                return checked(*arguments)
            raise RuntimeError("operation not permitted when stream is capturing")

        return call


# kernels


class BrokenAdamw(CPU):
    optimizer = torch.optim.AdamW

    def kernels(self):
        return (*super().kernels(), kernel("adamw", self.optimizer))


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

    def kernels(self):
        def optimizer(params, **options):
            made = torch.optim.AdamW(params, **options)

            def rounded(*arguments):
                for group in made.param_groups:
                    for parameter in group["params"]:
                        parameter.data = parameter.data.bfloat16().float()

            made.register_step_post_hook(rounded)
            return made

        return (*super().kernels(), kernel("adamw_cpu_offload", optimizer))


class ClipOtherNorm(CPU):
    name = "clip-other-norm"

    def kernels(self):
        return (*super().kernels(), kernel("clip_grad_norm", partial(torch.nn.utils.clip_grad_norm_, norm_type=1)))


class ClipGivesFloat(CPU):
    name = "clip-gives-float"

    def kernels(self):
        def clip(parameters, max_norm):
            return float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))

        return (*super().kernels(), kernel("clip_grad_norm", clip))


class AttentionSeesPadding(CPU):
    """Causal, but deaf to the padding mask."""

    name = "attention-sees-padding"

    def kernels(self):
        from transformers import AttentionInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        def attend(module, query, key, value, attention_mask, **options):
            return sdpa_attention_forward(module, query, key, value, None, **options)

        AttentionInterface.register("sees-padding", attend)
        return (*super().kernels(), kernel("attention", "sees-padding"))


class AttentionCannotBeAsked(CPU):
    """Its implementation looks for something that configurations do not have."""

    name = "attention-cannot-be-asked"

    def kernels(self):
        offered = replace(kernel("attention", "sdpa"), refuses=lambda model: model.soft_cap)
        return (*super().kernels(), offered)


# processes


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
    def kernels(self):
        return (*super().kernels(), kernel("quantized_weights", self.made()))


class WeightsTruncated(BrokenWeights):
    name, made = "weights-truncated", Truncated


class WeightsDense(BrokenWeights):
    name, made = "weights-dense", Dense


class WeightsDetached(BrokenWeights):
    name, made = "weights-detached", Detached


class WeightsWithoutOffset(BrokenWeights):
    name, made = "weights-without-offset", WithoutOffset


class OtherDistBackend(CPU):
    name = "other-dist-backend"

    def dist_backend(self):
        return "nccl"


class Loud(CPU):
    """Not broken: it only prints."""

    name = "loud"

    def memory(self):
        print("asked for memory")
        os.write(2, b"asked for memory\n")
        return super().memory()


class OneDevice(CPU):
    """Not broken: two ranks need two devices here."""

    name = "one-device"

    def bind(self, local_rank):
        if local_rank:
            raise AcceleratorError(f"local rank {local_rank}: there is one device")
        return super().bind(local_rank)


class DeepspeedNotTold(CPU):
    name = "deepspeed-not-told"
    deepspeed_name = "chip"

    def prepare_deepspeed(self):
        return DeepSpeedView("none", "chip", "gloo", (), "0")


class ClippedPrecision(Precision):
    def deepspeed_config(self):
        return {"gradient_clipping": 1e-9}


class DeepspeedClips(CPU):
    """Its part of DeepSpeed's configuration takes the gradients away."""

    name = "deepspeed-clips"

    def precision(self, wish="auto"):
        return ClippedPrecision(torch.float32, "fp32", "the only one")


class CompilesLate(CPU):
    name = "compiles-late"
    _compiled = 0

    def compilations(self):
        self._compiled += 1
        return self._compiled
