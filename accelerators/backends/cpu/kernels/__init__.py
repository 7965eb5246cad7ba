"""The CPU's compiled and packed kernels."""
