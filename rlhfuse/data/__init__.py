"""Prompt files, chat templates, deterministic order, reward functions."""
