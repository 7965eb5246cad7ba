"""Models and tokenizers: loading, the embedded default, the two forward passes, and export."""
