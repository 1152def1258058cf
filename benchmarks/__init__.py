"""Benchmarks whose results stand in docs/benchmarks.md. Each prints the command, the machine and the versions it ran with."""
