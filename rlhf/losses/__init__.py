"""The mathematics of the stages: pure functions of tensors, float32 inside, no loops over rows.

B sequences of T tokens have completions of A tokens. A prompt is padded left to P columns, so T = P + A and every
completion starts at column P. Position t of a [B, T-1] tensor refers to the token at column t + 1; the first
completion token is therefore at `start = P - 1`. Masks are 1 on real completion tokens (an end-of-sequence token is a
real action) and 0 elsewhere.

The definitions are those of DeepSpeed-Chat (arXiv:2308.01320), with explicit masks.
"""
