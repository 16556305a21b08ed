"""Benchmarks: which calls are timed, how, and how the numbers are reported."""
