"""Models and tokenizers: loading, the embedded model, forward passes, LoRA and quantization."""
