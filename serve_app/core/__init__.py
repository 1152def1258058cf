"""The core makes the decisions: events come in, instructions go out. It knows no asyncio, sockets, clock, randomness, vLLM or Ray."""
