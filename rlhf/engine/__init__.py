"""DeepSpeed behind a small surface: processes, training engines, frozen models, checkpoints."""
