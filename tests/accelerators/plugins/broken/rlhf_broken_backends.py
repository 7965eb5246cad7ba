"""The backends of `rlhf_broken`: the CPU's, each but for one fault."""

import os
import random
from dataclasses import replace

import rlhf_broken
import torch

from accelerators import AcceleratorError, DeepSpeedView, KernelImpl, Precision, ShapePolicy, Support
from accelerators.backends.cpu.backend import CPU

BF16 = Precision(torch.bfloat16, "bf16", "emulated")


def always(accelerator):
    return Support(True, "broken")


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


class FlagIsText(CPU):
    name = "flag-is-text"

    def pins_memory(self):
        return "no"


class UnknownCollectives(CPU):
    name = "unknown-collectives"

    def dist_backend(self):
        return "hcll"


class UnknownOperationAbsent(CPU):
    name = "unknown-operation-absent"
    absent = {"graph_captur": "none here"}  # noqa: RUF012


class FactoryRaises(CPU):
    name = "factory-raises"

    def kernel_implementations(self):
        def factory(accelerator):
            raise ImportError("libfast.so: no such file")

        return (
            *super().kernel_implementations(),
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


# processes


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
