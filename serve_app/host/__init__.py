"""The host room holds what a process of ours needs from its machine: signals, file descriptors, logging, memory, and vLLM's start."""
