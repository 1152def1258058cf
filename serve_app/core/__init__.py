"""Pure decisions: no asyncio, sockets, clock, randomness, vLLM or Ray. Events come in, instructions go out."""
