"""Routes map a path to what answers it: vLLM's front ends, a canary, `/generate`, and our own answers."""
