"""Metrics, traces, the watchdog, and reports."""
