"""Forms in which work is priced, by Python and by compiled kernels alike."""
