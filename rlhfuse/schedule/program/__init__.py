"""Schedules lowered to one verified instruction stream per rank."""
