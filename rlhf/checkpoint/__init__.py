"""Files that training writes: its state, models for transformers, LoRA adapters."""
