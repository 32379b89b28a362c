"""What a rank holds in each phase of an iteration, what it may hold, and the cache that is left for generation."""
