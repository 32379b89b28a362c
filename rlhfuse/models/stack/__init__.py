"""All decoder layers of a pipeline stage as one function, and its kernels on each device."""
