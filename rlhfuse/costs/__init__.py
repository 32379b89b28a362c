"""Seconds and bytes of work: analytic, measured and profiled cost models."""
