"""Routes map each path to its handler: vLLM's front ends, a canary, `/generate`, and our own answers."""
