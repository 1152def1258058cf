"""A simulated accelerator: vLLM's engine with a timing model in place of the forward pass. See docs/simulated.md."""
