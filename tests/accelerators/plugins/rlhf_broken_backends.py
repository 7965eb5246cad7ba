"""The backends of `rlhf_broken`: the CPU's, with one fault each."""

import os

import rlhf_broken
import torch

from accelerators import AcceleratorError, DeepSpeedView, Precision
from accelerators.backends.cpu.backend import CPU

SlowProbe, ProbeNumbersDevices = (
    type(name, (CPU,), {"name": name, "__module__": __name__}) for name in ("SlowProbe", "ProbeNumbersDevices")
)


class ProbeOpensDevice(CPU):
    name = "ProbeOpensDevice"

    def bind(self, local_rank):
        if rlhf_broken.OPENED_BY not in (None, os.getpid()):
            raise RuntimeError("the device cannot be used in a forked process")
        return super().bind(local_rank)


class OneDevice(CPU):
    """Not broken: two ranks need two devices here."""

    name = "OneDevice"

    def bind(self, local_rank):
        if local_rank:
            raise AcceleratorError(f"local rank {local_rank}: there is one device")
        return super().bind(local_rank)


class OtherDistBackend(CPU):
    name = "OtherDistBackend"

    def dist_backend(self):
        return "nccl"


class DeepSpeedName(CPU):
    name = "DeepSpeedName"
    deepspeed_name = "chip"

    def prepare_deepspeed(self):
        return DeepSpeedView("none", "chip", "gloo", (), "0")


class ClippedPrecision(Precision):
    def deepspeed_config(self):
        return {"gradient_clipping": 1e-9}


class DeepSpeedClips(CPU):
    name = "DeepSpeedClips"

    def precision(self, wish="auto"):
        return ClippedPrecision(torch.float32, "fp32", "the only one")


class CompilesLate(CPU):
    name = "CompilesLate"
    _compiled = 0

    def compilations(self):
        self._compiled += 1
        return self._compiled


class Loud(CPU):
    """Not broken: it only prints."""

    name = "Loud"

    def memory(self):
        print("asked for memory")
        os.write(2, b"asked for memory\n")
        return super().memory()


class HalfAlone(CPU):
    """Not broken: a chip that computes in bf16 and nothing else."""

    name = "HalfAlone"
    deepspeed_name = "cpu"

    def precision(self, wish="auto"):
        if wish not in ("auto", "bf16"):
            raise AcceleratorError(f"precision {wish} on {self.name}: it multiplies bf16 alone; use auto or bf16")
        return Precision(torch.bfloat16, "bf16", "the only one")

    def deepspeed_accelerator(self):
        from accelerators import DeepSpeedDevice  # imports DeepSpeed

        return DeepSpeedDevice(self)
