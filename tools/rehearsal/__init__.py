"""One rank of a real run on a CPU, as if on CUDA: shapes, devices, dtypes and memory without a GPU."""
