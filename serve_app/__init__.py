"""LLM serving on Ray Serve and vLLM: one OpenAI-compatible front end over a fleet of engine cores."""

VERSION = "0.2.0"
