"""What CPU kernels are made of."""
