"""Executors of the two fusions: generation with inference, actor with critic training."""
