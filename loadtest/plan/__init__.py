"""The plan: what a scenario file says, and the requests with their due times that follow from the file and its seed."""
