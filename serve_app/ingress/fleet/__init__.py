"""The fleet room is vLLM's engine client over many replicas: intake, attempts, links and their dialing."""
