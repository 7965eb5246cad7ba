"""The interface to DeepSpeed: processes, training engines, frozen models, checkpoints."""
