"""An accelerator plugin for Ascend NPUs: `plugin` finds them without torch, `backend` uses them through torch_npu."""
