"""Sequences that move between engines with their KV cache."""
