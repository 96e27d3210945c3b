"""Benchmarks: each prints its table and writes JSON and PNG to benchmarks/results/."""
