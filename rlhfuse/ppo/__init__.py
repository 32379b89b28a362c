"""Rollout batches, advantages, losses, and the balanced cut into micro-batches."""
