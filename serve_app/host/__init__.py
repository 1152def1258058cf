"""The host room holds what a process needs from its machine and libraries: SIGTERM, descriptors, logs, threads, clock, vLLM's start."""
