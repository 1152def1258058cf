"""What stands between HTTP and the fleet: listener, vLLM's front end, `/generate`, client of the engine cores."""
