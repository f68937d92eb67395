"""The sweep as fused kernels: a statistic's scalar function becomes Triton source, launched for whole matrices."""
