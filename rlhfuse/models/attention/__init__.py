"""Attention: backends.py says whose kernels serve where, packed/ and paged/ have a file for each."""
