"""Kernels of our own for GPUs, in Triton, and those of libraries."""
