"""The files of training: checkpoints, models for transformers, and LoRA adapters."""
