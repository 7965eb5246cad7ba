"""An accelerator plugin for Intel GPUs: `plugin` finds them without torch, `backend` uses them through `torch.xpu`."""
