"""Benchmarks whose results stand in docs/benchmarks.md. The report of each holds the machine and the versions it ran with."""
