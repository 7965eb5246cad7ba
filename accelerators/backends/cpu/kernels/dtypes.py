"""The numbers that C code of the cpu backend is compiled for."""

from __future__ import annotations

import torch

from accelerators.backends.cpu.kernels import compiler

DTYPES = {torch.float32: (), torch.bfloat16: (compiler.BF16,)}
"""Each with the compiler's flags."""
