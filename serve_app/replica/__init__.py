"""A replica is one vLLM engine core on one node, its supervisor, and the listener that ingresses link to."""
