"""Compute row statistics in fused Triton kernels."""
