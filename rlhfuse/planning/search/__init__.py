"""Layouts that are auto: the tables of layouts that a run can have, and the one that it gets."""
