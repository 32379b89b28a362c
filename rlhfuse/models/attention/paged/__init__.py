"""Attention over the blocks of a cache, for generation."""
