"""The ingress is between HTTP and the fleet: listener, vLLM's front end, `/generate`, and the client of the engine cores."""
