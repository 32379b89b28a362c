"""Predicted time and memory of a run, and the migration threshold R_t."""
