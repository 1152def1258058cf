"""The baseline that continuous batching is measured against: fixed batches on Ray Serve's own `serve.batch`. See docs/benchmarks.md."""
