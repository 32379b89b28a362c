"""Parts of decoder layers: a file has the functions of the CPU and of torch, its neighbour _triton the GPU's kernels."""
