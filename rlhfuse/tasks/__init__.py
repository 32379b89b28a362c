"""Roles, algorithms and tasks as tables of plain values, and the decisions about samples that all programs share."""
