"""Measures what work costs on the machine at hand."""
