"""Attention of packed sequences, for training and scoring."""
