"""Gaudi's fused kernels, composed of PyTorch's operators."""
