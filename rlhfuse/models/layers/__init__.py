"""Parts of decoder layers: a file has the functions of CPU and torch, its neighbour _triton the kernels of GPUs."""
