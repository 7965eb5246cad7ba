"""A backend of the abstract methods only."""

import torch

from accelerators import Accelerator, DeviceInfo, Precision


class Good(Accelerator):
    name = "good"
    deepspeed_name = "cpu"

    def bind(self, local_rank):
        return torch.device("cpu")

    def info(self):
        return DeviceInfo(model="Good One", count=2, software="none")

    def precision(self, wish="auto"):
        return Precision(torch.float32, "fp32", "the only one")
