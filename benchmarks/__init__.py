"""Benchmarks: each measures a ratio against a baseline taken in the same run."""
