"""What stands in for the rest of a run: its other ranks, its samples, its files, and what would happen once more."""
