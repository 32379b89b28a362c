"""The roles, algorithms and tasks of RLHF as tables of plain values."""
