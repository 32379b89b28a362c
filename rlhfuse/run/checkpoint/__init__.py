"""Checkpoints of a run: written asynchronously, committed by rename, read in any layout."""
