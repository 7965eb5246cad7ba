"""A CPU in fp16 with dynamic loss scaling, as a GPU without bf16; DeepSpeed's CPU accelerator would refuse fp16."""

import os

import torch

from accelerators import Accelerator, DeviceInfo, Precision


class FP16(Precision):
    def deepspeed_config(self):
        power = int(os.environ.get("HALVES_SCALE_POWER", "16"))
        return {"fp16": super().deepspeed_config()["fp16"] | {"initial_scale_power": power, "hysteresis": 1}}


class Halves(Accelerator):
    name = "halves"
    deepspeed_name = "cpu"

    def bind(self, local_rank):
        return torch.device("cpu")

    def info(self):
        return DeviceInfo(model="Halves", count=1, software="none")

    def precision(self, wish="auto"):
        if wish == "fp32":
            return Precision(torch.float32, "fp32", "asked for")
        return FP16(torch.float16, "fp16", "the only one", loss_scaling=True)

    def deepspeed_accelerator(self):
        from accelerators import DeepSpeedDevice  # imports DeepSpeed

        return DeepSpeedDevice(self)
