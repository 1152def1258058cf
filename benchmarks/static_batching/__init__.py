"""This package is the baseline of continuous batching: fixed batches on Ray Serve's `serve.batch`. See docs/benchmarks.md."""
