"""Schedules built by rule."""
