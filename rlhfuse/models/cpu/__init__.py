"""CPU kernels whose bits do not depend on the batch."""
