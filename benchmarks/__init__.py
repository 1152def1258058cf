"""The benchmarks produce the results in docs/benchmarks.md. The report of each names the machine and the versions of its run."""
