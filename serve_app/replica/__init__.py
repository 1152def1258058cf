"""A replica is one vLLM engine core, its supervisor, the listener that ingresses link to, and its shards on other nodes."""
