"""Benchmarks: each goal beside its baseline in one run, judged by ratios and CPU per operation."""
