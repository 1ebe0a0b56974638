"""Benchmarks: ratios within one run, because machines are noisy; see ``docs/benchmarks.md``."""
