"""A mini-batch as a problem of scheduling: its stages, its micro-batches, which backwards are split, in what order."""
