"""Benchmarks: what is checked, what is timed against what, and how results are written down."""
