"""The least that a backend has to say: the abstract methods."""

import torch

from accelerators import Accelerator, DeviceInfo, Memory, Precision


class Good(Accelerator):
    name = "good"
    deepspeed_name = "cpu"

    def bind(self, local_rank):
        return torch.device("cpu")

    def info(self):
        return DeviceInfo(model="Good One", count=2, software="none")

    def synchronize(self):
        pass

    def precision(self, wish="auto"):
        return Precision(torch.float32, "fp32", "the only one")

    def memory(self):
        return Memory(allocated=1, peak=2, total=3)
