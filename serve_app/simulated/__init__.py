"""A simulated accelerator is vLLM's engine with a timing model in place of the forward pass. docs/simulated.md describes it."""
