"""The plan derives the requests and their due times from a scenario file and its seed."""
